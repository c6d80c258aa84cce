"""Times kernels on a device, many calls at once, so that neither the host nor the first call counts; and collectives
among the ranks of this machine.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fivefold.launch import faults
from fivefold.launch.device import choose_backend, choose_device
from fivefold.launch.processes import Rank
from fivefold.parallel.collectives import staged_all_gather

# Bytes, at least a GPU's second-level cache. Operands that are used again before so many bytes are read may come from
# the cache; in training they would come from memory.
CACHE = 256 << 20

Calls = Sequence[Callable[[], object]]
Timing = tuple[str, int, float]  # kind, payload in bytes as layout.collective_cost counts it, seconds


class Clock:
    """Times calls on a device. `settle` is the shortest duration of a measurement, in seconds."""

    def __init__(self, device: torch.device, settle: float):
        self.device, self.settle, self.on_gpu = device, settle, device.type == "cuda"

    def now(self) -> Any:
        """A time stamp for `between`; on a GPU an event, which has the time at which its stream gets there."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two time stamps."""
        if not self.on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def seconds(self, *calls: Callable[[], object], least: int = 3) -> float:
        """The mean seconds of a call, over so many that they take `settle`; several calls take turns."""
        for call in calls:
            call()
        once = max(self.total(calls, 1) / len(calls), 1e-7)
        rounds = max(1, round(max(self.settle / once, least) / len(calls)))
        return self.total(calls, rounds) / (rounds * len(calls))

    def total(self, calls: Calls, rounds: int) -> float:
        """The seconds of all calls, each made `rounds` times."""
        start = self.now()
        for _ in range(rounds):
            for call in calls:
                call()
        return self.between(start, self.now())

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def sets(size: int) -> int:
    """How many sets of operands, of `size` bytes each, take turns so that the cache has none of them; 8 at most."""
    return max(1, min(8, -(-CACHE // max(1, size))))


def collectives(rank: Rank, sizes: tuple[int, ...], rounds: int, device_name: str) -> list[Timing]:
    """What each rank runs to time the collectives between the ranks of this machine."""
    device = choose_device(device_name, rank.number)
    rank.join(choose_backend(device, rank.world))
    timings = timed_collectives(device, sizes, rounds)
    dist.destroy_process_group()
    return timings


def timed_collectives(
    device: torch.device,
    sizes: tuple[int, ...],
    rounds: int,
    group: dist.ProcessGroup | None = None,
    usual: Callable[[list[float]], float] = median,
) -> list[Timing]:
    """Time all-reduce and all-gather of every size, in turns, among the ranks of a group. The payload of an all-gather
    is its output."""
    world, clock, timings = dist.get_world_size(group), Clock(device, 0.0), []
    for size in sizes:
        payload = torch.ones(max(1, size // 4 // world) * world, device=device)
        local = payload.chunk(world)[dist.get_rank(group)].clone()
        times: dict[str, list[float]] = {"all-reduce": [], "all-gather": []}
        for number in range(rounds + 2):
            for kind in times:
                dist.barrier(group)
                clock.synchronize()
                start = time.perf_counter()
                faults.strike("link")
                if kind == "all-reduce":
                    dist.all_reduce(payload, group=group)
                else:
                    staged_all_gather(payload, local, group=group)
                clock.synchronize()
                if number > 1:  # the first ones connect and allocate
                    times[kind].append(time.perf_counter() - start)
            payload.fill_(1.0)
        timings += [(kind, payload.nbytes, usual(seconds)) for kind, seconds in times.items()]
    return timings
