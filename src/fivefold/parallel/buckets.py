"""A bucket: parameters whose gradients are reduced in one collective, and whose new weights are gathered in one.

Its buffer is a table [parts, L]: a row for each rank, with that rank's chunk of rows of every parameter, padded to the
length of the first rank's. So one reduce-scatter gives every rank its shards, one after the other, and one all-gather
collects them again. In stage 0 the table has one row, which all ranks hold.

  stage 0   the table accumulates over microbatches, then is all-reduced
  stage 1   the same, then is reduce-scattered in place: the shard is this rank's row of it
  stage 2   a table lives from a microbatch's first gradient to its reduce-scatter; the shard accumulates
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
from fivefold.layout.bucket_plan import BucketParams
from fivefold.parallel.collectives import StagedWork, all_gather_into, reduce_scatter_into
from fivefold.parallel.mesh import Axis


@dataclass(frozen=True)
class BucketSlot:
    """The position of one parameter in a bucket."""

    name: str
    weight: Tensor  # the model's, this tp rank's shard of it; [R, ...]
    master: nn.Parameter  # this rank's rows of the weight, in full precision
    offset: int  # in a row of the table
    length: int  # in a row of the table, with padding

    def pairs(self, table: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Corresponding parts of the table [parts, L] and of x, which is shaped like the weight."""
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
    group: BucketParams, weights: Mapping[str, Tensor], masters: Mapping[str, nn.Parameter], parts: int
) -> list[BucketSlot]:
    """A bucket's parameters, one after the other in a table for `parts` ranks."""
    lengths = [param.share_size(parts) for param in group.params]
    offsets = accumulate(lengths, initial=0)
    return [
        BucketSlot(param.name, weights[param.name], masters[param.name], offset, length)
        for param, offset, length in zip(group.params, offsets, lengths, strict=False)
    ]


class Bucket:
    def __init__(
        self,
        slots: list[BucketSlot],
        fsdp_axis: Axis,
        extra_reduce_axis: Axis | None,
        zero_stage: int,
        gather_dtype: torch.dtype,
    ):
        """Gradients are summed over `fsdp_axis`, and once a step over `extra_reduce_axis`, if there is one."""
        self.slots, self.fsdp_axis, self.extra_reduce_axis = slots, fsdp_axis, extra_reduce_axis
        self.zero_stage, self.gather_dtype = zero_stage, gather_dtype
        self.parts, self.row = (fsdp_axis.size, fsdp_axis.rank) if zero_stage else (1, 0)
        self.length = sum(slot.length for slot in slots)
        self.accum_dtype, self.device = slots[0].master.dtype, slots[0].master.device
        self.table: Tensor | None = None if zero_stage == 2 else self._empty(self.accum_dtype)
        self.shard = (
            torch.empty(self.length, dtype=self.accum_dtype, device=self.device)
            if zero_stage == 2
            else self.own_row(self.table)
        )
        self.filled: set[str] = set()  # parameters with a gradient in the table
        self.accumulated = False  # stage 2: the shard holds earlier microbatches
        self.reducing: StagedWork | None = None
        self.gathering: StagedWork | None = None
        self.gathered: Tensor | None = None  # [parts, L] the new weights, while their all-gather is in flight

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.parts, self.length, dtype=dtype, device=self.device)

    def own_row(self, table: Tensor | None) -> Tensor:
        """This rank's row of the table."""
        assert table is not None
        return table[self.row]

    # ---- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, slot: BucketSlot, gradient: Tensor) -> None:
        """Add a gradient, cast to the table's dtype."""
        if self.gathering is not None:  # the gradient would overwrite the all-gather's buffer, here and on other ranks
            raise RuntimeError(f"{slot.name} was used before its new weights had come: its block's forward did not run")
        if self.table is None:
            self.table = self._empty(self.accum_dtype)
        for target, part in slot.pairs(self.table, gradient):
            if slot.name in self.filled:
                target.add_(part)
            else:
                target.copy_(part)
        self.filled.add(slot.name)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start the sum over the fsdp axis; every gradient of this bucket has been added."""
        if self.table is None:
            self.table = self._empty(self.accum_dtype)
        for slot in self.slots:
            # No gradient here, but perhaps on other ranks or from earlier microbatches.
            if slot.name not in self.filled:
                for target, _ in slot.pairs(self.table, slot.weight):
                    target.zero_()
        if self.fsdp_axis.size == 1:
            if self.zero_stage == 2 and not self.accumulated:
                self.shard.copy_(self.own_row(self.table))
            return
        group = self.fsdp_axis.group
        if self.zero_stage == 0:
            self.reducing = dist.all_reduce(self.table, group=group, async_op=True)
        else:
            out = self.own_row(self.table) if self.zero_stage == 1 or self.accumulated else self.shard
            self.reducing = reduce_scatter_into(out, self.table.view(-1), self.fsdp_axis)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for that sum, which is then in `shard`."""
        if self.reducing is not None:
            timed_wait(self.reducing.wait)
            self.reducing = None
        if self.zero_stage == 2 and self.table is not None:
            if self.accumulated:
                self.shard.add_(self.own_row(self.table))
            self.accumulated, self.table = True, None
            self.filled.clear()

    def reduce_extra_axis(self) -> None:
        """Once a step: start the sum over tp ranks that saw other tokens or heads, or over first and last stage."""
        if self.extra_reduce_axis is not None:
            self.reducing = dist.all_reduce(self.shard, group=self.extra_reduce_axis.group, async_op=True)

    def set_master_grads(self) -> None:
        """Wait for the sums, and make them the masters' gradients."""
        if self.reducing is not None:
            timed_wait(self.reducing.wait)
            self.reducing = None
        for slot in self.slots:
            slot.master.grad = slot.of_master(self.shard)

    def zero_grad(self) -> None:
        """Release the gradients, after the optimizer's step."""
        self.filled.clear()
        self.accumulated = False
        for slot in self.slots:
            slot.master.grad = None

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_all_gather(self) -> None:
        """Start to gather the masters' new values (stages 1 and 2); in stage 0 copy them into the model."""
        if self.zero_stage == 0:
            cast = [slot for slot in self.slots if slot.weight.dtype != slot.master.dtype]
            if cast:
                torch._foreach_copy_([slot.weight for slot in cast], [slot.master for slot in cast])
            return
        if self.gathering is not None:  # started twice in a row, as after a rollback: the first still uses the buffer
            timed_wait(self.gathering.wait)
        # Stage 1 gathers into the gradients' table, which is idle from the optimizer's step to the next backward.
        count = self.parts * self.length
        buffer = self.table.view(-1).view(self.gather_dtype)[:count] if self.table is not None else None
        self.gathered = self._empty(self.gather_dtype) if buffer is None else buffer.view(self.parts, self.length)
        own = self.own_row(self.gathered)
        torch._foreach_copy_([slot.of_master(own) for slot in self.slots], [slot.master for slot in self.slots])
        self.gathering = all_gather_into(self.gathered.view(-1), own, self.fsdp_axis)

    @torch.no_grad()
    def wait_all_gather(self) -> None:
        """Wait for the gathered weights and copy them into the model, if an all-gather is in flight."""
        if self.gathering is None or self.gathered is None:
            return
        timed_wait(self.gathering.wait)
        pairs = [pair for slot in self.slots for pair in slot.pairs(self.gathered, slot.weight)]
        torch._foreach_copy_([weight for _, weight in pairs], [new for new, _ in pairs])
        self.gathering = self.gathered = None

    def buffers(self) -> Iterator[Tensor]:
        """Its gradient buffers."""
        yield self.shard
        if self.table is not None:
            yield self.table


# ---- reducer --------------------------------------------------------------------------------------------------------
# When each bucket is reduced: once it and all earlier ones are complete, in an order that all ranks share.


# What a backward pass computes: all gradients, those of inputs (and of all but linears), or those of linears.
BackwardPart = Literal["all", "inputs", "weights"]


class Reducer:
    def __init__(self, buckets: list[Bucket], groups: list[tuple[int, BucketParams]]):
        """`groups`: for each bucket the index of the pipeline stage (among this rank's), and its parameters."""
        self.buckets, self.groups = buckets, groups
        # Stage 2 reduces the gradients of every microbatch, so that only shards accumulate.
        self.every_microbatch = any(bucket.zero_stage == 2 for bucket in buckets)
        self.bucket_of = {slot.name: (i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots}
        self.missing: dict[
            int, set[str]
        ] = {}  # by bucket, in order of reduction: parameters whose gradient is not added yet
        self.in_flight: deque[Bucket] = deque()  # buckets whose reduction is started and not waited for

    @contextmanager
    def microbatch(self, last: bool, stage: int, part: BackwardPart) -> Iterator[None]:
        """A context around a backward pass of one pipeline stage, or around one of its halves."""
        self.missing = {}
        for index, (stage_index, group) in enumerate(self.groups):
            reduced_now = last or self.buckets[index].zero_stage == 2
            if reduced_now and stage_index == stage and part in ("all", "weights" if group.deferred else "inputs"):
                self.missing[index] = set(group.names)
        yield
        for missing in self.missing.values():  # parameters without a gradient in this pass
            missing.clear()
        self._reduce_complete()
        if self.every_microbatch:
            self._wait(allowed=0)

    def add(self, name: str, gradient: Tensor) -> None:
        index, slot = self.bucket_of[name]
        self.buckets[index].add(slot, gradient)
        if index in self.missing:
            self.missing[index].discard(name)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Start to reduce complete buckets, in order: an incomplete one holds up all later ones."""
        while self.missing:
            index = next(iter(self.missing))
            if self.missing[index]:
                return
            del self.missing[index]
            bucket = self.buckets[index]
            bucket.reduce()
            self.in_flight.append(bucket)
            if self.every_microbatch:
                self._wait(allowed=1)  # one table is filled while another is being reduced

    def _wait(self, allowed: int) -> None:
        """Wait until at most `allowed` reductions are in flight."""
        while len(self.in_flight) > allowed:
            self.in_flight.popleft().finish_reduce()

    def finish(self) -> None:
        """Wait for all reductions, and set the masters' gradients."""
        self._wait(allowed=0)
        for bucket in self.buckets:
            bucket.reduce_extra_axis()
        for bucket in self.buckets:
            bucket.set_master_grads()
