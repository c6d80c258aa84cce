"""Closed forms of time and memory for many layouts at once: they rank and prune, and schedules decide (search.py).

An element of the arrays is a combination of choices. What a block costs depends on a few of them only (a `Shape`), and
is worked out once for each by the same functions that time a single layout.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.layout.layout import ContextKind, Layout, Recompute
from fivefold.plan.cost.activations import kept
from fivefold.plan.cost.footprint import CONTEXT, FRAGMENTATION, loss_held
from fivefold.plan.cost.memory import Accounting
from fivefold.plan.cost.time import Case, updating
from fivefold.schedule.catalogue import RECORDS
from fivefold.schedule.record import Record

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # the more is made again, the later
SLACK = 1.05  # closed forms of memory may be off by so much
SPLITTING = next(record.name for record in RECORDS if record.splits)  # any of them: a block costs the same in all
Array = np.ndarray[Any, np.dtype[Any]]


class Shape(NamedTuple):
    """The choices that decide what a block costs."""

    tp: int
    cp: int
    cp_kind: ContextKind
    sp: bool
    samples: int  # of a microbatch
    recompute: Recompute


class Pipeline(NamedTuple):
    schedule: Record
    chunks: int

    @property
    def both_ends(self) -> bool:
        """Whether one rank has the first and the last stage."""
        held = self.schedule.schedule
        return self.chunks > 1 and self.schedule.place(held.p if held else 2, self.chunks).owner[-1] == 0


class Choices(NamedTuple):
    """Arrays of one length, an element a combination."""

    tp: Array
    pp: Array
    cp: Array
    dp: Array
    zero: Array
    samples: Array
    microbatches: Array
    shape: Array  # index into a list of Shapes
    pipeline: Array  # index into a list of Pipelines


class Block(NamedTuple):
    """Seconds and bytes of one block and of the ends, for a microbatch of a shape."""

    forward: float
    backward: float
    port: float  # seconds of backward in which tp or cp holds the node's ports
    unhidden: float  # seconds that a schedule which splits backward adds: tp has nothing to hide behind
    ends: float
    kept: float
    whole: float  # bytes that a block's backward needs beside what is kept, recompute and gradients on their way
    logits: float
    message: float
    paired: float = 0.0  # seconds of both passes that joined pairs hide, at most

    @classmethod
    def of(cls, case: Case, shape: Shape) -> "Block":
        """`case` with one dp rank's microbatch as its batch."""
        layout = Layout(tp=shape.tp, cp=shape.cp, cp_kind=shape.cp_kind, sp=shape.sp, recompute=shape.recompute)
        work = replace(case, layout=layout, batch=shape.samples).work
        block, apart = work.block, work
        if shape.tp > 1:
            apart = replace(case, layout=structs.replace(layout, schedule=SPLITTING), batch=shape.samples).work
        plain = structs.replace(layout, recompute="none")
        mine = kept(case.spec, layout, case.stack, shape.samples, case.seq, work.wide).total
        again = kept(case.spec, plain, case.stack, shape.samples, case.seq, work.wide).total - mine
        return cls(
            forward=block.forward.total,
            backward=block.inputs.total + block.weights.total,
            port=work.port,
            unhidden=apart.block.inputs.total - block.inputs.total,
            ends=sum(part.total for part in (*work.top, *work.bottom)),
            kept=mine,
            whole=again + work.passing_bytes + work.exchange_bytes,
            logits=loss_held(case.spec, layout, case.stack, work.tokens) + 4 * case.spec.hidden * work.tokens,
            message=float(work.wide * work.tokens * case.spec.hidden / (shape.tp if shape.sp else 1)),
        )


@dataclass(frozen=True)
class Closed:
    """What the formulas are made of: the choices, and their blocks as arrays."""

    case: Case
    of: Choices
    block: Block  # of arrays
    pipelines: list[Pipeline]

    @property
    def alone(self) -> Array:
        return self.of.pp == 1

    @property
    def chunks(self) -> Array:
        return np.where(self.alone, 1, np.array([one.chunks for one in self.pipelines])[self.of.pipeline])

    @property
    def per_block(self) -> Array:
        """Parameters of a block on one tp rank."""
        return self.case.spec.block_parameter_count / self.of.tp

    @property
    def parameters(self) -> Array:
        """Of the fullest pipeline rank, on one tp rank."""
        spec = self.case.spec
        block, table = spec.block_parameter_count, spec.vocab * spec.hidden
        several = np.ceil(spec.layers / self.of.pp) * block + table
        return np.where(self.alone, spec.layers * block + table * (1 if spec.tied else 2), several) / self.of.tp

    def seconds(self) -> Array:
        """Of a step."""
        rate, latency = self.data_links()
        rank = self._rank() + np.where(self.of.zero == 3, self.gathering(rate, latency), 0.0)
        mine = self.parameters / np.where(self.of.zero > 0, self.of.dp * self.of.cp, 1)
        optimizer = np.asarray(updating(self.case, self.parameters, mine, self.of.zero < 2))
        return self._pipeline(rank) + self.after(rate, latency) + optimizer + self.case.stack.host_step

    def _rank(self) -> Array:
        """A microbatch on the busiest rank. Ranks hold whole layers, and the head is worth some."""
        layers, block, pp = self.case.spec.layers, self.block, self.of.pp
        split = np.array([one.schedule.splits for one in self.pipelines])[self.of.pipeline] & ~self.alone
        each = block.forward + block.backward + np.where(split, block.unhidden, 0.0)
        most = np.ceil((layers + block.ends / each) / (pp * self.chunks)) * self.chunks
        return np.maximum((layers * each + block.ends) / pp, np.where(self.alone, 0, np.minimum(most, layers)) * each)

    def gathering(self, rate: Array, latency: Array) -> Array:
        """ZeRO 3's exposed collectives of a microbatch."""
        stack = self.case.stack
        fetch = latency + self.per_block * stack.weight_bytes * rate
        bring = 2 * latency + self.per_block * (stack.weight_bytes + stack.gradient_bytes) * rate
        share = stack.hides("zero")
        exposed = fetch - share * np.minimum(fetch, self.block.forward)
        exposed = exposed + bring - share * np.minimum(bring, np.maximum(0.0, self.block.backward - self.block.port))
        return exposed * self.case.spec.layers / self.of.pp

    def _pipeline(self, rank: Array) -> Array:
        remains = np.array([one.schedule.fill for one in self.pipelines])[self.of.pipeline]
        send = 2 * (self.of.pp - 1) * self.sending()
        passes = self.of.microbatches * rank + remains * (self.of.pp - 1) * rank / self.chunks
        # Forward and input passes are two thirds of a microbatch's compute.
        waits = np.array([one.schedule.waits for one in self.pipelines])[self.of.pipeline] & ~self.alone
        return np.maximum(passes, waits * (self.of.pp + self.of.microbatches) * rank * 2 / 3) + send

    def sending(self) -> Array:
        """A message between stages."""
        link, reached = self.case.on.accelerator.across, self.case.on.reached
        return np.asarray(link.latency + self.block.message / (link.bandwidth * reached.across))

    def after(self, rate: Array, latency: Array) -> Array:
        """Gradients and weights of ZeRO 0 to 2 that nothing hides."""
        stack, of, layers = self.case.stack, self.of, self.case.spec.layers
        rounds = np.where(of.zero == 2, of.microbatches, 1)
        times = np.where(of.zero == 0, 2, 1)  # an all-reduce is a reduce-scatter and an all-gather
        bring = rounds * (latency + self.parameters * stack.gradient_bytes * rate * times)
        fetch = np.where(of.zero > 0, latency + self.parameters * stack.weight_bytes * rate, 0.0)
        share = stack.hides("dp")
        free = np.maximum(0.0, self.block.backward - self.block.port)
        left = bring - share * np.minimum(bring, free * layers / of.pp * rounds)
        left = left + fetch - stack.hides_weights * np.minimum(fetch, self.block.forward * layers / of.pp)
        return np.where((of.zero == 3) | (of.dp * of.cp == 1), 0.0, left)

    def data_links(self) -> tuple[Array, Array]:
        """Seconds per byte of a gather over dp x cp, and its latency, for where the ranks are."""
        keys = np.column_stack([self.of.tp, self.of.pp, self.of.cp, self.of.dp])
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        found = []
        for tp, pp, cp, dp in unique.tolist():
            wires = replace(self.case, layout=Layout(tp=tp, pp=pp, cp=cp, dp=dp), batch=1).wires
            small, large = wires.time("all-gather", "zero", 1.0), wires.time("all-gather", "zero", 1e9)
            found.append(((large - small) / 1e9, small))
        rate, latency = np.array(found).reshape(-1, 2).T
        return rate[inverse.ravel()], latency[inverse.ravel()]

    def memory(self) -> Array:
        """Bytes of the fullest rank."""
        stack, share = self.case.stack, self.case.spec.layers / self.of.pp
        flying = self._flying()
        first = self.block.kept * flying * share + self.block.whole + self.gathered()
        # The last stage has the logits and, unless ranks have several stages, one microbatch.
        last = self.block.kept * np.where(self.chunks > 1, flying, 1) * share + self.block.logits
        messages = np.where(self.alone, 0.0, (1 + 2 * self.chunks + flying * self.chunks) * self.block.message)
        allocated = self._state() + np.maximum(first, last) + messages + stack.bucket_bytes
        return allocated * (1 + FRAGMENTATION) + CONTEXT

    def _state(self) -> Array:
        stack, of = self.case.stack, self.of
        held = Accounting(stack.weight_bytes, stack.gradient_bytes, stack.state_bytes)
        owned = self.parameters / (of.dp * of.cp)
        found = np.zeros(len(of.tp))
        for stage in range(4):
            at = of.zero == stage
            found[at] = held.state(self.parameters[at], owned[at], stage, 2).total
        return found

    def _flying(self) -> Array:
        found = np.ones(len(self.of.tp))
        for index, (schedule, chunks) in enumerate(self.pipelines):
            at = (self.of.pipeline == index) & ~self.alone
            m = self.of.microbatches[at]
            found[at] = np.minimum(m, schedule.live(self.of.pp[at], m, chunks))
        return found

    def gathered(self) -> Array:
        """Weights and gradients of blocks on their way: ZeRO 3 and 2."""
        stack, one = self.case.stack, self.per_block * self.case.stack.gradient_bytes
        three = self.per_block * (2 * stack.weight_bytes + stack.gradient_bytes)
        two = np.where(self.of.zero == 2, np.maximum(one, 2 * one - self.block.kept), 0.0)
        return np.where(self.of.dp * self.of.cp == 1, 0.0, np.where(self.of.zero == 3, three, two))
