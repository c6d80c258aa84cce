"""`fivefold calibrate --ranks`: each rank's own speed, measured while all of them are at work.

Ranks of one machine share its memory, so one that is measured alone is faster than it will be. All begin a round
together and run the block of a model for the same time; then each measures what the planner wants to know of it.
"""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from msgspec import structs

from fivefold.calibrate.block import block_of, of_device
from fivefold.calibrate.calibrate import ceilings, device_name, links_between, measure, usual_samples
from fivefold.calibrate.clock import Clock, timed_collectives
from fivefold.calibrate.fit import Samples, fitted
from fivefold.calibrate.speeds import RankSpeed, RanksResult, at_pace
from fivefold.hardware.accelerators import Accelerator
from fivefold.job.config import read_job
from fivefold.launch import heartbeat, ranks
from fivefold.launch import world as worlds
from fivefold.launch.cores import cores
from fivefold.launch.device import DTYPES, choose_backend, choose_device
from fivefold.launch.statement import claim
from fivefold.model.ops import LocalOps
from fivefold.parallel.messages import to_first
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

PURPOSE = "a calibration"
ROUNDS = 3
_PACE = {"cuda": 2.0, "cpu": 1.5}  # seconds of a round in which ranks run blocks at once
_LONGEST = 900.0  # seconds for the ranks of this machine


def calibrate_ranks(device: str = "auto", nproc: int | None = None, quick: bool = False) -> RanksResult:
    """The speeds of `nproc` ranks of this machine (default: one for each GPU or core), measured at once."""
    chosen = choose_device(device)
    size = nproc or (torch.cuda.device_count() if chosen.type == "cuda" else cores())
    if size < 2:
        raise UserError(f"--nproc {size} has nobody to be compared with; nearest: --nproc 2")
    speeds = ranks.run(size, "fivefold.calibrate.on_ranks:here", device, quick, timeout=_LONGEST)
    return RanksResult(speeds)


def here(rank: ranks.Rank, device: str, quick: bool) -> RankSpeed:
    """As one of the ranks that this machine has started for it."""
    chosen = choose_device(device, rank.number)
    rank.join(choose_backend(chosen, rank.world))
    return measured(chosen, rank.world, quick)


def joined(world: worlds.World, device: str, quick: bool) -> RanksResult | None:
    """As one of the ranks that torchrun or Slurm has started; rank 0 has the result."""
    chosen, job = choose_device(device, world.local_rank), read_job(None, [])
    with heartbeat.watched(_LONGEST, world.rank, world.size):
        worlds.join(
            world, choose_backend(chosen, world.local_size), job.train.timeout, claim(job, Path(), world, PURPOSE)
        )
        try:
            speeds = to_first(measured(chosen, world.local_size, quick), RankSpeed)
        finally:
            worlds.leave(world)
    return RanksResult(speeds) if speeds else None


def measured(device: torch.device, neighbours: int, quick: bool) -> RankSpeed:
    """Of this rank; collective over all. `neighbours`: ranks of this node, itself among them."""
    runs, paces, samples = pace_of(device, quick), list[float](), list[Samples]()
    for _ in range(1 if quick else ROUNDS):
        dist.barrier()
        paces.append(runs())
        dist.barrier()
        samples.append(measure(device, quick=device.type == "cpu" or quick, told=lambda _: None))
    if len(paces) == 1:  # a single figure says nothing of the noise
        dist.barrier()
        paces.append(runs())
    accelerator = _accelerator(device, usual_samples(samples), neighbours)
    if device.type == "cpu":
        accelerator = at_pace(accelerator, median(paces), *_block(device))
    return RankSpeed(dist.get_rank(), platform.node(), device_name(device), paces, accelerator)


def pace_of(device: torch.device, quick: bool) -> Callable[[], float]:
    """A call that runs blocks for a while: the median seconds of one, forward and backward."""
    clock = Clock(device, 0.0)
    spec, samples, seq = _block(device)
    dtype = DTYPES["bfloat16" if clock.on_gpu else "float32"]
    block, x, forward = block_of(spec, LocalOps(), samples, seq, device, dtype)
    output_grad = torch.randn_like(x)

    def once() -> float:
        start = clock.now()
        forward().backward(output_grad)
        block.zero_grad(set_to_none=True)
        x.grad = None
        return clock.between(start, clock.now())

    def runs() -> float:
        end, found = time.perf_counter() + _PACE[device.type] / (2 if quick else 1), [once()]
        while time.perf_counter() < end:
            found.append(once())
        return median(found)

    once()
    return runs


def _block(device: torch.device) -> tuple[ModelSpec, int, int]:
    return of_device(device.type == "cuda", quick=True)


def _accelerator(device: torch.device, samples: Samples, neighbours: int) -> Accelerator:
    """With the links that all ranks have just measured, where they are on one node; else the catalogue's."""
    world, links = dist.get_world_size(), []
    if neighbours == world:
        on_gpu = device.type == "cuda" and dist.get_backend() == "nccl"
        links = timed_collectives(device if on_gpu else torch.device("cpu"), *links_between(device, quick=True))
    base = ceilings(device, max(one.rate for one in samples.products), max(samples.streams.values()))
    found = fitted(base, samples, (world, links)).accelerator
    if device.type == "cpu":  # ranks of a node share its memory
        found = structs.replace(found, memory=found.memory // neighbours)
    if links:  # the groups of one node are joined by what joins its ranks
        found = structs.replace(found, across=found.inside)
        assert found.achieved is not None
        found = structs.replace(found, achieved=structs.replace(found.achieved, across=found.achieved.inside))
    return found
