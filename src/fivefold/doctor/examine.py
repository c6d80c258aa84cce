"""One rank's part in an examination."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from fivefold.calibrate.calibrate import device_name
from fivefold.doctor import machine, nvml
from fivefold.doctor.measure import matmul_rate, ring, sends
from fivefold.doctor.reports import RankReport
from fivefold.job.config import Job, job_from
from fivefold.launch import heartbeat, ranks
from fivefold.launch import world as worlds
from fivefold.launch.device import DTYPES, choose_backend, choose_device, make_repeatable, precision_of
from fivefold.launch.numa import bind, pci_address
from fivefold.launch.statement import claim
from fivefold.layout.axes import PLACED
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.messages import to_first
from fivefold.support.documents import path_of
from fivefold.trace.tracer import against_rank_0

PURPOSE = "an examination"
_SUSTAINED = {"cuda": 2.0, "cpu": 0.5}  # seconds of matmuls


def here(rank: ranks.Rank, table: dict[str, object]) -> RankReport:
    """As one of the ranks that this machine has started for it."""
    job = job_from(table)
    device = choose_device(job.train.device, rank.number)
    bind(device, worlds.World(rank.number, rank.world, rank.number, rank.world))
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    return examine(job, Mesh.of(job.layout, device, spec=job.model), rank.number == 0)


def joined(job: Job, world: worlds.World) -> list[RankReport]:
    """As one of the ranks that torchrun or Slurm has started: all reports on rank 0, none on the others."""
    device = choose_device(job.train.device, world.local_rank)
    bind(device, world)
    with heartbeat.watched(job.train.timeout, world.rank, world.size):
        proof = claim(job, Path(), world, PURPOSE)
        backend = choose_backend(device, world.local_size, job.train, world.rank, world.apart)
        worlds.join(world, backend, job.train.timeout, proof)
        try:
            mesh = Mesh.of(job.layout, device, job.train.timeout, spec=job.model)
            mine = examine(job, mesh, world.local_rank == 0)
            return to_first(mine, RankReport, mesh.world.group) if world.size > 1 else [mine]
        finally:
            worlds.leave(world)


def examine(job: Job, mesh: Mesh, first: bool) -> RankReport:
    """Measure together with all other ranks, which call it, too. `first`: of its node."""
    make_repeatable(job.train)
    device, world = mesh.device, mesh.world

    def together(place: str) -> None:
        heartbeat.enter(place)
        if world.size > 1:
            dist.barrier(world.group)

    together("the comparison of clocks")
    node = machine.node_name()
    offset, unsure = against_rank_0(mesh, time.time, node)
    together("matmuls")
    rate = matmul_rate(device, DTYPES[job.train.dtype], _SUSTAINED[device.type])
    gpu = nvml.look(pci_address(device.index)) if device.type == "cuda" else None
    together("the disk under run.dir")
    disk = machine.try_disk(path_of(job.run.dir)) if first else None
    amounts = machine.amounts()
    if device.type == "cuda":
        amounts["GPU memory"] = torch.cuda.mem_get_info(device)[0]
    report = RankReport(
        rank=world.rank,
        node=node,
        cpu=device.type == "cpu",
        device=device_name(device),
        precision=precision_of(job.train.dtype, device),
        rate=rate,
        versions=machine.versions(device.type == "cuda"),
        amounts=amounts,
        ahead=-offset,
        unsure=unsure,
        disk=disk,
        gpu=gpu,
        host_id=machine.host_id() if device.type == "cuda" else "",
    )
    return _with_links(report, mesh, together)


def _with_links(report: RankReport, mesh: Mesh, together: Callable[[str], None]) -> RankReport:
    rings, found = [], []
    for name in PLACED:
        axis = getattr(mesh, name)
        if axis.size == 1:
            continue
        together(f"the links of {name}")
        device = torch.device("cpu") if axis.staged else mesh.device
        measured = ring(axis, device)
        rings += [measured] if axis.rank == 0 else []
        together(f"messages along {name}")
        found += sends(axis, device)
    return msgspec.structs.replace(report, rings=rings, sends=found)
