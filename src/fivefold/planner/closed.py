"""Closed forms of time and memory for many layouts at once: they rank and prune, and schedules decide (search.py).

An element of the arrays is a combination of choices. What a block costs depends on a few of them only (a `BlockShape`),
and is worked out once for each by the same functions that time a single layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import MixtureMemory, kept
from fivefold.cost.footprint import CONTEXT, FRAGMENTATION, loss_held
from fivefold.cost.moe import MoEBlock, Travel, block_share
from fivefold.cost.step import Case, updating
from fivefold.layout.layout import ContextKind, Dispatch, Layout, Recompute
from fivefold.schedules.build import ScheduleInfo
from fivefold.schedules.registry import RECORDS

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # the more is made again, the later
SLACK = 1.05  # closed forms of memory may be off by so much
SPLITTING = next(record.name for record in RECORDS if record.splits)  # any of them: a block costs the same in all
Array = np.ndarray[Any, np.dtype[Any]]


class BlockShape(NamedTuple):
    """The choices that decide what a block costs."""

    tp: int
    cp: int
    cp_kind: ContextKind
    sp: bool
    samples: int  # of a microbatch
    recompute: Recompute


class PipelineArrays(NamedTuple):
    schedule: ScheduleInfo
    chunks: int

    @property
    def both_ends(self) -> bool:
        """Whether one rank has the first and the last stage."""
        return self.chunks > 1 and self.schedule.bent


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


class BlockArrays(NamedTuple):
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
    def of(cls, case: Case, shape: BlockShape) -> "BlockArrays":
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
            logits=loss_held(case.spec, layout, case.stack, work.tokens),
            message=float(work.wide * work.tokens * case.spec.hidden / (shape.tp if shape.sp else 1)),
        )


@dataclass(frozen=True)
class Closed:
    """What the formulas are made of: the choices, and their blocks as arrays."""

    case: Case
    of: Choices
    block: BlockArrays  # of arrays
    pipelines: list[PipelineArrays]

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
        of, held = self.of, self.case.stack.accounting
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


# ---- experts --------------------------------------------------------------------------------------------------------
# The search's space of a model with experts: every layout of a dense one, with every ep that divides its ranks.
#
# What a block costs without its experts depends on a few choices (a `BlockShape`), what experts cost on fewer (a
# `ExpertShape`): each is worked out once, by the functions that time a single layout, and the closed forms add them
# up.


DISPATCHES: tuple[Dispatch, ...] = ("alltoall", "allgather")


class ExpertShape(NamedTuple):
    """The choices that decide what the experts of a block cost."""

    tokens: int  # of a microbatch on a cp rank
    tp: int
    sp: bool
    ep: int
    dispatch: int  # index into DISPATCHES
    near: int  # ranks of ep on one node


class DenseCost(NamedTuple):
    """Seconds and bytes of a block without its experts, of one that never had any, and of the ends."""

    forward: float
    backward: float
    plain_forward: float
    plain_backward: float
    launching: float
    port: float
    unhidden: float
    ends: float
    kept: float
    plain_kept: float
    again: float  # bytes that recompute makes again
    passing: float
    logits: float
    message: float

    @classmethod
    def of(cls, case: Case, shape: BlockShape) -> "DenseCost":
        layout = Layout(tp=shape.tp, cp=shape.cp, cp_kind=shape.cp_kind, sp=shape.sp, recompute=shape.recompute)
        one = replace(case, layout=layout, batch=shape.samples)
        work, apart = one.work, one.work
        if shape.tp > 1:
            apart = replace(one, layout=structs.replace(layout, schedule=SPLITTING)).work
        plain, block = replace(work, dense=True).block, work.around
        sizes = (case.spec, case.stack, shape.samples, case.seq, work.wide)
        mine, everything = (_held(how, *sizes) for how in (layout, structs.replace(layout, recompute="none")))
        stream = work.wide * work.tokens * case.spec.hidden / (shape.tp if shape.sp else 1)
        return cls(
            forward=block.forward.total - block.forward.host,
            backward=block.inputs.total - block.inputs.host + block.weights.total - work.added(work.own.experts),
            plain_forward=plain.forward.total,
            plain_backward=plain.inputs.total + plain.weights.total,
            launching=work.launching,
            port=work.port,
            unhidden=apart.around.inputs.total - block.inputs.total,
            ends=sum(part.total for part in (*work.top, *work.bottom)),
            kept=mine[0],
            plain_kept=mine[1],
            again=everything[0] - mine[0],
            passing=2 * stream + work.exchange_bytes - everything[2],
            logits=loss_held(case.spec, layout, case.stack, work.tokens),
            message=float(stream),
        )


def _held(layout: Layout, spec: Any, stack: Any, samples: int, seq: int, wide: int) -> tuple[float, float, float]:
    """Bytes that a block keeps beside its experts, those of one without any, and of the first its shared expert's."""
    mixed = kept(spec, layout, stack, samples, seq, wide)
    return mixed.total - mixed.experts, kept(spec, layout, stack, samples, seq, wide, dense=True).total, mixed.mlp


class MoECost(NamedTuple):
    """What the experts of one block take, on the fullest rank."""

    forward: float  # seconds
    backward: float
    moved: float  # seconds of forward that are bound by memory: selective recompute does them again
    computing: float  # seconds of forward between the two messages,
    computing_back: float  # and of backward
    dispatch: float  # seconds of messages that can run beside compute, but for what the shared expert hides
    combine: float
    combine_back: float
    dispatch_back: float
    link: float  # seconds of all messages of forward,
    link_back: float  # and of backward
    everything: float  # bytes that are kept without recompute,
    outputs: float  # and with selective recompute
    worst: float  # bytes of backward on top of the former

    @classmethod
    def of(cls, case: Case, spread: ExpertShape, layout: Layout) -> "MoECost":
        """`layout` is any that spreads experts so."""
        work = replace(case, layout=layout, batch=layout.dp).work
        sizes = (spread.tokens, work.wide)
        one = MoEBlock(case.spec, layout, work.device, work.wires, case.stack, *sizes, case.precision, case.imbalance)
        held = MixtureMemory(case.spec, layout, case.stack, *sizes, case.imbalance)
        travel = Travel(one)  # with backward passes in one piece, which hide most
        there, back, back_again, there_again = travel.messages
        less, less_back = travel.hidden
        forward = one.matmuls[0] + one.sent[0] - less
        backward = one.matmuls[1] + one.matmuls[2] + one.sent[1] - less_back
        added = work.added(block_share(case.spec, 1, spread.ep).experts)
        return cls(
            forward=forward + one.memory[0] + one.gathered[0],
            backward=backward + one.memory[1] + one.gathered[1] + added,
            moved=one.memory[0],
            computing=one.computing[0],
            computing_back=one.computing[1] + one.computing[2],
            dispatch=there - less,
            combine=back,
            combine_back=back_again,
            dispatch_back=there_again - less_back,
            link=there + back,
            link_back=there_again + back_again,
            everything=held.everything,
            outputs=held.outputs,
            worst=max(held.weighing, held.linears),
        )


class EpChoices(NamedTuple):
    """Arrays beside `Choices`."""

    ep: Array
    dispatch: Array


@dataclass(frozen=True)
class ExpertClosed(Closed):
    """The closed forms of a model with experts. `block` has the mean of its layers."""

    dealt: EpChoices
    placed: "Placed"

    @property
    def ezero(self) -> Array:
        return self.of.dp * self.of.cp * self.of.tp // self.dealt.ep

    @property
    def _mixed(self) -> int:
        return self.case.spec.layers - self.case.spec.dense_layers

    @property
    def per_block(self) -> Array:
        """Dense parameters of a block with experts, on one rank."""
        return self._dense(False)

    def _dense(self, plain: bool) -> Array:
        """Of a block with experts, or (`plain`) of one without."""
        shares = {tp: block_share(self.case.spec, tp, 1, plain).dense for tp in np.unique(self.of.tp).tolist()}
        return np.array([shares.get(tp, 0.0) for tp in range(max(shares) + 1)])[self.of.tp]

    @property
    def experts_per_block(self) -> Array:
        return block_share(self.case.spec, 1, 1).experts / self.dealt.ep

    @property
    def parameters(self) -> Array:
        """Dense ones of the fullest pipeline rank."""
        spec, table = self.case.spec, self.case.spec.vocab * self.case.spec.hidden
        mixed, ends = self.per_block, table * (1 if spec.tied else 2) / self.of.tp
        every = spec.dense_layers * self._dense(True) + self._mixed * mixed + ends
        return np.where(self.alone, every, np.ceil(spec.layers / self.of.pp) * mixed + table / self.of.tp)

    @property
    def experts(self) -> Array:
        """Parameters of experts on the fullest pipeline rank."""
        layers = np.where(self.alone, self._mixed, np.ceil(self.case.spec.layers / self.of.pp))
        return layers * self.experts_per_block

    def seconds(self) -> Array:
        rate, latency = self.data_links()
        there, start = self.links
        rank = self._rank() + np.where(self.of.zero == 3, self.gathering(rate, latency), 0.0)
        count = self.parameters + self.experts
        mine = np.where(
            self.of.zero > 0, self.parameters / (self.of.dp * self.of.cp) + self.experts / self.ezero, count
        )
        optimizer = np.asarray(updating(self.case, count, mine, self.of.zero < 2))
        tail = self.after(rate, latency) + self._experts_after(there, start)
        return self._pipeline(rank) + tail + optimizer + self.case.stack.host_step

    def _rank(self) -> Array:
        """As of a dense model; but the head, next to narrow layers, is worth many, and stages of a rank share them."""
        layers, block, pp = self.case.spec.layers, self.block, self.of.pp
        split = np.array([one.schedule.splits for one in self.pipelines])[self.of.pipeline] & ~self.alone
        each = block.forward + block.backward + np.where(split, block.unhidden, 0.0) - self._joined() * block.paired
        most = np.where(self.alone, 0, np.minimum(np.ceil((layers + block.ends / each) / pp), layers))
        return np.maximum((layers * each + block.ends) / pp, most * each)

    def _joined(self) -> Array:
        """The share of microbatches in joined pairs, at most: the pipeline fills before the first. ZeRO 3 runs one half
        after the other."""
        joins = np.array([one.schedule.joins for one in self.pipelines])[self.of.pipeline]
        joins &= ~self.alone & (self.of.zero < 3)
        return np.where(joins, np.maximum(0.0, 1 - self.of.pp / self.of.microbatches), 0.0)

    def gathering(self, rate: Array, latency: Array) -> Array:
        stack, (there, start) = self.case.stack, self.links
        fetch = latency + self.per_block * stack.weight_bytes * rate
        fetch = fetch + start + self.experts_per_block * stack.weight_bytes * there
        bring = fetch + latency + self.per_block * stack.gradient_bytes * rate
        bring = bring + start + self.experts_per_block * stack.gradient_bytes * there
        share = stack.hides("zero")
        exposed = fetch - share * np.minimum(fetch, self.block.forward)
        exposed = exposed + bring - share * np.minimum(bring, self.block.backward)
        return exposed * self.case.spec.layers / self.of.pp

    def _experts_after(self, rate: Array, latency: Array) -> Array:
        """Of ZeRO 0 to 2, as `after` has it for the rest; backward passes hide that first."""
        stack, of = self.case.stack, self.of
        rounds = np.where(of.zero == 2, of.microbatches, 1)
        times = np.where(of.zero == 0, 2, 1)
        bring = rounds * (latency + self.experts * stack.gradient_bytes * rate * times)
        fetch = np.where(of.zero > 0, latency + self.experts * stack.weight_bytes * rate, 0.0)
        layers = self.case.spec.layers / of.pp
        left = bring - stack.hides("dp") * np.minimum(bring, self.block.backward * layers * rounds)
        left = left + fetch - stack.hides_weights * np.minimum(fetch, self.block.forward * layers)
        return np.where((of.zero == 3) | (self.ezero == 1), 0.0, left)

    def data_links(self) -> tuple[Array, Array]:
        return self._links("zero")

    @cached_property
    def links(self) -> tuple[Array, Array]:
        """Seconds per byte of a gather over the ranks with the same experts, and its latency."""
        return self._links("ezero")

    def _links(self, axis: str) -> tuple[Array, Array]:
        found = []
        for layout in self.placed.layouts:
            wires = replace(self.case, layout=layout, batch=1).wires
            small, large = wires.time("all-gather", axis, 1.0), wires.time("all-gather", axis, 1e9)
            found.append(((large - small) / 1e9, small))
        rate, latency = np.array(found).reshape(-1, 2).T
        return rate[self.placed.at], latency[self.placed.at]

    def _state(self) -> Array:
        of, held = self.of, self.case.stack.accounting
        found = np.zeros(len(of.tp))
        for count, ranks in ((self.parameters, of.dp * of.cp), (self.experts, self.ezero)):
            for stage in range(4):
                at = of.zero == stage
                found[at] += held.state(count[at], count[at] / ranks[at], stage, 2).total
        return found

    def gathered(self) -> Array:
        stack, count = self.case.stack, self.per_block + self.experts_per_block
        summed = self.per_block * (self.of.dp * self.of.cp > 1) + self.experts_per_block * (self.ezero > 1)
        one = summed * stack.gradient_bytes
        two = np.where(self.of.zero == 2, np.maximum(one, 2 * one - self.block.kept), 0.0)
        return np.where(self.of.zero == 3, count * (2 * stack.weight_bytes + stack.gradient_bytes), two)


class Placed(NamedTuple):
    """Layouts that differ in where their ranks are, and which of them each combination is."""

    layouts: list[Layout]
    at: Array

    @classmethod
    def of(cls, of: Choices, dealt: EpChoices) -> "Placed":
        key = ((of.tp * 4096 + of.cp) * 4096 + of.pp) * 65536 + dealt.ep  # dp is what is left of the world
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        names = ("dp", "tp", "pp", "cp")
        layouts = []
        for at in first.tolist():
            numbers: dict[str, Any] = {name: int(getattr(of, name)[at]) for name in names}
            layouts.append(Layout(**numbers, ep=int(dealt.ep[at])))
        return cls(layouts, inverse.ravel())


def closed_of(
    case: Case, of: Choices, dealt: EpChoices, shapes: list[BlockShape], pipelines: list[PipelineArrays]
) -> ExpertClosed:
    around = DenseCost(*np.array([DenseCost.of(case, shape) for shape in shapes])[of.shape].T)
    placed = Placed.of(of, dealt)
    spent = _spent(case, of, dealt, placed, shapes)
    recompute = np.array([RECOMPUTES.index(shape.recompute) for shape in shapes])[of.shape]
    again = np.choose(recompute, [0.0, spent.moved, spent.forward])
    few = case.spec.dense_layers / case.spec.layers
    forward, backward = around.forward + spent.forward, around.backward + spent.backward + again
    wait = np.maximum(0.0, around.launching - forward - backward)
    held = np.choose(recompute, [spent.everything, spent.outputs, 0.0])
    twice = recompute == RECOMPUTES.index("full")
    means: dict[str, Any] = {
        "forward": (1 - few) * (forward + wait / 3) + few * around.plain_forward,
        "backward": (1 - few) * (backward + wait * 2 / 3) + few * around.plain_backward,
        "paired": (1 - few) * _paired(spent, forward, backward, twice),
        "kept": (1 - few) * (around.kept + held) + few * around.plain_kept,
        "whole": around.again + spent.everything - held + spent.worst + around.passing,
    }
    same = ("port", "unhidden", "ends", "logits", "message")
    block = BlockArrays(**means, **{name: getattr(around, name) for name in same})
    return ExpertClosed(case, of, block, pipelines, dealt, placed)


def _paired(spent: MoECost, forward: Any, backward: Any, twice: Array) -> Array:
    """Seconds that a joined pair hides of a block's messages, nearly at most: each behind the turn of the other half
    that comes after it, in the middle of a stage; at its ends there is less to hide behind.

    `twice`: backward runs forward again, first, and has messages that no turn of a forward pass is left for. No pair is
    shorter than all of its messages, which share a link.
    """
    rest = forward - spent.dispatch - spent.combine - spent.computing
    rest_back = backward - spent.dispatch_back - spent.combine_back - spent.computing_back
    rest_back = rest_back - twice * (spent.dispatch + spent.combine)
    ahead = np.minimum(spent.dispatch, rest_back) + np.minimum(spent.combine, spent.computing_back)
    back = np.minimum(spent.combine_back, spent.computing) + np.minimum(spent.dispatch_back, rest)
    link = (1 + twice) * spent.link + spent.link_back
    return np.asarray(np.maximum(0.0, np.minimum(ahead + back, forward + backward - link)))


def _spent(case: Case, of: Choices, dealt: EpChoices, placed: Placed, shapes: list[BlockShape]) -> MoECost:
    """Arrays, of what is the same in many combinations worked out once."""
    near = np.array([replace(case, layout=one, batch=1).wires.reaches["ep"].together for one in placed.layouts])
    sizes = list(dict.fromkeys(_sizes(case, shape) for shape in shapes))
    size = np.array([sizes.index(_sizes(case, shape)) for shape in shapes])[of.shape]
    key = ((size * 65536 + dealt.ep) * len(DISPATCHES) + dealt.dispatch) * 4096 + near[placed.at]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    found = []
    for at in first.tolist():
        tokens, tp, sp = sizes[size[at]]
        where = placed.layouts[placed.at[at]]
        layout = structs.replace(where, sp=sp, dispatch=DISPATCHES[dealt.dispatch[at]])
        spread = ExpertShape(tokens, tp, sp, layout.ep, int(dealt.dispatch[at]), int(near[placed.at[at]]))
        found.append(MoECost.of(case, spread, layout))
    return MoECost(*np.array(found)[inverse.ravel()].T)


def _sizes(case: Case, shape: BlockShape) -> tuple[int, int, bool]:
    return shape.samples * case.seq // shape.cp, shape.tp, shape.sp


def ep_changes(case: Case) -> Iterator[tuple[str, Layout]]:
    """Neighbours of a layout: ep doubled or halved, or the other way for tokens to travel."""
    layout = case.layout
    if case.spec.experts is None:
        return
    for other in (2 * layout.ep, layout.ep // 2):
        if other:
            dispatch = layout.dispatch if other > 1 else "alltoall"
            yield f"ep={other}", structs.replace(layout, ep=other, dispatch=dispatch)
    if layout.ep > 1:
        other_kind = DISPATCHES[1 - DISPATCHES.index(layout.dispatch)]
        yield f"dispatch={other_kind}", structs.replace(layout, dispatch=other_kind)
