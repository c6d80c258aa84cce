"""How long kernels take on a device: many calls at once, so that neither the host nor the first call counts.

And how long collectives take among the ranks of this machine.
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

# A GPU's second-level cache: operands that are used again within so many bytes are not read from memory, and in
# training they would be.
CACHE = 256 << 20

Calls = Sequence[Callable[[], object]]
Timing = tuple[str, int, float]  # kind, payload in bytes as layout.collective_cost counts it, seconds


class Clock:
    """`settle` is the least duration of a measurement."""

    def __init__(self, device: torch.device, settle: float):
        self.device, self.settle, self.on_gpu = device, settle, device.type == "cuda"

    def now(self) -> Any:
        """This moment; on a GPU, the one at which its queue comes here."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self.on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def seconds(self, *calls: Callable[[], object], least: int = 3) -> float:
        """Of one call, over enough of them; several calls take turns."""
        for call in calls:
            call()
        once = max(self.total(calls, 1) / len(calls), 1e-7)
        rounds = max(1, round(max(self.settle / once, least) / len(calls)))
        return self.total(calls, rounds) / (rounds * len(calls))

    def total(self, calls: Calls, rounds: int) -> float:
        start = self.now()
        for _ in range(rounds):
            for call in calls:
                call()
        return self.between(start, self.now())

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def sets(size: int) -> int:
    """How many operand sets of `size` bytes must take turns, for none to be found in the cache; at most a few."""
    return max(1, min(8, -(-CACHE // max(1, size))))


def collectives(rank: Rank, sizes: tuple[int, ...], rounds: int, device_name: str) -> list[Timing]:
    """On one rank: every collective at every size, in turns."""
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
    """Among the ranks of a group; a payload is all that the ranks end up with."""
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
