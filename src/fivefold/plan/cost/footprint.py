"""Peak memory of a rank: state, activations in flight, what the worst moment of a step adds, and a margin.

footprint(case).total       # bytes on the fullest pipeline rank
footprint(case).parts       # by component
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import slices
from fivefold.layout.stages import Stage
from fivefold.plan.cost.activations import Kept
from fivefold.plan.cost.block_memory import (
    BlockMemory,
    Need,
    backward,
    block_of,
    bucketed,
    first_backward,
    in_flight,
    kept_by,
    made_late,
    plain,
)
from fivefold.plan.cost.kernels import plus, times
from fivefold.plan.cost.memory import Accounting, State
from fivefold.plan.cost.stack import Stack
from fivefold.plan.cost.time import Case, message, repeating, share_of
from fivefold.schedule.actions import FORWARD, WEIGHT_GRAD, Action
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import head

CONTEXT = 1.5e9  # bytes that CUDA, cuBLAS and NCCL take before the first tensor
FRAGMENTATION = 0.04  # of what is allocated: holes between blocks that no request fits
HEADROOM = 0.88  # of the memory that a plan may fill: the rest is for what no model counts
GATHERED = 6.0  # bytes per logit of the parts, the whole made of them, and its gradient, where logits are gathered


@dataclass(frozen=True)
class Footprint:
    """One pipeline rank at the moment of the step that needs the most."""

    rank: int
    state: State
    activations: Kept  # of all microbatches in flight
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
    return max((footprint_of(case, rank) for rank in ranks), key=lambda one: one.total / case.memory_of(one.rank))


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
    mine = layout.placement.of_rank[rank]
    stages = [case.stages[number] for number in mine]
    layers = [*(layer for stage in stages for layer in stage.layers), spec.layers - 1]  # a last stage may have none
    blocks = {dense: block_of(case, dense) for dense in {plain(spec, layer) for layer in layers}}
    schedule = case.schedule(repeating(layout))
    flying = schedule.in_flight[rank]
    last, waiting = next((number for number in mine if case.stages[number].last), None), 0.0
    if last is not None and stack.one_pass:  # what microbatches leave at the head for their backward passes
        states = case.work.tokens * spec.hidden / (layout.tp if layout.sp else 1)
        ahead = min(flying[last], _before_backward(schedule.compute(rank), last))
        waiting = max(0, ahead - 1) * (stack.weight_bytes * (states + head(spec, layout.tp).size))
    # A stage's output is held until its backward pass, beside the next stage's copy of it.
    outputs = sum(count for number, count in flying.items() if number != last) if layout.pp > 1 else 0
    buffers = stack.bucket_bytes + (schedule.on_their_way[rank] + outputs) * message(case)
    # Where no forward pass follows the rank's first backward, the most is held before there are gradients.
    kinds = dropwhile(FORWARD.__eq__, (action.kind for action in schedule.compute(rank)))
    lazy = stack.lazy_gradients and layout.chunks == 1 and FORWARD not in kinds
    moments = dict(_moments(case, stages, blocks, lazy))
    moment, (transient, made) = max(moments.items(), key=lambda one: sum(one[1]))
    usual = Need(moments["a block's backward"].bytes)
    if layout.zero < 3:
        usual = max(usual, _last_gradient(case, stages[0]), key=sum)
    waits = max(0, flying[mine[0]] - 1) if layout.chunks == 1 else 0
    parts = _states(case, stages)
    late = sum(part.gradients for axis, part in parts.items() if lazy and not bucketed(layout, axis))
    if spec.experts is not None and layout.zero < 3 and stages[0].layers:
        usual = max(first_backward(case, stages[0], blocks), _last_gradient(case, stages[0]), key=sum)
    after = usual.bytes + buffers + times(kept_by(spec, stages[0], blocks), waits).total
    each = [times(kept_by(spec, case.stages[number], blocks), flying[number]) for number in mine]
    flying_now = plus(*each)._replace(head=waiting)
    found = Footprint(
        rank, plus(*parts.values()), flying_now, moment, transient, buffers, 0.0, late - made, after, -usual.made
    )
    return replace(found, margin=CONTEXT + FRAGMENTATION * found.allocated)


def _states(case: Case, stages: list[Stage]) -> dict[str, State]:
    """Of a rank with these stages, by the axis that ZeRO divides it over: what tp divides, and its experts."""
    layout, stack, share = case.layout, case.stack, share_of(case, stages)
    held = Accounting(stack.weight_bytes, stack.gradient_bytes, stack.state_bytes)
    copies = max(layout.size("data"), layout.size("edp") if share.experts else 1)
    found = {}
    for axis, count in zip(("zero", "ezero"), share, strict=True):
        # FSDP2 keeps masters alone of all parameters, also of experts that no other rank has.
        ranks = copies if layout.zero == 3 else layout.size(axis)
        found[axis] = held.state(count, count / layout.size(axis), layout.zero if ranks > 1 else 0, ranks)
    return found


def _moments(
    case: Case, stages: list[Stage], blocks: dict[bool, BlockMemory], lazy: bool
) -> Iterator[tuple[str, Need]]:
    """Bytes on top of the activations in flight, at the moments that can be the worst of a step."""
    spec, layout, stack, work = case.spec, case.layout, case.stack, case.work
    table, wide = head(spec).size / layout.tp if spec.vocab > 1 else 0.0, stack.gradient_bytes
    here, last = sum(stage.first for stage in stages), any(stage.last for stage in stages)
    ends = (here + last) * table * stack.weight_bytes if layout.zero == 3 and layout.size("data") > 1 else 0.0
    # The gathered ends, and the head's gradient, wait for the end of the backward pass.
    kept_ends = ends + (last * table * stack.weight_bytes if ends else 0.0) if stack.keeps_ends else 0.0
    worst = max((backward(case, stage, blocks, lazy) for stage in stages), key=sum)
    yield "a block's backward", worst._replace(bytes=worst.bytes + kept_ends)
    if spec.vocab > 1 and last:
        final = blocks[plain(spec, spec.layers - 1)]
        block_left = final.share.total * stack.weight_bytes if ends else 0.0  # gathered last, and not yet let go
        around = 4.0 * spec.hidden * work.tokens / (layout.tp if layout.sp else 1) + ends + block_left
        yield "the loss", Need(around + loss_held(spec, layout, stack, work.tokens))
        if layout.zero == 2 and layout.size("data") > 1:
            yield "the head's gradient", _summed_head(case, final, table, around, lazy)
    if any(stage.first for stage in stages):
        # Its microbatch's activations are gone by then; or what waits for the weights' gradients has taken their place.
        kinds = [blocks[plain(spec, layer)] for layer in stages[0].layers]
        own = sum(max(0.0, one.kept.total - one.rest) for one in kinds)
        flying = wide * table if layout.zero == 2 and layout.size("data") > 1 else 0.0
        yield "the embedding's gradient", Need(stack.weight_bytes * table + flying - own)


def _last_gradient(case: Case, stage: Stage) -> Need:
    """The embedding's, when all others have been made and no activation is left but the gradient that came to it. That
    of a tied table has two parts, of which the head's has waited for this one; and a sum."""
    if not stage.first or case.spec.vocab == 1:
        return Need(0.0)
    spec, layout = case.spec, case.layout
    stream = case.work.tokens * spec.hidden / (layout.tp if layout.sp else 1)
    parts = 3 if spec.tied and stage.last else 1
    return Need(case.stack.weight_bytes * (parts * head(spec).size / layout.tp + stream))


def _summed_head(case: Case, final: BlockMemory, table: float, around: float, lazy: bool) -> Need:
    """ZeRO 2: the sum of the head's gradient is under way while the last block's backward makes the next."""
    stack, found = case.stack, [Need(table * case.stack.weight_bytes + around)]
    for one in final.moments:
        flying = in_flight(case, final.share, one)
        found.append(Need(one.bytes + flying, made_late(case, final, one) if lazy else 0.0))
    worst = max(found, key=sum)
    return worst._replace(bytes=worst.bytes + table * stack.gradient_bytes)


def loss_held(spec: ModelSpec, layout: Layout, stack: Stack, tokens: int) -> float:
    """Bytes at the loss's peak. In one pass: a slice's logits, or what is left of them when its gradients are taken."""
    own, narrow, peak = head(spec, layout.tp), stack.weight_bytes, stack.peak_logit_bytes
    if not stack.one_pass:
        gathered = stack.gathers_logits and layout.tp > 1
        return tokens * ((peak + GATHERED) * spec.vocab if gathered else peak * own.outputs)
    parts = slices(tokens, own.outputs)
    logits, table = len(parts[0]) * own.outputs, own.size
    running = max(4, narrow) * table if len(parts) > 1 else 0
    states = narrow * tokens * spec.hidden * (2 if layout.sp else 1)  # the gradient, and what sp has gathered
    return states + max(peak * logits + running, narrow * (logits + table) + running)
