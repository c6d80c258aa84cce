"""The half of the harness that runs on ranks: a clock that all ranks share, and turns."""

import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.bench.harness import Machine, Times, turns
from fivefold.launch.cores import cores
from fivefold.launch.ranks import Rank

CPU = torch.device("cpu")
Call = Callable[[], object]


def enter(rank: Rank, threads: int = 1) -> None:
    """Join the other ranks; what is compared is ranks, not threads."""
    torch.set_num_threads(threads)
    if rank.world > 1:
        rank.join("gloo")


def timed(call: Call | None, together: bool = True) -> float:
    """Seconds of a call, the same on all ranks; None on a rank that has no part in it.

    Ranks run it `together`, until the slowest is done; otherwise each works for itself, and the mean counts.
    """
    world = dist.is_initialized()
    if world:
        dist.barrier()
    start = time.perf_counter()
    if call is not None:
        call()
    if world and together:
        dist.barrier()
    seconds = time.perf_counter() - start
    if not world:
        return seconds
    total = torch.tensor([seconds, 1.0] if call is not None else [0.0, 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def take_turns(
    systems: Mapping[str, Call | None],
    rounds: int,
    alone: Collection[str] = (),
    after: Callable[[str], None] = lambda _: None,
) -> Times:
    """Time one call of each system in every round. Ranks of those in `alone` work each for itself; `after` a turn
    what it names is not timed."""
    times = Times({name: [] for name in systems})
    for _, name in turns(systems, rounds):
        times[name].append(timed(systems[name], together=name not in alone))
        after(name)
    return times


def machine() -> Machine:
    """With the processor's name, where the system tells it."""
    kind, told = f"{platform.machine()} {platform.system()}", Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(cores(), str(torch.__version__), f"{names[0]}, {kind}" if names else kind)
