"""Which bucket is summed when: each as soon as its last gradient has come, in an order that all ranks share."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from fivefold.layout.buckets import Grouping
from fivefold.parallel.zero.bucket import Bucket

# What a backward pass computes: all gradients, those of inputs (and of all but linears), or those of linears.
Part = Literal["all", "inputs", "weights"]


class Reducer:
    def __init__(self, buckets: list[Bucket], groups: list[tuple[int, Grouping]]):
        """`groups` say which of this rank's stages a bucket belongs to, and what is in it."""
        self.buckets, self.groups = buckets, groups
        # Stage 2 sums every microbatch at once, so that only shards accumulate.
        self.always = any(bucket.stage == 2 for bucket in buckets)
        self.home = {slot.name: (i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots}
        self.missing: dict[int, set[str]] = {}  # of each bucket to be summed, in order, what has yet to come
        self.flying: deque[Bucket] = deque()  # sums that have been started and not waited for

    @contextmanager
    def microbatch(self, last: bool, stage: int, part: Part) -> Iterator[None]:
        """Around a backward pass of one stage, or one of its halves."""
        self.missing = {}
        for number, (of, group) in enumerate(self.groups):
            now = last or self.buckets[number].stage == 2
            if now and of == stage and part in ("all", "weights" if group.late else "inputs"):
                self.missing[number] = set(group.names)
        yield
        for missing in self.missing.values():  # gradients that will not come
            missing.clear()
        self._sum_what_is_final()
        if self.always:
            self._settle(0)

    def add(self, name: str, gradient: Tensor) -> None:
        index, slot = self.home[name]
        self.buckets[index].add(slot, gradient)
        if index in self.missing:
            self.missing[index].discard(name)
            self._sum_what_is_final()

    def _sum_what_is_final(self) -> None:
        while self.missing:
            number = next(iter(self.missing))
            if self.missing[number]:
                return
            del self.missing[number]
            bucket = self.buckets[number]
            bucket.reduce()
            self.flying.append(bucket)
            if self.always:
                self._settle(1)  # one buffer fills while one is on its way

    def _settle(self, allowed: int) -> None:
        while len(self.flying) > allowed:
            self.flying.popleft().settle()

    def finish(self) -> None:
        """Every sum is complete, and is the masters' gradient."""
        self._settle(0)
        for bucket in self.buckets:
            bucket.sum_over_others()
        for bucket in self.buckets:
            bucket.hand_over()
