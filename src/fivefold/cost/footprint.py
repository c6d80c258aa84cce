"""Peak memory of a rank: state, activations in flight, what the worst moment of a step adds, and a margin.

footprint(case).total       # bytes on the fullest pipeline rank
footprint(case).parts       # by component
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.activations import MixtureMemory, SavedActivations, defer_wgrad, kept
from fivefold.cost.forms import ZeroCost
from fivefold.cost.kernels import plus, times
from fivefold.cost.memory import State
from fivefold.cost.moe import ParamShare
from fivefold.cost.stack import SoftwareProfile
from fivefold.cost.step import Case, message, repeating, share_of
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import slices
from fivefold.layout.stages import Stage
from fivefold.schedules.actions import FORWARD, WEIGHT_GRAD, Action
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import head

# ---- block memory ---------------------------------------------------------------------------------------------------
# Bytes of one kind of block on one rank: what a microbatch keeps in it, and the moments of its backward pass.
#
# blocks = {dense: block_of(case, dense) for dense in (True, False)}      # a model with experts has two kinds
# backward(case, stage, blocks)                                           # the worst moment of a stage's


class BackwardPeak(NamedTuple):
    """Of a block's backward pass: bytes beside what is kept, and which of its gradients exist."""

    bytes: float
    dense: bool = False
    experts: float = 0.0  # the share of theirs


class BlockMemory(NamedTuple):
    """One kind of block, with one microbatch."""

    kept: SavedActivations
    moments: tuple[BackwardPeak, ...]  # that can be the worst of its backward pass
    rest: float  # bytes between the two halves of a backward pass, where it has two
    share: ParamShare  # its parameters


def plain(spec: ModelSpec, layer: int) -> bool:
    """Whether it is one of the first layers of a model with experts, that have none."""
    return spec.experts is not None and spec.dense(layer)


def block_of(case: Case, dense: bool) -> BlockMemory:
    spec, layout, stack = case.spec, case.layout, case.stack
    work = replace(case.work, dense=dense)

    def held(how: Layout) -> SavedActivations:
        sizes = (case.samples, case.seq, work.wide)
        return kept(spec, how, stack, *sizes, dense=dense, imbalance=case.imbalance)

    saved, everything = held(layout), held(structs.replace(layout, recompute="none"))
    splits = layout.pp > 1 and case.splits
    rest = defer_wgrad(spec, layout, work.tokens, work.wide, dense) if splits else 0.0
    base = everything.total - saved.total
    if spec.experts is None or dense:
        peak = base + work.exchange_bytes + work.passing_bytes
        return BlockMemory(saved, (BackwardPeak(peak, dense=True),), rest, work.own)
    mixture = MixtureMemory(spec, layout, stack, work.tokens, work.wide, case.imbalance, splits)
    rest += mixture.defer_wgrad if splits else 0.0
    # Backward begins with a shared expert, if there is one; its activations are gone by then.
    base += 2 * work.wide * work.tokens * spec.hidden / (layout.tp if layout.sp else 1) - everything.mlp
    shared = mixture.experts.shared > 0  # its gradients come first, and make room for those of the dense part
    early = (mixture.returning, mixture.weighing, mixture.arriving)
    moments = [*((size, 0.0) for size in early), (mixture.linears, mixture.first_gradient)]
    moments += [(mixture.columns, 1.0), (mixture.leaving, 1.0)]
    if layout.cp > 1:  # attention, when nothing of the experts is left
        moments.append((work.undoing_bytes - everything.experts, 1.0))
    return BlockMemory(
        saved, tuple(BackwardPeak(base + size, shared, there) for size, there in moments), rest, work.own
    )


def kept_by(spec: ModelSpec, stage: Stage, blocks: dict[bool, BlockMemory]) -> SavedActivations:
    """What a microbatch keeps in a stage."""
    kinds = [plain(spec, layer) for layer in stage.layers]
    return plus(SavedActivations(), *(times(blocks[dense].kept, kinds.count(dense)) for dense in set(kinds)))


class Transient(NamedTuple):
    """Bytes beside activations in flight, and those of gradients that were not there before."""

    bytes: float
    made: float = 0.0


def backward(case: Case, stage: Stage, blocks: dict[bool, BlockMemory], lazy: bool) -> Transient:
    """The worst moment of a stage's backward pass through its blocks: of the last one, or of an earlier kind when what
    the later ones kept is gone. `lazy`: what has no bucket is made by this pass."""
    kinds = [plain(case.spec, layer) for layer in reversed(stage.layers)]
    peaks, gone, held_back = [Transient(0.0)], 0.0, 0.0
    for dense in dict.fromkeys(kinds):
        block, count = blocks[dense], kinds.count(dense)
        # Where a backward pass is split, blocks behind wait for their weights' gradients, with more than was kept.
        growing = max(0.0, block.rest - block.kept.total)
        for moment in block.moments:
            size = moment.bytes + gathered(case, block, moment) + held_back + (count - 1) * growing - gone
            peaks.append(Transient(size, made_late(case, block, moment) if lazy else 0.0))
        gone += count * max(0.0, block.kept.total - block.rest)
        held_back += count * growing
    return max(peaks, key=sum)


def made_late(case: Case, block: BlockMemory, there: BackwardPeak) -> float:
    """Bytes of a block's gradients that no bucket waits for: of experts that no other rank has."""
    waits = not bucketed(case.layout, "efsdp") and case.layout.zero < 3
    return there.experts * block.share.experts * case.stack.gradient_bytes if waits else 0.0


def first_backward(case: Case, stage: Stage, blocks: dict[bool, BlockMemory]) -> Transient:
    """The worst moment in the backward pass of a stage's first block with experts, when the later ones' gradients have
    been made: bytes beside them, and what this block has yet to make (less than nothing is `made`)."""
    plains = sum(plain(case.spec, layer) for layer in stage.layers)
    if plains == len(stage.layers):
        return Transient(blocks[True].moments[-1].bytes if plains else 0.0)
    before, block = plains * blocks[True].kept.total if plains else 0.0, blocks[False]
    all_late = made_late(case, block, BackwardPeak(0.0, experts=1.0))
    peaks = [Transient(moment.bytes, made_late(case, block, moment) - all_late) for moment in block.moments]
    worst = max(peaks, key=sum)
    return worst._replace(bytes=before + block.kept.total + worst.bytes)


def in_flight(case: Case, share: ParamShare, there: BackwardPeak) -> float:
    """Bytes of a block's gradients on their way to be summed, of those that are there by then."""
    layout, own = case.layout, (("fsdp", there.dense, share.dense), ("efsdp", there.experts, share.experts))
    return sum(count for axis, made, count in own if made and layout.size(axis) > 1) * case.stack.gradient_bytes


def gathered(case: Case, block: BlockMemory, there: BackwardPeak) -> float:
    """Of blocks: ZeRO 3's weights of two and sums of one; ZeRO 2's gradients of one, or of two once the first
    one's activations are gone. Experts are a unit of their own, gathered and summed apart from the rest."""
    layout, narrow, wide = case.layout, case.stack.weight_bytes, case.stack.gradient_bytes
    if layout.zero == 2:
        own = in_flight(case, block.share, there)
        # Those of experts have arrived by the time that the rest of the block is summed.
        return max(own, own + in_flight(case, block.share, BackwardPeak(0.0, dense=True)) - block.kept.total)
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


# ---- footprint ------------------------------------------------------------------------------------------------------


CONTEXT = 1.5e9  # bytes that CUDA, cuBLAS and NCCL take before the first tensor
FRAGMENTATION = 0.04  # of what is allocated: holes between blocks that no request fits
HEADROOM = 0.88  # of the memory that a plan may fill: the rest is for what no model counts
GATHERED = 6.0  # bytes per logit of the parts, the whole made of them, and its gradient, where logits are gathered


@dataclass(frozen=True)
class Footprint:
    """One pipeline rank at the moment of the step that needs the most."""

    rank: int
    state: State
    activations: SavedActivations  # of all microbatches in flight
    moment: str  # "the loss", "a block's backward", "the embedding's gradient"
    transient: float  # bytes of that moment alone: logits; a block made again; gathered weights, gradients on their way
    buffers: float  # messages and exchanges
    margin: float
    late: float = 0.0  # bytes of gradients that do not exist while the activations do
    after: float = 0.0  # bytes of the moments in which they all do, at the end of the first backward pass
    unmade: float = 0.0  # of these gradients, bytes that are still to be made then

    @property
    def working(self) -> float:
        """What is not state."""
        return self.activations.total + self.transient + self.buffers

    @property
    def gradients(self) -> float:
        """Gradients at the peak; where they come after it, the bytes by which they exceed what the peak had."""
        return self.state.gradients - self.late + max(0.0, self.late - self.unmade + self.after - self.working)

    @property
    def allocated(self) -> float:
        return self.state.total - self.state.gradients + self.gradients + self.working

    @property
    def reserved(self) -> float:
        """What the allocator has taken from the device: all but the context."""
        return self.total - CONTEXT

    @property
    def total(self) -> float:
        return self.allocated + self.margin

    @property
    def parts(self) -> dict[str, float]:
        return {
            "parameters": self.state.parameters,
            "gradients": self.gradients,
            "optimizer": self.state.optimizer,
            **{f"activations: {kind}": size for kind, size in self.activations._asdict().items() if size},
            self.moment: self.transient,
            "buffers": self.buffers,
            "context and fragmentation": self.margin,
        }


def footprint(case: Case) -> Footprint:
    """Of the pipeline rank that needs the most of its device."""
    ranks = range(case.layout.pp)
    return max((footprint_of(case, rank) for rank in ranks), key=lambda needs: needs.total / case.memory_of(needs.rank))


def _before_backward(order: Iterable[Action], stage: int) -> int:
    """The most microbatches of a stage that have been forward and not yet back; their weights' gradients may wait."""
    live = most = 0
    for action in order:
        if action.stage == stage and action.kind is not WEIGHT_GRAD:
            live += 1 if action.kind is FORWARD else -1
            most = max(most, live)
    return most


def footprint_of(case: Case, rank: int) -> Footprint:
    layout, stack, spec = case.layout, case.stack, case.spec
    numbers = layout.placement.of_rank[rank]
    stages = [case.stages[number] for number in numbers]
    layers = [*(layer for stage in stages for layer in stage.layers), spec.layers - 1]  # a last stage may have none
    blocks = {dense: block_of(case, dense) for dense in {plain(spec, layer) for layer in layers}}
    schedule = case.schedule(repeating(layout))
    flying = schedule.in_flight[rank]
    last, waiting = next((number for number in numbers if case.stages[number].last), None), 0.0
    if last is not None and stack.one_pass:  # what microbatches leave at the head for their backward passes
        states = case.work.tokens * spec.hidden / (layout.tp if layout.sp else 1)
        ahead = min(flying[last], _before_backward(schedule.compute(rank), last))
        waiting = max(0, ahead - 1) * (stack.weight_bytes * (states + head(spec, layout.tp).size))
    # A stage's output is held until its backward pass, beside the next stage's copy of it.
    outputs = sum(count for number, count in flying.items() if number != last) if layout.pp > 1 else 0
    buffers = stack.bucket_bytes + (schedule.messages_in_flight[rank] + outputs) * message(case)
    # Where no forward pass follows the rank's first backward, the most is held before there are gradients.
    kinds = dropwhile(FORWARD.__eq__, (action.kind for action in schedule.compute(rank)))
    lazy = stack.lazy_gradients and layout.chunks == 1 and FORWARD not in kinds
    moments = dict(_moments(case, stages, blocks, lazy))
    moment, (transient, made) = max(moments.items(), key=lambda entry: sum(entry[1]))
    usual = Transient(moments["a block's backward"].bytes)
    if layout.zero < 3:
        usual = max(usual, _last_gradient(case, stages[0]), key=sum)
    waits = max(0, flying[numbers[0]] - 1) if layout.chunks == 1 else 0
    parts = ZeroCost(spec, stack, case.wires).states(share_of(case, stages), layout.zero)
    late = sum(part.gradients for axis, part in parts.items() if lazy and not bucketed(layout, axis))
    if spec.experts is not None and layout.zero < 3 and stages[0].layers:
        usual = max(first_backward(case, stages[0], blocks), _last_gradient(case, stages[0]), key=sum)
    after = usual.bytes + buffers + times(kept_by(spec, stages[0], blocks), waits).total
    each = [times(kept_by(spec, case.stages[number], blocks), flying[number]) for number in numbers]
    flying_now = plus(*each)._replace(head=waiting)
    needs = Footprint(
        rank, plus(*parts.values()), flying_now, moment, transient, buffers, 0.0, late - made, after, -usual.made
    )
    return replace(needs, margin=CONTEXT + FRAGMENTATION * needs.allocated)


def _moments(
    case: Case, stages: list[Stage], blocks: dict[bool, BlockMemory], lazy: bool
) -> Iterator[tuple[str, Transient]]:
    """Bytes on top of the activations in flight, at the moments that can be the worst of a step."""
    spec, layout, stack, work = case.spec, case.layout, case.stack, case.work
    table, wide = head(spec).size / layout.tp if spec.vocab > 1 else 0.0, stack.gradient_bytes
    here, last = sum(stage.first for stage in stages), any(stage.last for stage in stages)
    ends = (here + last) * table * stack.weight_bytes if layout.zero == 3 and layout.size("dp_cp") > 1 else 0.0
    # The gathered ends, and the head's gradient, wait for the end of the backward pass.
    kept_ends = ends + (last * table * stack.weight_bytes if ends else 0.0) if stack.keeps_ends else 0.0
    worst = max((backward(case, stage, blocks, lazy) for stage in stages), key=sum)
    yield "a block's backward", worst._replace(bytes=worst.bytes + kept_ends)
    if spec.vocab > 1 and last:
        final = blocks[plain(spec, spec.layers - 1)]
        block_left = final.share.total * stack.weight_bytes if ends else 0.0  # gathered last, and not yet let go
        gathered_here = ends + block_left
        yield "the loss", Transient(loss_held(spec, layout, stack, work.tokens) + gathered_here)
        if layout.zero == 2 and layout.size("dp_cp") > 1:
            around = loss_around(spec, layout, work.tokens) + gathered_here
            yield "the head's gradient", _summed_head(case, final, table, around, lazy)
    if any(stage.first for stage in stages):
        # Its microbatch's activations are gone by then; or what waits for the weights' gradients has taken their place.
        kinds = [blocks[plain(spec, layer)] for layer in stages[0].layers]
        own = sum(max(0.0, block.kept.total - block.rest) for block in kinds)
        flying = wide * table if layout.zero == 2 and layout.size("dp_cp") > 1 else 0.0
        yield "the embedding's gradient", Transient(stack.weight_bytes * table + flying - own)


def _last_gradient(case: Case, stage: Stage) -> Transient:
    """The embedding's, when all others have been made and no activation is left but the gradient that came to it. That
    of a tied table has two parts, of which the head's has waited for this one; and a sum."""
    if not stage.first or case.spec.vocab == 1:
        return Transient(0.0)
    spec, layout = case.spec, case.layout
    stream = case.work.tokens * spec.hidden / (layout.tp if layout.sp else 1)
    parts = 3 if spec.tied and stage.last else 1
    return Transient(case.stack.weight_bytes * (parts * head(spec).size / layout.tp + stream))


def _summed_head(case: Case, final: BlockMemory, table: float, around: float, lazy: bool) -> Transient:
    """ZeRO 2: the sum of the head's gradient is under way while the last block's backward makes the next."""
    stack, peaks = case.stack, [Transient(table * case.stack.weight_bytes + around)]
    for moment in final.moments:
        flying = in_flight(case, final.share, moment)
        peaks.append(Transient(moment.bytes + flying, made_late(case, final, moment) if lazy else 0.0))
    worst = max(peaks, key=sum)
    return worst._replace(bytes=worst.bytes + table * stack.gradient_bytes)


def loss_around(spec: ModelSpec, layout: Layout, tokens: int) -> float:
    """Bytes of the residual stream at the last norm, of which sp leaves a rank its part."""
    return 4.0 * spec.hidden * tokens / (layout.tp if layout.sp else 1)


def loss_held(spec: ModelSpec, layout: Layout, stack: SoftwareProfile, tokens: int) -> float:
    """Bytes at the loss's peak: of the stream around it, and its own."""
    return loss_around(spec, layout, tokens) + _logits_held(spec, layout, stack, tokens)


def _logits_held(spec: ModelSpec, layout: Layout, stack: SoftwareProfile, tokens: int) -> float:
    """In one pass: a slice's logits, or what is left of them when its gradients are taken."""
    own, narrow, peak = head(spec, layout.tp), stack.weight_bytes, stack.peak_logit_bytes
    if not stack.one_pass:
        gathered = stack.gathers_logits and layout.tp > 1
        return tokens * ((peak + GATHERED) * spec.vocab if gathered else peak * own.outputs)
    parts = slices(tokens, own.outputs)
    logits, table = len(parts[0]) * own.outputs, own.size
    running = max(4, narrow) * table if len(parts) > 1 else 0
    states = narrow * tokens * spec.hidden * (2 if layout.sp else 1)  # the gradient, and what sp has gathered
    return states + max(peak * logits + running, narrow * (logits + table) + running)
