"""`fivefold calibrate`: the constants of `hardware.efficiency.Achieved`, measured on the device at hand.

    calibration = calibrate("cuda")
    calibration.accelerator                   # with them in it, for the planner
    calibration.rows                          # what was measured, of which ceiling, and how well it is reproduced
    usual_core(core_samples(16), 16)          # a core of this machine while sixteen are at work

Every constant is the one with which the planner's own formula gives the measured times best; how well it does is part
of the answer. Where the catalogue knows the device, its ceilings stand and shares are of them. Otherwise, and on a CPU,
whose entry there is nominal, the best that was measured becomes the ceiling.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec import structs

from fivefold.calibrate.clock import Timing
from fivefold.calibrate.fit import ATTENTION, Samples, fitted
from fivefold.calibrate.kernels import Kernels
from fivefold.calibrate.result import CalibrationResult, short
from fivefold.hardware.accelerators import ACCELERATORS, LINKS, Accelerator, Rates, find_accelerator
from fivefold.launch import ranks
from fivefold.launch.cores import cores
from fivefold.launch.device import choose_device
from fivefold.plan.cost.memory import host_memory
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted

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

    def told(what: str) -> None:
        progress(STEPS.index(what), len(STEPS), what)

    samples = measure(chosen, quick, told)
    told(STEPS[-1])
    world = torch.cuda.device_count() if chosen.type == "cuda" else min(2, cores())
    return _fitted(chosen, samples, quick, world)


def core_samples(busy: int) -> list[Samples]:
    """Of cores of this machine while `busy` of them do the same: they share its memory, so each has less of it."""
    by_rank: list[list[Samples]] = ranks.run(busy, "fivefold.calibrate.calibrate:busy_core", ROUNDS, timeout=600)
    return [one for mine in by_rank for one in mine]


def busy_core(rank: ranks.Rank, rounds: int) -> list[Samples]:
    """One of several ranks that are measured while all of them are at work."""
    torch.set_num_threads(1)
    if rank.world > 1:
        rank.join("gloo")
        dist.barrier()
    return [measure(torch.device("cpu"), quick=True, told=lambda _: None) for _ in range(rounds)]


def usual_core(found: list[Samples], busy: int) -> Accelerator:
    """The median one. The more moments of a noisy machine, the better."""
    return _fitted(torch.device("cpu"), usual_samples(found), quick=True, world=busy).accelerator


def usual_samples(found: list[Samples]) -> Samples:
    """The median one, by its matmuls in a block; with the medians of what is short, and so the noisiest."""
    every = sorted(found, key=lambda one: list(one.blocks.values())[-1].products)
    ahead, back = (median(one.host[way] for one in every) for way in (0, 1))
    return replace(every[len(every) // 2], host=(ahead, back), update=median(one.update for one in every))


def _fitted(device: torch.device, samples: Samples, quick: bool, world: int) -> CalibrationResult:
    """With links between `world` ranks as they are measured now. One GPU has nobody to talk to."""
    links: list[Timing] = []
    if world > 1:
        sizes, rounds = links_between(device, quick)
        links = ranks.run(world, "fivefold.calibrate.clock:collectives", sizes, rounds, device.type, timeout=300)[0]
    base = ceilings(device, max(one.rate for one in samples.products), max(samples.streams.values()))
    return fitted(base, samples, (world, links))


def links_between(device: torch.device, quick: bool) -> tuple[tuple[int, ...], int]:
    """Bytes of the collectives that are timed, and how often."""
    powers = (10, 22) if quick else (10, 16, 20, 24, 26 if device.type == "cpu" else 28)
    return tuple(1 << power for power in powers), 5 if quick else 15


def measure(device: torch.device, quick: bool, told: Callable[[str], None]) -> Samples:
    """What this process reaches by itself."""
    torch.manual_seed(0)
    kernels, steps = Kernels(device, quick), iter(STEPS)

    def step(call: Callable[[], T]) -> T:
        told(next(steps))
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
