"""`fivefold calibrate`: the constants of `hardware.accelerators.Achieved`, measured on the device at hand.

    calibration = calibrate("cuda")
    calibration.accelerator                   # with the constants in it, for the planner
    calibration.rows                          # each measurement, its share of the ceiling, the formula's error
    usual_core(core_samples(16), 16)          # a core of this machine while sixteen are at work

Each constant is fitted so that the planner's own formula reproduces the measured times best; the remaining error is
part of the result. Shares are of the catalogue's ceilings if it knows the device. Otherwise, and on a CPU, whose entry
in the catalogue is nominal, the best measurement becomes the ceiling.
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
from fivefold.job.reading import read_job
from fivefold.launch import group, processes
from fivefold.launch import world as worlds
from fivefold.launch.device import TORCH_DTYPES, choose_backend, choose_device
from fivefold.launch.handshake import claim
from fivefold.launch.host import cores
from fivefold.launch.local import check_sharing
from fivefold.launch.watchdog import watch
from fivefold.machines.clock import Clock, Timing, timed_collectives
from fivefold.machines.fit import ATTENTION, Samples, fitted, with_across
from fivefold.machines.kernels import Kernels, block_of, of_device
from fivefold.machines.result import CalibrationResult, RankSpeed, RanksResult, at_pace, short
from fivefold.model.ops import LocalOps
from fivefold.parallel.control import gather_values
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_RANKS, check_range, within
from fivefold.support.text import plural

T = TypeVar("T")
CORE_ROUNDS = 3  # measurements of a core: other work on the machine may spoil one
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

    `progress` is called with how many of STEPS are done, of how many, and which one begins.
    """
    chosen = choose_device(device) if isinstance(device, str) else device
    # Refuses a device without bf16, in which the planner counts, before minutes are spent.
    ceilings(chosen, 1.0, 1.0).rate("bf16")

    def report(what: str) -> None:
        progress(STEPS.index(what), len(STEPS), what)

    samples = measure(chosen, quick, report)
    report(STEPS[-1])
    world = torch.cuda.device_count() if chosen.type == "cuda" else min(2, cores())
    return _fit_result(chosen, samples, quick, world)


def core_samples(busy: int) -> list[Samples]:
    """Measure `busy` cores of this machine at once: they share its memory bandwidth, so each has less of it."""
    by_rank: list[list[Samples]] = processes.run(
        busy, "fivefold.machines.calibrate:busy_core", CORE_ROUNDS, timeout=600
    )
    return [sample for samples in by_rank for sample in samples]


def busy_core(rank: processes.Rank, rounds: int) -> list[Samples]:
    """What one of the ranks of `core_samples` runs."""
    torch.set_num_threads(1)
    if rank.world > 1:
        rank.join("gloo")
        dist.barrier()
    return [measure(torch.device("cpu"), quick=True, report=lambda _: None) for _ in range(rounds)]


def usual_core(samples: list[Samples], busy: int) -> Accelerator:
    """The median core. The more samples of a noisy machine, the better."""
    return _fit_result(torch.device("cpu"), usual_samples(samples), quick=True, world=busy).accelerator


def usual_samples(samples: list[Samples]) -> Samples:
    """The sample with the median time of matmuls in a block. Short times are the noisiest: of `host` and `update` it
    has the medians over all samples."""
    by_speed = sorted(samples, key=lambda sample: list(sample.blocks.values())[-1].products)
    forward, backward = (median(sample.host[index] for sample in by_speed) for index in (0, 1))
    update = median(sample.update for sample in by_speed)
    return replace(by_speed[len(by_speed) // 2], host=(forward, backward), update=update)


def _fit_result(device: torch.device, samples: Samples, quick: bool, world: int) -> CalibrationResult:
    """Measure the links between `world` ranks, and fit the constants. One GPU alone has no links."""
    links: list[Timing] = []
    if world > 1:
        sizes, rounds = links_between(device, quick)
        links = processes.run(world, "fivefold.machines.clock:collectives", sizes, rounds, device.type, timeout=300)[0]
    base = ceilings(device, max(timing.rate for timing in samples.products), max(samples.streams.values()))
    return fitted(base, samples, (world, links))


def links_between(device: torch.device, quick: bool) -> tuple[tuple[int, ...], int]:
    """The sizes in bytes of the collectives that are timed, and how often each of them is."""
    powers = (10, 22) if quick else (10, 16, 20, 24, 26 if device.type == "cpu" else 28)
    return tuple(1 << power for power in powers), 5 if quick else 15


def measure(device: torch.device, quick: bool, report: Callable[[str], None]) -> Samples:
    """Run all kernels in this process; `report` is called with each of STEPS as it begins."""
    torch.manual_seed(0)
    kernels, steps = Kernels(device, quick), iter(STEPS)

    def step(call: Callable[[], T]) -> T:
        report(next(steps))
        return call()

    names = list(ATTENTION) if device.type == "cuda" else ["flash2"]  # a CPU has one kernel
    sustained = step(kernels.sustained)
    products = step(lambda: list(kernels.products()))
    fp8 = step(lambda: list(kernels.fp8_products()))
    attention = step(lambda: {name: kernels.attention(name) for name in names})
    blocks = step(lambda: {name: kernels.in_block(name) for name, timings in attention.items() if timings})
    blocks_that_ran = {name: block for name, block in blocks.items() if block is not None}
    streams = step(kernels.streams)
    launch, host = step(kernels.launch), kernels.host()
    update = kernels.update() if device.type == "cpu" else 0.0
    units = torch.get_num_threads()
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    name = device_name(device)
    return Samples(name, units, sustained, products, fp8, attention, blocks_that_ran, streams, launch, host, update)


def device_name(device: torch.device) -> str:
    """torch's name of a GPU; 'a CPU, 2 threads'."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"a CPU, {plural(torch.get_num_threads(), 'thread')}"


def ceilings(device: torch.device, rate: float, bandwidth: float) -> Accelerator:
    """The catalogue's entry of the device; for one that it does not know, and for a CPU, an entry with the best
    measured `rate` and `bandwidth`."""
    if device.type == "cpu":
        peak = Rates(fp64=short(rate / 2), fp32=short(rate), bf16=short(rate), fp16=short(rate))
        return structs.replace(ACCELERATORS["CPU"], peak=peak, memory=host_memory(), memory_bandwidth=short(bandwidth))
    try:
        return find_accelerator(device_name(device))
    except UserError:
        return Accelerator(
            name=device_name(device),
            peak=Rates(bf16=short(rate), fp16=short(rate)),
            memory=int(torch.cuda.get_device_properties(device).total_memory),
            memory_bandwidth=short(bandwidth),
            inside=LINKS["PCIe4"],  # assumptions: what an unknown card has at least
            across=LINKS["Ethernet-10G"],
        )


# ---- on ranks -------------------------------------------------------------------------------------------------------
# `fivefold calibrate --ranks`: each rank's own speed, measured while all of them are at work.
#
# Ranks of one machine share its memory, so a rank that is measured alone is faster than in training. All begin a round
# at once and run the block of a model for the same time; then each measures the planner's constants.


PURPOSE = "a calibration"
_PACE = {"cuda": 2.0, "cpu": 1.5}  # seconds of a round in which ranks run blocks at once
_TIMEOUT_S = 900.0  # seconds for the ranks of this machine


def calibrate_ranks(
    device: str = "auto", nproc: int | None = None, quick: bool = False, share_gpu: str = "gloo"
) -> RanksResult:
    """The speeds of `nproc` ranks of this machine (default: one for each GPU or core), measured at once."""
    chosen = choose_device(device)
    size = nproc or (torch.cuda.device_count() if chosen.type == "cuda" else cores())
    check_range("nproc", size, within(2, MAX_RANKS, "one rank has nothing to compare with"))
    changes = [f"train.device={device}", f"train.share_gpu={share_gpu}"]
    check_sharing(read_job(None, changes).train, size)
    local = "fivefold.machines.calibrate:local_rank_speed"
    return RanksResult(processes.run(size, local, changes, quick, timeout=_TIMEOUT_S))


def local_rank_speed(rank: processes.Rank, changes: list[str], quick: bool) -> RankSpeed:
    """What each rank of `calibrate_ranks` runs; `changes` say the device, and how ranks share it."""
    train = read_job(None, changes).train
    chosen = choose_device(train.device, rank.number)
    rank.join(choose_backend(chosen, rank.world, train, rank.number))
    return rank_speed(chosen, rank.world, quick)


def calibrate_launched_ranks(
    world: worlds.World, device: str, quick: bool, share_gpu: str = "gloo"
) -> RanksResult | None:
    """Measure the ranks that torchrun or Slurm has started, of which this process is one. Returns the result on rank 0,
    None on the others."""
    job = read_job(None, [f"train.device={device}", f"train.share_gpu={share_gpu}"])
    chosen = choose_device(device, world.local_rank)
    backend = choose_backend(chosen, world.local_size, job.train, world.rank, world.apart and world.size > 1)
    with watch(_TIMEOUT_S, world.rank, world.size):
        group.join(world, backend, job.train.timeout, claim(job, "", world, PURPOSE))
        try:
            speeds = gather_values(rank_speed(chosen, world.local_size, quick), RankSpeed)
        finally:
            group.leave(world)
    return RanksResult(speeds) if speeds else None


def rank_speed(device: torch.device, local_size: int, quick: bool) -> RankSpeed:
    """Measure this rank while all others measure themselves; collective over all. `local_size`: ranks of this node."""
    time_blocks, block_seconds, samples = block_timer(device, quick), list[float](), list[Samples]()
    for _ in range(1 if quick else CORE_ROUNDS):
        dist.barrier()
        block_seconds.append(time_blocks())
        dist.barrier()
        samples.append(measure(device, quick=device.type == "cpu" or quick, report=lambda _: None))
    if len(block_seconds) == 1:  # a single figure does not show the noise
        dist.barrier()
        block_seconds.append(time_blocks())
    accelerator = _accelerator(device, usual_samples(samples), local_size)
    if device.type == "cpu":
        accelerator = at_pace(accelerator, median(block_seconds), *_block(device))
    return RankSpeed(dist.get_rank(), platform.node(), device_name(device), block_seconds, accelerator)


def block_timer(device: torch.device, quick: bool) -> Callable[[], float]:
    """Returns a function that runs a block for a while and returns the median seconds of a forward and backward."""
    clock = Clock(device, 0.0)
    spec, samples, seq = _block(device)
    dtype = TORCH_DTYPES["bfloat16" if clock.on_gpu else "float32"]
    block, x, forward = block_of(spec, LocalOps(), samples, seq, device, dtype)
    output_grad = torch.randn_like(x)

    def time_one() -> float:
        start = clock.now()
        forward().backward(output_grad)
        block.zero_grad(set_to_none=True)
        x.grad = None
        return clock.between(start, clock.now())

    def time_blocks() -> float:
        end, seconds = time.perf_counter() + _PACE[device.type] / (2 if quick else 1), [time_one()]
        while time.perf_counter() < end:
            seconds.append(time_one())
        return median(seconds)

    time_one()  # warms up
    return time_blocks


def _block(device: torch.device) -> tuple[ModelSpec, int, int]:
    return of_device(on_gpu=device.type == "cuda", quick=True)


def _links(device: torch.device, local_size: int) -> tuple[list[Timing], list[Timing]]:
    """Timed collectives within this rank's node, and among the ranks that stand at its place on the nodes.

    Collective over all ranks: all groups are timed at once, as ranks of a node share its network.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    on_gpu = device.type == "cuda" and dist.get_backend() == "nccl"
    where, (sizes, rounds) = device if on_gpu else torch.device("cpu"), links_between(device, quick=True)
    if world == local_size:
        return timed_collectives(where, sizes, rounds), []
    if world % local_size:  # unequal nodes: which ranks share one is not known here
        return [], []
    nodes = [range(first, first + local_size) for first in range(0, world, local_size)]
    places = [range(place, world, local_size) for place in range(local_size)]
    own: list[list[Timing]] = []
    for groups in (nodes, places):
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}  # every rank makes every group
        ranks = next(ranks for ranks in groups if rank in ranks)
        own.append(timed_collectives(where, sizes, rounds, made[ranks]) if len(ranks) > 1 else [])
        dist.barrier()
    return own[0], own[1]


def _accelerator(device: torch.device, samples: Samples, local_size: int) -> Accelerator:
    """The fitted accelerator of this rank, with the links of its node and those to the other nodes."""
    inside, across = _links(device, local_size)
    base = ceilings(device, max(timing.rate for timing in samples.products), max(samples.streams.values()))
    accelerator = fitted(base, samples, (local_size, inside)).accelerator
    sharing = local_size  # ranks of a node share its memory, or that of a GPU
    if device.type == "cuda":
        sharing = -(-local_size // max(1, torch.cuda.device_count()))
    accelerator = structs.replace(accelerator, memory=accelerator.memory // sharing)
    if across:
        return with_across(base, accelerator, dist.get_world_size() // local_size, across)
    if inside:  # RanksResult makes groups of one node's ranks: the links between groups are those between ranks
        accelerator = structs.replace(accelerator, across=accelerator.inside)
        assert accelerator.achieved is not None
        accelerator = structs.replace(
            accelerator, achieved=structs.replace(accelerator.achieved, across=accelerator.achieved.inside)
        )
    return accelerator
