"""`fivefold calibrate`: the constants of `hardware.accelerators.Achieved`, measured on the device at hand.

    calibration = calibrate("cuda")
    calibration.accelerator                   # with them in it, for the planner
    calibration.rows                          # what was measured, of which ceiling, and how well it is reproduced
    usual_core(core_samples(16), 16)          # a core of this machine while sixteen are at work

Every constant is the one with which the planner's own formula gives the measured times best; how well it does is part
of the answer. Where the catalogue knows the device, its ceilings stand and shares are of them. Otherwise, and on a CPU,
whose entry there is nominal, the best that was measured becomes the ceiling.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec import structs

from fivefold.cost.model_state import host_memory
from fivefold.hardware.accelerators import ACCELERATORS, LINKS, Accelerator, Rates, find_accelerator
from fivefold.job.config import read_job
from fivefold.launch import heartbeat, processes
from fivefold.launch import world as worlds
from fivefold.launch.device import DTYPES, choose_backend, choose_device
from fivefold.launch.handshake import claim
from fivefold.launch.host import cores
from fivefold.machines.clock import Clock, Timing, timed_collectives
from fivefold.machines.fit import ATTENTION, Samples, fitted
from fivefold.machines.kernels import Kernels, block_of, of_device
from fivefold.machines.result import CalibrationResult, RankSpeed, RanksResult, at_pace, short
from fivefold.model.ops import LocalOps
from fivefold.parallel.control import gather_values
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.text import counted

T = TypeVar("T")
ROUNDS = 3  # of a core: a machine that has other work for a moment spoils one
STEPS = (
    *("products for seconds", "a sweep of products", "fp8", "attention", "a block in training"),
    *("streams", "launches", "collectives"),
)


def calibrate(
    device: str | torch.device = "auto",
    quick: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> CalibrationResult:
    """Measure what kernels and collectives reach here, and fit the planner's constants to it.

    `progress` is told how many of STEPS are done, of how many, and which one begins.
    """
    chosen = choose_device(device) if isinstance(device, str) else device
    ceilings(chosen, 1.0, 1.0).rate("bf16")  # refused before minutes are spent: the planner counts in it

    def report(what: str) -> None:
        progress(STEPS.index(what), len(STEPS), what)

    samples = measure(chosen, quick, report)
    report(STEPS[-1])
    world = torch.cuda.device_count() if chosen.type == "cuda" else min(2, cores())
    return _fitted(chosen, samples, quick, world)


def core_samples(busy: int) -> list[Samples]:
    """Of cores of this machine while `busy` of them do the same: they share its memory, so each has less of it."""
    by_rank: list[list[Samples]] = processes.run(busy, "fivefold.machines.calibrate:busy_core", ROUNDS, timeout=600)
    return [samples for of_rank in by_rank for samples in of_rank]


def busy_core(rank: processes.Rank, rounds: int) -> list[Samples]:
    """One of several ranks that are measured while all of them are at work."""
    torch.set_num_threads(1)
    if rank.world > 1:
        rank.join("gloo")
        dist.barrier()
    return [measure(torch.device("cpu"), quick=True, report=lambda _: None) for _ in range(rounds)]


def usual_core(samples: list[Samples], busy: int) -> Accelerator:
    """The median one. The more moments of a noisy machine, the better."""
    return _fitted(torch.device("cpu"), usual_samples(samples), quick=True, world=busy).accelerator


def usual_samples(samples: list[Samples]) -> Samples:
    """The median one, by its matmuls in a block; with the medians of what is short, and so the noisiest."""
    by_speed = sorted(samples, key=lambda sample: list(sample.blocks.values())[-1].products)
    ahead, back = (median(sample.host[way] for sample in by_speed) for way in (0, 1))
    return replace(
        by_speed[len(by_speed) // 2], host=(ahead, back), update=median(sample.update for sample in by_speed)
    )


def _fitted(device: torch.device, samples: Samples, quick: bool, world: int) -> CalibrationResult:
    """With links between `world` ranks as they are measured now. One GPU has nobody to talk to."""
    links: list[Timing] = []
    if world > 1:
        sizes, rounds = links_between(device, quick)
        links = processes.run(world, "fivefold.machines.clock:collectives", sizes, rounds, device.type, timeout=300)[0]
    base = ceilings(device, max(timing.rate for timing in samples.products), max(samples.streams.values()))
    return fitted(base, samples, (world, links))


def links_between(device: torch.device, quick: bool) -> tuple[tuple[int, ...], int]:
    """Bytes of the collectives that are timed, and how often."""
    powers = (10, 22) if quick else (10, 16, 20, 24, 26 if device.type == "cpu" else 28)
    return tuple(1 << power for power in powers), 5 if quick else 15


def measure(device: torch.device, quick: bool, report: Callable[[str], None]) -> Samples:
    """What this process reaches by itself."""
    torch.manual_seed(0)
    kernels, steps = Kernels(device, quick), iter(STEPS)

    def step(call: Callable[[], T]) -> T:
        report(next(steps))
        return call()

    names = list(ATTENTION) if device.type == "cuda" else ["flash2"]  # a CPU has one kernel
    alone = step(kernels.sustained)
    products = step(lambda: list(kernels.products()))
    eighths = step(lambda: list(kernels.eighths()))
    attention = step(lambda: {name: kernels.attention(name) for name in names})
    blocks = step(lambda: {name: kernels.in_block(name) for name, timings in attention.items() if timings})
    ran = {name: block for name, block in blocks.items() if block is not None}
    streams = step(kernels.streams)
    launch, host = step(kernels.launch), kernels.host()
    update = kernels.update() if device.type == "cpu" else 0.0
    units = torch.get_num_threads()
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    name = device_name(device)
    return Samples(name, units, alone, products, eighths, attention, ran, streams, launch, host, update)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"a CPU, {counted(torch.get_num_threads(), 'thread')}"


def ceilings(device: torch.device, rate: float, bandwidth: float) -> Accelerator:
    """The catalogue's entry, or one with the best that was measured in its place."""
    if device.type == "cpu":
        each = Rates(fp64=short(rate / 2), fp32=short(rate), bf16=short(rate), fp16=short(rate))
        return structs.replace(ACCELERATORS["CPU"], peak=each, memory=host_memory(), memory_bandwidth=short(bandwidth))
    try:
        return find_accelerator(device_name(device))
    except UserError:
        return Accelerator(
            name=device_name(device),
            peak=Rates(bf16=short(rate), fp16=short(rate)),
            memory=int(torch.cuda.get_device_properties(device).total_memory),
            memory_bandwidth=short(bandwidth),
            inside=LINKS["PCIe4"],  # assumptions: what a card of a maker unknown to us has at least
            across=LINKS["Ethernet-10G"],
        )


# ---- on ranks -------------------------------------------------------------------------------------------------------
# `fivefold calibrate --ranks`: each rank's own speed, measured while all of them are at work.
#
# Ranks of one machine share its memory, so one that is measured alone is faster than it will be. All begin a round
# together and run the block of a model for the same time; then each measures what the planner wants to know of it.


PURPOSE = "a calibration"
_PACE = {"cuda": 2.0, "cpu": 1.5}  # seconds of a round in which ranks run blocks at once
_LONGEST = 900.0  # seconds for the ranks of this machine


def calibrate_ranks(device: str = "auto", nproc: int | None = None, quick: bool = False) -> RanksResult:
    """The speeds of `nproc` ranks of this machine (default: one for each GPU or core), measured at once."""
    chosen = choose_device(device)
    size = nproc or (torch.cuda.device_count() if chosen.type == "cuda" else cores())
    if size < 2:
        raise UserError(f"--nproc {size} has nothing to compare with; nearest: --nproc 2")
    speeds = processes.run(size, "fivefold.machines.calibrate:here", device, quick, timeout=_LONGEST)
    return RanksResult(speeds)


def here(rank: processes.Rank, device: str, quick: bool) -> RankSpeed:
    """As one of the ranks that this machine has started for it."""
    chosen = choose_device(device, rank.number)
    rank.join(choose_backend(chosen, rank.world))
    return measured(chosen, rank.world, quick)


def joined(world: worlds.World, device: str, quick: bool) -> RanksResult | None:
    """As one of the ranks that torchrun or Slurm has started; rank 0 has the result."""
    chosen, job = choose_device(device, world.local_rank), read_job(None, [])
    with heartbeat.watched(_LONGEST, world.rank, world.size):
        worlds.join(world, choose_backend(chosen, world.local_size), job.train.timeout, claim(job, "", world, PURPOSE))
        try:
            speeds = gather_values(measured(chosen, world.local_size, quick), RankSpeed)
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
        samples.append(measure(device, quick=device.type == "cpu" or quick, report=lambda _: None))
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
        end, seconds = time.perf_counter() + _PACE[device.type] / (2 if quick else 1), [once()]
        while time.perf_counter() < end:
            seconds.append(once())
        return median(seconds)

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
    base = ceilings(device, max(timing.rate for timing in samples.products), max(samples.streams.values()))
    accelerator = fitted(base, samples, (world, links)).accelerator
    if device.type == "cpu":  # ranks of a node share its memory
        accelerator = structs.replace(accelerator, memory=accelerator.memory // neighbours)
    if links:  # the groups of one node are joined by what joins its ranks
        accelerator = structs.replace(accelerator, across=accelerator.inside)
        assert accelerator.achieved is not None
        accelerator = structs.replace(
            accelerator, achieved=structs.replace(accelerator.achieved, across=accelerator.achieved.inside)
        )
    return accelerator
