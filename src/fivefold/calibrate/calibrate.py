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
from dataclasses import asdict, dataclass, replace
from datetime import date
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec import structs

from fivefold.calibrate.block import BlockTiming
from fivefold.calibrate.fit import (
    ATTENTION,
    fit_attention,
    fit_block,
    fit_eighths,
    fit_links,
    fit_products,
    short,
    stream_row,
    tera,
    within,
)
from fivefold.calibrate.kernels import AttentionTiming, Kernels, Matmul
from fivefold.calibrate.links import Timing
from fivefold.calibrate.result import CalibrationResult, Row
from fivefold.hardware.accelerators import ACCELERATORS, LINKS, Accelerator, Rates, find_accelerator
from fivefold.hardware.efficiency import achieved
from fivefold.launch import ranks
from fivefold.launch.cores import cores
from fivefold.launch.device import choose_device
from fivefold.plan.cost.memory import host_memory
from fivefold.support.errors import UserError

T = TypeVar("T")
ROUNDS = 3  # of a core: a machine that has other work for a moment spoils one
STEPS = (
    *("products for seconds", "a sweep of products", "fp8", "attention", "a block in training"),
    *("streams", "launches", "collectives"),
)


@dataclass(frozen=True)
class Samples:
    """The timings themselves."""

    name: str  # of the device
    units: int
    alone: float  # FLOP/s of large products, back to back for seconds
    products: list[Matmul]
    fp8: list[Matmul]
    attention: dict[str, list[AttentionTiming]]
    blocks: dict[str, BlockTiming]
    streams: dict[str, float]  # bytes/s
    launch: float
    host: tuple[float, float]  # a block's forward and backward pass
    update: float  # of a parameter, on a CPU; 0 on a GPU, where memory bounds it


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
    return _fitted(chosen, samples, _links(chosen, quick, world))


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
    """The median one, with links as they are measured now. The more moments of a noisy machine, the better."""
    every = sorted(found, key=lambda one: one.blocks["flash2"].products)
    usual = every[len(every) // 2]
    ahead, back = (median(one.host[way] for one in every) for way in (0, 1))  # short, and so the noisiest
    usual = replace(usual, host=(ahead, back), update=median(one.update for one in every))
    cpu = torch.device("cpu")
    return _fitted(cpu, usual, _links(cpu, quick=True, world=busy)).accelerator


def _fitted(device: torch.device, samples: Samples, links: tuple[int, list[Timing]]) -> CalibrationResult:
    base = ceilings(device, max(p.rate for p in samples.products), max(samples.streams.values()))
    stream = short(median(samples.streams.values()) / base.memory_bandwidth)
    found = structs.replace(achieved(base.name), launch=short(samples.launch), units=samples.units, stream=stream)
    if device.type == "cpu":  # what a kernel's launch takes is part of the host's time, which is added
        found = structs.replace(found, launch=0.0, host=short(fmean(samples.host)), update=short(samples.update))
    rows: list[Row] = []
    found = fit_products(base, found, samples.products, rows)
    share = samples.alone / base.rate("bf16")
    rows.append(Row("gemm, sustained", tera(samples.alone), share, note="nothing but large products, for seconds"))
    found = fit_eighths(base, found, samples.fp8, rows)
    for name, timings in samples.attention.items():
        found = fit_attention(base, found, name, timings, rows)
    found = fit_block(base, found, samples.blocks, rows)
    if device.type != "cuda":
        found = structs.replace(found, flash3=found.flash2)
    rows.append(stream_row(samples.streams, stream))
    rows.append(Row("launch", f"{samples.launch * 1e6:.2f} us", note="from one tiny kernel to the next"))
    ahead, back = (f"{seconds * 1e3:.3f} ms" for seconds in samples.host)
    rows.append(Row("host", ahead, note=f"to launch a block forward; backward {back}"))
    if samples.update:
        rows.append(Row("update", f"{samples.update * 1e9:.3g} ns", note="a parameter: norm, clipping and AdamW"))
    inside, found = fit_links(base, found, links, rows)
    kept = [row.what for row in rows if row.measured == "-"]
    source = f"measured by fivefold calibrate on {samples.name}, torch {torch.__version__}, {date.today()}"
    source += f"; kept from the catalogue: {', '.join([*kept, 'flash1', 'across'])}"
    found = structs.replace(within(found), source=source)
    told = asdict(samples) | {"collectives": links}
    accelerator = structs.replace(base, inside=inside, achieved=found)
    return CalibrationResult(samples.name, accelerator, rows, samples.host[0], told)


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
    name, units = device_name(device), _units(device)
    return Samples(name, units, alone, products, eighths, attention, ran, streams, launch, host, update)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"a CPU, {torch.get_num_threads()} threads"


def _units(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return int(torch.get_num_threads())


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


# ---- collectives -----------------------------------------------------------------------------------------------------


def _links(device: torch.device, quick: bool, world: int) -> tuple[int, list[Timing]]:
    """Ranks, and what their collectives took. One GPU has nobody to talk to."""
    if world < 2:
        return world, []
    sizes = tuple(1 << power for power in ((10, 22) if quick else (10, 16, 20, 24, 26 if device.type == "cpu" else 28)))
    function = "fivefold.calibrate.links:run"
    return world, ranks.run(world, function, sizes, 5 if quick else 15, device.type, timeout=300)[0]
