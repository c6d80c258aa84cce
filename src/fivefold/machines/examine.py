"""One rank's part in `fivefold doctor`: its measurements, and a short form of them before a run's first step."""

import time
from collections.abc import Callable, Iterator
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from fivefold.cost.collective_time import Kind, wire
from fivefold.job.config import Job
from fivefold.job.reading import job_from
from fivefold.launch import faults, group, heartbeat, processes
from fivefold.launch import world as worlds
from fivefold.launch.device import (
    TORCH_DTYPES,
    bind,
    check_shared_gpu,
    choose_backend,
    choose_device,
    make_repeatable,
    matmul_precision,
    pci_address,
)
from fivefold.launch.handshake import claim
from fivefold.launch.watchdog import watch
from fivefold.layout.axes import PLACEMENT_ORDER
from fivefold.machines import node as this_node
from fivefold.machines.calibrate import device_name
from fivefold.machines.clock import Clock, timed_collectives
from fivefold.machines.judge import Examination, RankReport, RingReport, Send, clocks, host_ids, slow_ranks
from fivefold.machines.node import host_id, node_name
from fivefold.parallel.control import Control, gather_values
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.support.parsing import path_of
from fivefold.tracing.clock_offset import clock_offset

# ---- measure --------------------------------------------------------------------------------------------------------
# What a rank measures: its matmuls, and the links of every axis of its mesh.


_WIDTH = {"cuda": 4096, "cpu": 384}  # of square matrices
_AT_ONCE = {"cuda": 8, "cpu": 1}  # matmuls that are timed as one: about 2 ms of a datacenter GPU, and of a core
_LEAST = 10  # rounds of matmuls
_ROUNDS = 5  # rounds of messages
_SIZES = {"cuda": (1 << 10, 1 << 20, 1 << 27), "cpu": (1 << 10, 1 << 20, 1 << 23)}  # bytes


def usual(device: torch.device) -> Callable[[list[float]], float]:
    """Which of several times counts: on a CPU, which has other work in between, the shortest, which was not disturbed;
    on a GPU, which is the rank's own and gets slower as it heats up, the median."""
    return median if device.type == "cuda" else min


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of matmuls that run for so many seconds."""
    width, count, clock, times = _WIDTH[device.type], _AT_ONCE[device.type], Clock(device, 0.0), list[float]()
    generator = torch.Generator(device).manual_seed(0)  # not zeros, which draw less power; not the run's own numbers
    a, b = (torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2))
    out = a @ b
    clock.synchronize()
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        faults.strike("matmul")
        for _ in range(count):
            torch.mm(a, b, out=out)
        clock.synchronize()
        times.append(time.perf_counter() - start)
    return 2.0 * width**3 * count / usual(device)(times[len(times) // 2 :] if device.type == "cuda" else times)


def ring(axis: Axis, device: torch.device) -> RingReport:
    """Time the collectives of this rank's group on an axis. All ranks of the group call it."""
    timings = timed_collectives(device, _SIZES[device.type], _ROUNDS, axis.group, usual(device))

    def bandwidth(kind: Kind) -> float:
        """Bytes/s that a rank passes on, for the largest payload."""
        _, payload, seconds = max(timing for timing in timings if timing[0] == kind)
        return float(wire(kind, payload, axis.size)) / seconds

    latency = min(seconds for kind, _, seconds in timings if kind == "all-reduce")
    return RingReport(axis.name, axis.ranks, latency, bandwidth("all-reduce"), bandwidth("all-gather"), timings)


def sends(axis: Axis, device: torch.device) -> list[Send]:
    """Time a message from this rank to the next of its group and back; a rank that is slow in one direction then has
    two slow links. All ranks of the group call it."""
    measured = []
    payload = torch.ones(_SIZES[device.type][-1] // 4, device=device)
    for turn in turns(axis.size):
        dist.barrier(axis.group)
        for first, second in turn:
            if axis.rank not in (first, second):
                continue
            times = []
            for _ in range(_ROUNDS + 1):
                start = time.perf_counter()
                faults.strike("link")
                if axis.rank == first:
                    dist.send(payload, group=axis.group, group_dst=second)
                    dist.recv(payload, group=axis.group, group_src=second)
                else:
                    dist.recv(payload, group=axis.group, group_src=first)
                    dist.send(payload, group=axis.group, group_dst=first)
                payload[0].item()  # on a GPU this waits for the message
                times.append(time.perf_counter() - start)
            if axis.rank == first:
                pair = axis.ranks[first], axis.ranks[second]
                measured.append(Send(axis.name, pair, 2 * payload.nbytes / usual(device)(times[1:])))
    return measured


def turns(size: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs of neighbours around a ring, in turns: within one turn no rank is in two pairs."""
    pairs = [(rank, (rank + 1) % size) for rank in range(size if size > 2 else size - 1)]
    last = [pairs.pop()] if size % 2 and size > 2 else []
    for turn in (pairs[::2], pairs[1::2], last):
        if turn:
            yield turn


# ---- examine --------------------------------------------------------------------------------------------------------


PURPOSE = "an examination"
_SUSTAINED = {"cuda": 2.0, "cpu": 0.5}  # seconds of matmuls


def local_rank_report(rank: processes.Rank, table: dict[str, object]) -> RankReport:
    """What each rank runs that `doctor` has started on this machine."""
    job = job_from(table)
    device = choose_device(job.train.device, rank.number)
    bind(device, worlds.World(rank.number, rank.world, rank.number, rank.world))
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    return examine(job, Mesh.of_job(job, device), first_of_node=rank.number == 0)


def launched_rank_reports(job: Job, world: worlds.World) -> list[RankReport]:
    """What each rank runs that torchrun or Slurm has started. Returns all reports on rank 0, none on the others."""
    device = choose_device(job.train.device, world.local_rank)
    bind(device, world)
    with watch(job.train.timeout, world.rank, world.size):
        proof = claim(job, "", world, PURPOSE)
        apart = world.apart and world.size > 1
        backend = choose_backend(device, world.local_size, job.train, world.rank, apart)
        group.join(world, backend, job.train.timeout, proof)
        try:
            check_shared_gpu(job.train, device, world)
            mesh = Mesh.of_job(job, device, job.train.timeout)
            report = examine(job, mesh, first_of_node=world.local_rank == 0)
            return gather_values(report, RankReport, mesh.world.group) if world.size > 1 else [report]
        finally:
            group.leave(world)


def examine(job: Job, mesh: Mesh, *, first_of_node: bool) -> RankReport:
    """Measures this rank; collective over all."""
    make_repeatable(job.train)
    device, world = mesh.device, mesh.world

    def begin(place: str) -> None:
        heartbeat.enter(place)
        if world.size > 1:
            dist.barrier(world.group)

    begin("the comparison of clocks")
    node = this_node.node_name()
    offset, unsure = clock_offset(mesh, time.time, node)
    begin("matmuls")
    rate = matmul_rate(device, TORCH_DTYPES[job.train.dtype], _SUSTAINED[device.type])
    gpu = this_node.gpu_state(pci_address(device.index)) if device.type == "cuda" else None
    begin("the disk under run.dir")
    disk = this_node.try_disk(path_of(job.run.dir)) if first_of_node else None
    amounts = this_node.amounts()
    if device.type == "cuda":
        amounts["GPU memory"] = torch.cuda.mem_get_info(device)[0]
    report = RankReport(
        rank=world.rank,
        node=node,
        cpu=device.type == "cpu",
        device=device_name(device),
        precision=matmul_precision(job.train.dtype, device),
        rate=rate,
        versions=this_node.versions(device.type == "cuda"),
        amounts=amounts,
        ahead=-offset,
        unsure=unsure,
        disk=disk,
        gpu=gpu,
        gpu_id=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        host_id=this_node.host_id(),  # on CPUs, too: jobs inherit the environment of a login node
    )
    return _with_links(report, mesh, begin)


def _with_links(report: RankReport, mesh: Mesh, begin: Callable[[str], None]) -> RankReport:
    """The report with the measured links of every axis."""
    rings, messages = [], []
    for name in PLACEMENT_ORDER:
        axis = getattr(mesh, name)
        if axis.size == 1:
            continue
        begin(f"the links of {name}")
        device = torch.device("cpu") if axis.staged else mesh.device
        ring_report = ring(axis, device)
        if axis.rank == 0:
            rings.append(ring_report)
        begin(f"messages along {name}")
        messages += sends(axis, device)
    return msgspec.structs.replace(report, rings=rings, sends=messages)


# ---- before step 1 --------------------------------------------------------------------------------------------------
# The part of an examination that costs next to nothing, before the first step of a run with several ranks.
#
# Each rank times a few matmuls and reads its clock; values travel through the store, and no collective is called. Rank
# 0 gets a sentence for each rank that is much slower than its peers, for each node whose clock is off, and for an
# NCCL_HOSTID that would turn off NVLink.


_SECONDS = 0.03  # of matmuls
_LOOKS = 2  # at the clocks: the smaller difference counts


def before_step_1(job: Job, mesh: Mesh, control: Control) -> list[str]:
    """Returns sentences about outliers on rank 0, nothing on the others. All ranks call it."""
    if mesh.world.size == 1:
        return []
    rate = matmul_rate(mesh.device, TORCH_DTYPES[job.train.dtype], _SECONDS)
    if mesh.device.type == "cuda":  # these matmuls must not count in the peak memory that the run reports
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(mesh.device)
    times = []
    for _ in range(_LOOKS):
        control.all_gather_values(0, int)  # all ranks return from it at almost the same moment
        times.append(time.time())
    nccl_host_id = host_id() if mesh.device.type == "cuda" else ""
    of_ranks = control.gather_values((node_name(), rate, times, nccl_host_id), tuple[str, float, list[float], str])
    reports, cpu, unsure = [], mesh.device.type == "cpu", 2 * control.pause
    for rank, (node, rank_rate, rank_times, rank_host_id) in enumerate(of_ranks):
        ahead = min((theirs - ours for theirs, ours in zip(rank_times, times, strict=True)), key=abs)
        reports.append(RankReport(rank, node, cpu, "", "", rank_rate, {}, {}, ahead, unsure, host_id=rank_host_id))
    examination = Examination(job, reports)
    return [*slow_ranks(examination), *clocks(examination), *host_ids(examination)] if reports else []
