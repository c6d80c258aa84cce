"""A bucket: parameters whose gradients are summed in one collective, and whose new weights come back in one.

Its buffer is a table [parts, L]: a row for each rank, and in it that rank's chunk of rows of every parameter, padded to
the length of the first rank's. So one reduce-scatter gives every rank its shards, one after the other, and one
all-gather brings them back. Stage 0 has a single part, which all ranks keep.

  stage 0   the buffer accumulates over microbatches, then is all-reduced
  stage 1   the same, then is reduce-scattered, in place: the shard is this rank's row of it
  stage 2   a buffer lives from a microbatch's first gradient to its reduce-scatter; the shard accumulates
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.launch.waits import timed_wait
from fivefold.layout.sharding import Grouping
from fivefold.parallel.collectives import StagedWork, all_gather_into, reduce_scatter_into
from fivefold.parallel.mesh import Axis


@dataclass(frozen=True)
class BucketSlot:
    """One parameter's place in a bucket."""

    name: str
    weight: Tensor  # the model's, as this tp rank holds it; [R, ...]
    master: nn.Parameter  # this rank's rows of it, in full precision
    offset: int  # in a row of the buffer
    length: int  # there, with padding

    def pairs(self, table: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the table [parts, L], part of x) that belong together; x is shaped like the weight."""
        if x.numel() == 0:
            return
        rows, rest = divmod(x.numel(), self.length)
        column, flat = table[:, self.offset : self.offset + self.length], x.reshape(-1)
        if rows:
            yield column[:rows], flat[: rows * self.length].view(rows, self.length)
        if rest:
            yield column[rows, :rest], flat[rows * self.length :]

    def of_master(self, row: Tensor) -> Tensor:
        """The part of a row that belongs to this rank's master, in its shape."""
        return row[self.offset : self.offset + self.master.numel()].view(self.master.shape)


def slots_of(
    group: Grouping, weights: Mapping[str, Tensor], masters: Mapping[str, nn.Parameter], parts: int
) -> list[BucketSlot]:
    """A bucket's parameters, one behind the other in rows for `parts` ranks."""
    lengths = [param.share_size(parts) for param in group.held]
    offsets = accumulate(lengths, initial=0)
    return [
        BucketSlot(param.name, weights[param.name], masters[param.name], offset, length)
        for param, offset, length in zip(group.held, offsets, lengths, strict=False)
    ]


class Bucket:
    def __init__(self, slots: list[BucketSlot], zero: Axis, also_over: Axis | None, stage: int, compute: torch.dtype):
        """Gradients are summed over `zero`, and once a step over `also_over`, where that is an axis."""
        self.slots, self.zero, self.also_over, self.stage, self.compute_dtype = slots, zero, also_over, stage, compute
        self.parts, self.row = (zero.size, zero.rank) if stage else (1, 0)
        self.length = sum(slot.length for slot in slots)
        self.accum_dtype, self.device = slots[0].master.dtype, slots[0].master.device
        self.table: Tensor | None = None if stage == 2 else self._empty(self.accum_dtype)
        self.shard = (
            torch.empty(self.length, dtype=self.accum_dtype, device=self.device) if stage == 2 else self.own(self.table)
        )
        self.filled: set[str] = set()  # parameters with a gradient in the table
        self.accumulated = False  # stage 2: the shard holds earlier microbatches
        self.reducing: StagedWork | None = None
        self.gathering: StagedWork | None = None
        self.gathered: Tensor | None = None  # [parts, L] of new weights, while they are on their way

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.parts, self.length, dtype=dtype, device=self.device)

    def own(self, table: Tensor | None) -> Tensor:
        """This rank's row."""
        assert table is not None
        return table[self.row]

    # ---- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, slot: BucketSlot, gradient: Tensor) -> None:
        """Add a gradient, cast to the table's dtype."""
        if self.gathering is not None:  # else the buffer that holds them would be overwritten, here and elsewhere
            raise RuntimeError(f"{slot.name} was used before its new weights had come: its block's forward did not run")
        if self.table is None:
            self.table = self._empty(self.accum_dtype)
        for place, part in slot.pairs(self.table, gradient):
            if slot.name in self.filled:
                place.add_(part)
            else:
                place.copy_(part)
        self.filled.add(slot.name)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start the sum over the zero axis, once every gradient of this bucket has come."""
        if self.table is None:
            self.table = self._empty(self.accum_dtype)
        for slot in self.slots:
            if slot.name not in self.filled:  # no gradient came: other ranks may have one, or earlier microbatches
                for place, _ in slot.pairs(self.table, slot.weight):
                    place.zero_()
        if self.zero.size == 1:
            if self.stage == 2 and not self.accumulated:
                self.shard.copy_(self.own(self.table))
            return
        group = self.zero.group
        if self.stage == 0:
            self.reducing = dist.all_reduce(self.table, group=group, async_op=True)
        else:
            into = self.own(self.table) if self.stage == 1 or self.accumulated else self.shard
            self.reducing = reduce_scatter_into(into, self.table.view(-1), self.zero)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for that sum; afterwards `shard` has it."""
        if self.reducing is not None:
            timed_wait(self.reducing.wait)
            self.reducing = None
        if self.stage == 2 and self.table is not None:
            if self.accumulated:
                self.shard.add_(self.own(self.table))
            self.accumulated, self.table = True, None
            self.filled.clear()

    def sum_over_others(self) -> None:
        """Once a step: start the sum over tp ranks that saw other tokens or heads, or the other end of the pipeline."""
        if self.also_over is not None:
            self.reducing = dist.all_reduce(self.shard, group=self.also_over.group, async_op=True)

    def set_master_grads(self) -> None:
        """The sums are complete: they are the masters' gradients."""
        if self.reducing is not None:
            timed_wait(self.reducing.wait)
            self.reducing = None
        for slot in self.slots:
            slot.master.grad = slot.of_master(self.shard)

    def zero_grad(self) -> None:
        """The gradients have been used."""
        self.filled.clear()
        self.accumulated = False
        for slot in self.slots:
            slot.master.grad = None

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send_weights(self) -> None:
        """Start to send the masters' new values to every rank's model."""
        if self.stage == 0:
            rounded = [slot for slot in self.slots if slot.weight.dtype != slot.master.dtype]
            if rounded:
                torch._foreach_copy_([slot.weight for slot in rounded], [slot.master for slot in rounded])
            return
        if self.gathering is not None:  # sent twice in a row, as after a rollback: the first still has the buffer
            timed_wait(self.gathering.wait)
        # Stage 1 gathers into the gradients' buffer, which is idle from the optimizer's step to the next backward.
        count = self.parts * self.length
        room = self.table.view(-1).view(self.compute_dtype)[:count] if self.table is not None else None
        self.gathered = self._empty(self.compute_dtype) if room is None else room.view(self.parts, self.length)
        own = self.own(self.gathered)
        torch._foreach_copy_([slot.of_master(own) for slot in self.slots], [slot.master for slot in self.slots])
        self.gathering = all_gather_into(self.gathered.view(-1), own, self.zero)

    @torch.no_grad()
    def receive_weights(self) -> None:
        """Wait for them and put them into the model, if any are on their way."""
        if self.gathering is None or self.gathered is None:
            return
        timed_wait(self.gathering.wait)
        pairs = [pair for slot in self.slots for pair in slot.pairs(self.gathered, slot.weight)]
        torch._foreach_copy_([weight for _, weight in pairs], [new for new, _ in pairs])
        self.gathering = self.gathered = None

    def buffers(self) -> Iterator[Tensor]:
        """The memory of its gradients."""
        yield self.shard
        if self.table is not None:
            yield self.table


# ---- reducer --------------------------------------------------------------------------------------------------------
# Which bucket is summed when: each as soon as its last gradient has come, in an order that all ranks share.


# What a backward pass computes: all gradients, those of inputs (and of all but linears), or those of linears.
BackwardPart = Literal["all", "inputs", "weights"]


class Reducer:
    def __init__(self, buckets: list[Bucket], groups: list[tuple[int, Grouping]]):
        """`groups` say which of this rank's stages a bucket belongs to, and what is in it."""
        self.buckets, self.groups = buckets, groups
        # Stage 2 sums the gradients of every microbatch, so that only shards accumulate.
        self.every_microbatch = any(bucket.stage == 2 for bucket in buckets)
        self.home = {slot.name: (i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots}
        self.missing: dict[int, set[str]] = {}  # of each bucket to be summed, in order, what has yet to come
        self.in_flight: deque[Bucket] = deque()  # sums that have been started and not waited for

    @contextmanager
    def microbatch(self, last: bool, stage: int, part: BackwardPart) -> Iterator[None]:
        """Around a backward pass of one stage, or one of its halves."""
        self.missing = {}
        for number, (group_stage, group) in enumerate(self.groups):
            now = last or self.buckets[number].stage == 2
            if now and group_stage == stage and part in ("all", "weights" if group.late else "inputs"):
                self.missing[number] = set(group.names)
        yield
        for missing in self.missing.values():  # gradients that will not come
            missing.clear()
        self._reduce_complete()
        if self.every_microbatch:
            self._wait(allowed=0)

    def add(self, name: str, gradient: Tensor) -> None:
        index, slot = self.home[name]
        self.buckets[index].add(slot, gradient)
        if index in self.missing:
            self.missing[index].discard(name)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Start the sums of buckets that are complete, in order: one that is not holds up those behind it."""
        while self.missing:
            number = next(iter(self.missing))
            if self.missing[number]:
                return
            del self.missing[number]
            bucket = self.buckets[number]
            bucket.reduce()
            self.in_flight.append(bucket)
            if self.every_microbatch:
                self._wait(allowed=1)  # one buffer fills while one is on its way

    def _wait(self, allowed: int) -> None:
        """Until at most `allowed` sums are in flight."""
        while len(self.in_flight) > allowed:
            self.in_flight.popleft().finish_reduce()

    def finish(self) -> None:
        """Every sum is complete, and is the masters' gradient."""
        self._wait(allowed=0)
        for bucket in self.buckets:
            bucket.sum_over_others()
        for bucket in self.buckets:
            bucket.set_master_grads()
