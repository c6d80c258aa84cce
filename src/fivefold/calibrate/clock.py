"""How long kernels take on a device: many calls at once, so that neither the host nor the first call counts."""

import time
from collections.abc import Callable, Sequence

import torch

# A GPU's second-level cache: operands that are used again within so many bytes are not read from memory, and in
# training they would be.
CACHE = 256 << 20

Calls = Sequence[Callable[[], object]]


class Clock:
    """`settle` is the least time that a measurement goes on for."""

    def __init__(self, device: torch.device, settle: float):
        self.device, self.settle = device, settle

    def seconds(self, *calls: Callable[[], object], least: int = 3) -> float:
        """Of one call, over enough of them; several calls take turns."""
        for call in calls:
            call()
        once = max(self._total(calls, 1) / len(calls), 1e-7)
        rounds = max(1, round(max(self.settle / once, least) / len(calls)))
        return self._total(calls, rounds) / (rounds * len(calls))

    def _total(self, calls: Calls, rounds: int) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(rounds):
                for call in calls:
                    call()
            return time.perf_counter() - start
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        for _ in range(rounds):
            for call in calls:
                call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1e3

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def sets(size: int) -> int:
    """How many operand sets of `size` bytes must take turns, for none to be found in the cache; at most a few."""
    return max(1, min(8, -(-CACHE // max(1, size))))
