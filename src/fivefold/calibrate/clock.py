"""How long kernels take on a device: many calls at once, so that neither the host nor the first call counts."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

# A GPU's second-level cache: operands that are used again within so many bytes are not read from memory, and in
# training they would be.
CACHE = 256 << 20

Calls = Sequence[Callable[[], object]]


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
