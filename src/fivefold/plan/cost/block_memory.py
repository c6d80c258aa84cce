"""Bytes of one kind of block on one rank: what a microbatch keeps in it, and the moments of its backward pass.

blocks = {dense: block_of(case, dense) for dense in (True, False)}      # a model with experts has two kinds
backward(case, stage, blocks)                                           # the worst moment of a stage's
"""

from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage
from fivefold.plan.cost.activations import Kept, kept, put_off
from fivefold.plan.cost.expert_memory import MixtureMemory
from fivefold.plan.cost.experts import Share
from fivefold.plan.cost.kernels import plus, times
from fivefold.plan.cost.time import Case
from fivefold.spec.model import ModelSpec


class Moment(NamedTuple):
    """Of a block's backward pass: bytes beside what is kept, and which of its gradients exist."""

    bytes: float
    dense: bool = False
    experts: float = 0.0  # the share of theirs


class BlockMemory(NamedTuple):
    """One kind of block, with one microbatch."""

    kept: Kept
    moments: tuple[Moment, ...]  # that can be the worst of its backward pass
    rest: float  # bytes between the two halves of a backward pass, where it has two
    share: Share  # its parameters


def plain(spec: ModelSpec, layer: int) -> bool:
    """Whether it is one of the first layers of a model with experts, that have none."""
    return spec.experts is not None and spec.dense(layer)


def block_of(case: Case, dense: bool) -> BlockMemory:
    spec, layout, stack = case.spec, case.layout, case.stack
    work = replace(case.work, dense=dense)

    def held(how: Layout) -> Kept:
        sizes = (case.samples, case.seq, work.wide)
        return kept(spec, how, stack, *sizes, dense=dense, imbalance=case.imbalance)

    mine, everything = held(layout), held(structs.replace(layout, recompute="none"))
    splits = layout.pp > 1 and case.splits
    rest = put_off(spec, layout, work.tokens, work.wide, dense) if splits else 0.0
    base = everything.total - mine.total
    if spec.experts is None or dense:
        whole = base + work.exchange_bytes + work.passing_bytes
        return BlockMemory(mine, (Moment(whole, dense=True),), rest, work.own)
    mixture = MixtureMemory(spec, layout, stack, work.tokens, work.wide, case.imbalance, splits)
    rest += mixture.put_off if splits else 0.0
    # Backward begins with a shared expert, if there is one; its activations are gone by then.
    base += 2 * work.wide * work.tokens * spec.hidden / (layout.tp if layout.sp else 1) - everything.mlp
    shared = mixture.experts.shared > 0  # its gradients come first, and make room for those of the dense part
    early = (mixture.returning, mixture.weighing, mixture.arriving)
    moments = [*((size, 0.0) for size in early), (mixture.linears, mixture.first_gradient)]
    moments += [(mixture.columns, 1.0), (mixture.leaving, 1.0)]
    if layout.cp > 1:  # attention, when nothing of the experts is left
        moments.append((work.undoing_bytes - everything.experts, 1.0))
    return BlockMemory(mine, tuple(Moment(base + size, shared, there) for size, there in moments), rest, work.own)


def kept_by(spec: ModelSpec, stage: Stage, blocks: dict[bool, BlockMemory]) -> Kept:
    """What a microbatch keeps in a stage."""
    kinds = [plain(spec, layer) for layer in stage.layers]
    return plus(Kept(), *(times(blocks[dense].kept, kinds.count(dense)) for dense in set(kinds)))


class Need(NamedTuple):
    """Bytes beside activations in flight, and those of gradients that were not there before."""

    bytes: float
    made: float = 0.0


def backward(case: Case, stage: Stage, blocks: dict[bool, BlockMemory], lazy: bool) -> Need:
    """The worst moment of a stage's backward pass through its blocks: of the last one, or of an earlier kind when what
    the later ones kept is gone. `lazy`: what has no bucket is made by this pass."""
    kinds = [plain(case.spec, layer) for layer in reversed(stage.layers)]
    found, gone, held_back = [Need(0.0)], 0.0, 0.0
    for dense in dict.fromkeys(kinds):
        one, count = blocks[dense], kinds.count(dense)
        # Where a backward pass is split, blocks behind wait for their weights' gradients, with more than was kept.
        growing = max(0.0, one.rest - one.kept.total)
        for moment in one.moments:
            size = moment.bytes + gathered(case, one, moment) + held_back + (count - 1) * growing - gone
            found.append(Need(size, made_late(case, one, moment) if lazy else 0.0))
        gone += count * max(0.0, one.kept.total - one.rest)
        held_back += count * growing
    return max(found, key=sum)


def made_late(case: Case, block: BlockMemory, there: Moment) -> float:
    """Bytes of a block's gradients that no bucket waits for: of experts that no other rank has."""
    waits = not bucketed(case.layout, "ezero") and case.layout.zero < 3
    return there.experts * block.share.experts * case.stack.gradient_bytes if waits else 0.0


def first_backward(case: Case, stage: Stage, blocks: dict[bool, BlockMemory]) -> Need:
    """The worst moment in the backward pass of a stage's first block with experts, when the later ones' gradients have
    been made: bytes beside them, and what this block has yet to make (less than nothing is `made`)."""
    plains = sum(plain(case.spec, layer) for layer in stage.layers)
    if plains == len(stage.layers):
        return Need(blocks[True].moments[-1].bytes if plains else 0.0)
    before, one = plains * blocks[True].kept.total if plains else 0.0, blocks[False]
    every = made_late(case, one, Moment(0.0, experts=1.0))
    found = [Need(moment.bytes, made_late(case, one, moment) - every) for moment in one.moments]
    worst = max(found, key=sum)
    return worst._replace(bytes=before + one.kept.total + worst.bytes)


def in_flight(case: Case, share: Share, there: Moment) -> float:
    """Bytes of a block's gradients on their way to be summed, of those that are there by then."""
    layout, own = case.layout, (("zero", there.dense, share.dense), ("ezero", there.experts, share.experts))
    return sum(count for axis, made, count in own if made and layout.size(axis) > 1) * case.stack.gradient_bytes


def gathered(case: Case, block: BlockMemory, there: Moment) -> float:
    """Of blocks: ZeRO 3's weights of two and sums of one; ZeRO 2's gradients of one, or of two once the first
    one's activations are gone. Experts are a unit of their own, gathered and summed apart from the rest."""
    layout, narrow, wide = case.layout, case.stack.weight_bytes, case.stack.gradient_bytes
    if layout.zero == 2:
        own = in_flight(case, block.share, there)
        # Those of experts have arrived by the time that the rest of the block is summed.
        return max(own, own + in_flight(case, block.share, Moment(0.0, dense=True)) - block.kept.total)
    if not layout.fully_shards(case.spec):
        return 0.0
    dense, experts = block.share
    if not experts:
        return dense * (2 * narrow + wide)
    if 0 < there.experts < 1:  # the next ones are not gathered yet
        return 2 * narrow * dense + narrow * experts
    if there.experts:
        return 2 * narrow * dense + (2 * narrow + wide) * experts
    return (2 * narrow + wide) * dense + narrow * experts


def bucketed(layout: Layout, axis: str) -> bool:
    """Whether gradients of an axis have buckets, which are there from the start; without them, they are made by the
    first backward pass."""
    return layout.size(axis) * layout.replicate > 1 and layout.zero < 3
