"""The part of the harness that runs on ranks: timing across all ranks, and turns."""

import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.bench.harness import Machine, RoundTimes, turns
from fivefold.launch.host import cores
from fivefold.launch.processes import Rank

CPU = torch.device("cpu")
Call = Callable[[], object]


def join_ranks(rank: Rank, threads: int = 1) -> None:
    """Join the other ranks, with one thread each by default, so that systems differ in ranks alone."""
    torch.set_num_threads(threads)
    if rank.world > 1:
        rank.join("gloo")


def timed(call: Call | None, *, together: bool = True) -> float:
    """Returns the seconds of a call, the same number on all ranks; `call` is None on a rank that takes no part.

    `together`: the time until the slowest rank is done; otherwise the mean of the ranks' own times.
    """
    several_ranks = dist.is_initialized()
    if several_ranks:
        dist.barrier()
    start = time.perf_counter()
    if call is not None:
        call()
    if several_ranks and together:
        dist.barrier()
    seconds = time.perf_counter() - start
    if not several_ranks:
        return seconds
    total = torch.tensor([seconds, 1.0] if call is not None else [0.0, 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def take_turns(
    systems: Mapping[str, Call | None],
    rounds: int,
    alone: Collection[str] = (),
    after: Callable[[str], None] = lambda _: None,
) -> RoundTimes:
    """Time one call of each system in every round. Systems in `alone` do not wait for their slowest rank; `after`,
    called with the name after each turn, is not timed."""
    times = RoundTimes({name: [] for name in systems})
    for _, name in turns(systems, rounds):
        times[name].append(timed(systems[name], together=name not in alone))
        after(name)
    return times


def machine() -> Machine:
    """This machine, with the processor's name if the system has it."""
    kind, cpuinfo = f"{platform.machine()} {platform.system()}", Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(cores(), str(torch.__version__), f"{names[0]}, {kind}" if names else kind)
