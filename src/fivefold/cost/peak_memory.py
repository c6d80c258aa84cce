"""Peak memory of a rank: state, activations in flight, what the worst moment of a step adds, and a margin.

footprint(workload).total   # bytes on the pipeline rank with the highest ratio of memory to its device's
footprint(workload).parts   # by component

Activations of the microbatches in flight peak when a backward pass begins. The moments that can be the
peak are then a block's backward pass, the loss, and the gradients of head and embedding: each is a `Peak`, in bytes on
top of the state and of those activations, and the largest counts.

Gradients that wait for other ranks have buckets, allocated before the first step. All others are allocated lazily, by
the first backward pass, when the activations shrink already. So a rank may reach its peak at the end of that pass.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile, groupby
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.activations import (
    ExpertActivationMemory,
    SavedActivations,
    deferred_wgrad_bytes,
    saved_activations,
)
from fivefold.cost.block import BlockCost
from fivefold.cost.closed_forms import ZeroCost
from fivefold.cost.model_state import State
from fivefold.cost.moe import ParamShare
from fivefold.cost.software import SoftwareProfile
from fivefold.cost.step import Workload, matrix_cost, p2p_bytes, param_share, simulated_microbatches
from fivefold.layout.layout import Layout
from fivefold.layout.logit_slices import slices
from fivefold.layout.stages import Stage
from fivefold.schedules.actions import FORWARD, WEIGHT_GRAD, Action
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import head
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import accum_bytes
from fivefold.support.tuple_arithmetic import plus, scaled

# ---- block memory ---------------------------------------------------------------------------------------------------
# Bytes of one kind of block on one rank: what a microbatch saves in it, and the moments of its backward pass.
#
# blocks = RankBlocks(workload)                              # blocks.of_layer(3)
# backward_peak(workload, stage, blocks, peak_precedes_grads=False).bytes   # of a stage's blocks


class BackwardMoment(NamedTuple):
    """A moment of a block's backward pass that can be its peak."""

    bytes: float  # beside what forward has saved
    dense_grads_allocated: bool = False  # whether the gradients of all parameters but the experts' exist by then
    expert_grads_fraction: float = 0.0  # of the experts' gradients, the fraction that exists by then


class BlockMemory(NamedTuple):
    """One kind of block, with one microbatch."""

    saved: SavedActivations  # from forward to backward
    moments: tuple[BackwardMoment, ...]  # that can be its peak, in the order of the backward pass
    deferred_wgrad_bytes: float  # held from the input gradients (I) to the weight gradients (W); 0: backward is whole
    params: ParamShare  # its parameters on this rank

    @property
    def freed(self) -> float:
        """Bytes that I, or a whole backward pass, frees of what was saved."""
        return max(0.0, self.saved.total - self.deferred_wgrad_bytes)

    @property
    def wgrad_excess(self) -> float:
        """Bytes that the block holds for W beyond what it had saved."""
        return max(0.0, self.deferred_wgrad_bytes - self.saved.total)


@dataclass(frozen=True)
class RankBlocks:
    """The memory of each kind of block of a model, computed when first used."""

    workload: Workload

    @cached_property
    def _memory(self) -> dict[Layer, BlockMemory]:
        return {}

    def of_layer(self, layer: int) -> BlockMemory:
        kind = self.workload.spec.kinds(layer)
        if kind not in self._memory:
            self._memory[kind] = block_memory(self.workload, kind)
        return self._memory[kind]

    def runs(self, stage: Stage) -> list[tuple[BlockMemory, int]]:
        """The memory of a stage's blocks, in the order of the backward pass: of neighbours that have as much once, with
        their number."""
        alike = groupby(map(self.of_layer, reversed(stage.layers)))
        return [(block, len(list(run))) for block, run in alike]

    def saved(self, stage: Stage) -> SavedActivations:
        """What one microbatch saves in a stage."""
        counted = Counter(map(self.of_layer, reversed(stage.layers))).items()
        return plus(SavedActivations(), *(scaled(block.saved, count) for block, count in counted))


def mlp_backward_bytes(block_cost: BlockCost) -> float:
    """Bytes that a block's backward needs beside what is saved: gradients of the MLP's intermediates and of its largest
    weight; with tp, of both weights that share an input, and of that input, gathered."""
    matmuls, layout = block_cost.operations.matmuls, block_cost.layout
    if not matmuls:
        return 0.0
    down = matmuls[-1]
    bytes_ = block_cost.activation_bytes * (2.0 * block_cost.tokens * down.inputs + down.size)
    if layout.tp > 1:
        copies = 2 if layout.sp else 1
        bytes_ += block_cost.activation_bytes * (down.size + copies * block_cost.tokens * down.outputs)
    return bytes_


def cp_buffer_bytes(block_cost: BlockCost) -> float:
    """Bytes that cp needs beside the activations while attention runs forward."""
    return block_cost.cp_method.buffers if block_cost.cp_method else 0.0


def cp_backward_buffer_bytes(block_cost: BlockCost) -> float:
    """The same while attention runs backward."""
    method = block_cost.cp_method
    if method is None:
        return 0.0
    freed = method.stacked if block_cost.layout.recompute == "full" else 0
    return float(method.backward_buffers - freed)


def block_memory(workload: Workload, layer: Layer) -> BlockMemory:
    """The memory of one block."""
    spec, layout, software = workload.spec, workload.layout, workload.software
    block_cost = workload.block_cost.of(layer)

    def saved_under(layout: Layout) -> SavedActivations:
        sizes = (workload.samples, workload.seq, block_cost.activation_bytes)
        return saved_activations(spec, layout, software, *sizes, layer=layer, imbalance=workload.imbalance)

    saved, without_recompute = saved_under(layout), saved_under(structs.replace(layout, recompute="none"))
    splits = layout.pp > 1 and workload.splits_backward
    deferred = 0.0
    if splits:
        deferred = deferred_wgrad_bytes(spec, layout, block_cost.tokens, block_cost.activation_bytes, layer)
    base = without_recompute.total - saved.total  # recomputed activations
    if not layer.routed:
        moment = BackwardMoment(
            base + cp_buffer_bytes(block_cost) + mlp_backward_bytes(block_cost), dense_grads_allocated=True
        )
        return BlockMemory(saved, (moment,), deferred, params=block_cost.rank_params)
    moe = ExpertActivationMemory(
        spec=spec,
        layer=layer,
        layout=layout,
        software=software,
        tokens=block_cost.tokens,
        activation_bytes=block_cost.activation_bytes,
        imbalance=workload.imbalance,
        splits_backward=splits,
    )
    deferred += moe.deferred_wgrad_bytes if splits else 0.0
    # Backward begins with a shared expert, if there is one: its activations are freed by then, and its gradients stand
    # for those of the dense part.
    residual_grads = 2 * block_cost.activation_bytes * block_cost.tokens * spec.hidden / layout.sp_degree
    base += residual_grads - without_recompute.mlp
    has_shared = moe.experts.shared > 0
    moments = [
        BackwardMoment(base + moe.during_combine, has_shared),
        BackwardMoment(base + moe.during_weighting, has_shared),
        BackwardMoment(base + moe.during_combine_backward, has_shared),
        BackwardMoment(base + moe.during_last_linear, has_shared, moe.last_linear_fraction),
        BackwardMoment(base + moe.during_first_linears, has_shared, 1.0),
        BackwardMoment(base + moe.during_dispatch_backward, has_shared, 1.0),
    ]
    if layout.cp > 1:  # attention, when all activations of the experts are freed
        attention = cp_backward_buffer_bytes(block_cost) - without_recompute.experts
        moments.append(BackwardMoment(base + attention, has_shared, 1.0))
    return BlockMemory(saved, tuple(moments), deferred, params=block_cost.rank_params)


class Peak(NamedTuple):
    """A candidate for a rank's peak: bytes on top of its activations in flight, and gradients allocated lazily."""

    bytes: float
    new_grads: float = 0.0  # bytes of gradients that this backward pass has allocated by then
    missing_grads: float = 0.0  # bytes of gradients that are not yet there, where all others are

    @property
    def total(self) -> float:
        return self.bytes + self.new_grads - self.missing_grads


def highest(peaks: Iterable[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.total)


def backward_peak(workload: Workload, stage: Stage, blocks: RankBlocks, *, peak_precedes_grads: bool) -> Peak:
    """The peak of a stage's backward pass through its blocks.

    It is in the last block of a kind, when what the blocks behind it saved is freed. `peak_precedes_grads`: gradients
    without a bucket are allocated by this pass.
    """
    peaks, freed, deferred = [Peak(0.0)], 0.0, 0.0
    for block, count in blocks.runs(stage):
        for moment in block.moments:
            # Where backward is split, the blocks that it has passed still hold what their weight gradients read.
            bytes_ = (
                moment.bytes
                + fsdp_buffers(workload, block, moment)
                + deferred
                + (count - 1) * block.wgrad_excess
                - freed
            )
            new_grads = lazy_expert_grads(workload, block, moment.expert_grads_fraction) if peak_precedes_grads else 0.0
            peaks.append(Peak(bytes_, new_grads))
        freed += count * block.freed
        deferred += count * block.wgrad_excess
    return highest(peaks)


def end_of_first_backward_in_blocks(workload: Workload, stage: Stage, blocks: RankBlocks) -> Peak:
    """The peak at the end of the first backward pass, in the stage's first block with experts: the gradients of all
    later blocks are allocated, and this one's are not all."""
    routed = next((layer for layer in stage.layers if workload.spec.kinds(layer).routed), None)
    if routed is None:
        return Peak(blocks.of_layer(stage.layers[0]).moments[-1].bytes if stage.layers else 0.0)
    block, before = blocks.of_layer(routed), range(stage.layers.start, routed)
    earlier_activations = sum(blocks.of_layer(layer).saved.total for layer in before)
    all_grads = lazy_expert_grads(workload, block, 1.0)
    worst = highest(
        Peak(moment.bytes, missing_grads=all_grads - lazy_expert_grads(workload, block, moment.expert_grads_fraction))
        for moment in block.moments
    )
    return worst._replace(bytes=earlier_activations + block.saved.total + worst.bytes)


def has_bucket(layout: Layout, axis: str) -> bool:
    """Whether the gradients that ZeRO divides over an axis have buckets, which are allocated before the first step.
    Without buckets the first backward pass allocates them."""
    return layout.size(axis) * layout.replicate > 1 and layout.zero < 3


def lazy_expert_grads(workload: Workload, block: BlockMemory, fraction: float) -> float:
    """Bytes of a `fraction` of the gradients of experts, where they are allocated lazily: no other rank has these."""
    is_lazy = not has_bucket(workload.layout, "efsdp") and workload.layout.zero < 3
    return fraction * block.params.experts * workload.software.gradient_bytes if is_lazy else 0.0


def grads_being_reduced(workload: Workload, params: ParamShare, moment: BackwardMoment) -> float:
    """Bytes of a block's gradients that are computed by then and have to be reduced over other ranks."""
    reduced = 0.0
    if moment.dense_grads_allocated and workload.layout.size("fsdp") > 1:
        reduced += params.dense
    if moment.expert_grads_fraction and workload.layout.size("efsdp") > 1:
        reduced += params.experts
    return reduced * workload.software.gradient_bytes


def fsdp_buffers(workload: Workload, block: BlockMemory, moment: BackwardMoment) -> float:
    """Bytes of gathered weights and of gradients being reduced during a block's backward pass.

    ZeRO 3 holds the weights of two blocks and the gradients of one. ZeRO 2 holds the gradients of one block, or of two
    once the first one's activations are freed. Experts are a unit of their own, gathered and reduced apart from the
    rest of the block.
    """
    layout, software = workload.layout, workload.software
    compute_bytes, gradient_bytes = software.weight_bytes, software.gradient_bytes
    if layout.zero == 2:
        reducing = grads_being_reduced(workload, block.params, moment)
        # The experts' gradients are reduced by the time the rest of the block's are.
        dense = grads_being_reduced(workload, block.params, BackwardMoment(0.0, dense_grads_allocated=True))
        return max(reducing, reducing + dense - block.saved.total)
    # Where only experts have copies, FSDP2 shards all parameters of a block nevertheless, each over its own ranks.
    if not layout.fully_shards(workload.spec):
        return 0.0
    dense, experts = block.params
    if not experts:
        return dense * (2 * compute_bytes + gradient_bytes)
    if 0 < moment.expert_grads_fraction < 1:  # the next block's experts are not gathered yet
        return 2 * compute_bytes * dense + compute_bytes * experts
    if moment.expert_grads_fraction:
        return 2 * compute_bytes * dense + (2 * compute_bytes + gradient_bytes) * experts
    return (2 * compute_bytes + gradient_bytes) * dense + compute_bytes * experts


# ---- footprint ------------------------------------------------------------------------------------------------------


CUDA_CONTEXT_BYTES = 1.5e9  # that CUDA, cuBLAS and NCCL take before the first tensor
FRAGMENTATION = 0.04  # of what is allocated: holes between blocks that no request fits
USABLE_FRACTION = 0.88  # of a device's memory, that a plan may fill: the rest is for what no model counts
# Bytes per logit where logits are gathered over tp: the parts, the whole made of them, and its gradient.
GATHERED_LOGIT_BYTES = 6.0
LAST_NORM_BYTES = 4.0  # per element of the residual stream at the last norm: its input and output, in bf16


@dataclass(frozen=True)
class Footprint:
    """One pipeline rank at its peak.

    Its state counts all gradients. Of those that are allocated lazily some do not exist yet while the activations are
    at their most, and some not even at the end of the first backward pass.
    """

    rank: int
    state: State
    activations: SavedActivations  # of all microbatches in flight
    moment_name: str  # "the loss", "a block's backward", "the embedding's gradient"
    # Bytes of that moment alone: logits, a recomputed block, gathered weights, gradients being reduced.
    moment_bytes: float
    buffers: float  # pipeline messages, and buckets of collectives
    margin: float = 0.0  # the CUDA context, and fragmentation
    missing_grads_at_moment: float = 0.0  # bytes of gradients that do not exist yet at that moment
    end_of_first_backward: float = 0.0  # bytes of activations and the like at the end of the first backward pass
    missing_grads_at_end: float = 0.0  # bytes of gradients that do not exist yet at that end

    @property
    def non_state(self) -> float:
        return self.activations.total + self.moment_bytes + self.buffers

    @property
    def gradients(self) -> float:
        """Gradients at the peak.

        Where the end of the first backward pass exceeds the named moment, the excess is counted here, so that the parts
        add up to the peak; it can include activations.
        """
        excess = self.missing_grads_at_moment - self.missing_grads_at_end + self.end_of_first_backward - self.non_state
        return self.state.gradients - self.missing_grads_at_moment + max(0.0, excess)

    @property
    def allocated(self) -> float:
        return self.state.total - self.state.gradients + self.gradients + self.non_state

    @property
    def reserved(self) -> float:
        """What PyTorch's allocator has taken from the device: all but the context."""
        return self.total - CUDA_CONTEXT_BYTES

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
            self.moment_name: self.moment_bytes,
            "buffers": self.buffers,
            "context and fragmentation": self.margin,
        }


def footprint(workload: Workload) -> Footprint:
    """The pipeline rank with the highest ratio of memory to its device's."""
    ranks = range(workload.layout.pp)
    return max(
        (footprint_of(workload, rank) for rank in ranks),
        key=lambda needs: needs.total / workload.device_memory_of(needs.rank),
    )


def footprint_of(workload: Workload, rank: int) -> Footprint:
    """One pipeline rank."""
    layout, software, spec = workload.layout, workload.software, workload.spec
    stage_ids = layout.placement.of_rank[rank]
    stages, blocks = [workload.stages[stage] for stage in stage_ids], RankBlocks(workload)
    schedule = workload.schedule(simulated_microbatches(layout))
    in_flight = schedule.in_flight[rank]  # microbatches, by stage
    head_stage = next((stage for stage in stage_ids if workload.stages[stage].last), None)
    # A stage's output is held until its backward pass, beside the next stage's copy of it.
    outputs = sum(count for stage, count in in_flight.items() if stage != head_stage) if layout.pp > 1 else 0
    buffers = software.bucket_bytes + (schedule.p2p_in_flight[rank] + outputs) * p2p_bytes(workload)
    # Where no forward pass follows the rank's first backward, activations are at their most before any gradient exists.
    kinds = (action.kind for action in schedule.compute(rank))
    after_first_forwards = dropwhile(lambda kind: kind is FORWARD, kinds)
    peak_precedes_grads = software.lazy_gradients and layout.chunks == 1 and FORWARD not in after_first_forwards
    parts = ZeroCost(spec, _keeping(workload, stages), workload.topology).states(
        param_share(workload, stages), layout.zero
    )
    lazy_grads = sum(
        part.gradients for axis, part in parts.items() if peak_precedes_grads and not has_bucket(layout, axis)
    )
    saved = plus(*(scaled(blocks.saved(workload.stages[stage]), in_flight[stage]) for stage in stage_ids))
    backlog = (
        0.0
        if head_stage is None
        else _head_backlog(workload, in_flight[head_stage], schedule.compute(rank), head_stage)
    )
    activations = saved._replace(head=backlog)
    peaks = dict(_peaks(workload, stages, blocks, peak_precedes_grads=peak_precedes_grads))
    moment_name, peak = max(peaks.items(), key=lambda entry: entry[1].total)
    matrices = matrix_cost(workload, rank).peak
    if 0 < matrices > activations.total + peak.total - lazy_grads:  # activations are gone, all gradients are there
        activations, moment_name, peak = SavedActivations(), "the optimizer's matrices", Peak(matrices, lazy_grads)
    end_of_first_backward = _end_of_first_backward(workload, stages[0], blocks, usual=peaks["a block's backward"].bytes)
    others = max(0, in_flight[stage_ids[0]] - 1) if layout.chunks == 1 else 0  # microbatches that wait for backward
    needs = Footprint(
        rank=rank,
        state=plus(*parts.values()),
        activations=activations,
        moment_name=moment_name,
        moment_bytes=peak.bytes,
        buffers=buffers,
        missing_grads_at_moment=lazy_grads - peak.new_grads,
        end_of_first_backward=end_of_first_backward.bytes + buffers + scaled(blocks.saved(stages[0]), others).total,
        missing_grads_at_end=end_of_first_backward.missing_grads,
    )
    return replace(needs, margin=CUDA_CONTEXT_BYTES + FRAGMENTATION * needs.allocated)


def _keeping(workload: Workload, stages: Sequence[Stage]) -> SoftwareProfile:
    """With the optimizer's states of these stages, where parameters differ in them."""
    software = workload.software
    if software.matrices is None:
        return software
    held = [param for param in workload.spec.parameters() if any(stage.holds(param) for stage in stages)]
    return software.optimizing_with(software.matrices, held)


def _end_of_first_backward(workload: Workload, stage: Stage, blocks: RankBlocks, usual: float) -> Peak:
    """The peak at the end of a rank's first backward pass, in its first stage; `usual` bytes where no gradients are
    allocated lazily at its end."""
    if workload.layout.zero == 3:  # a unit's gradients are in a buffer of their own, and the shards count as allocated
        return Peak(usual)
    in_blocks = Peak(usual)
    if workload.spec.experts is not None and stage.layers:
        in_blocks = end_of_first_backward_in_blocks(workload, stage, blocks)
    return highest((in_blocks, _embedding_grad(workload, stage)))


def _head_backlog(workload: Workload, in_flight: int, order: Iterable[Action], head_stage: int) -> float:
    """Bytes that microbatches hold at the head after their forward pass, where the loss's gradients are taken with it:
    gradients of the head's weight and input."""
    spec, layout, software = workload.spec, workload.layout, workload.software
    if not software.one_pass:
        return 0.0
    states = workload.block_cost.tokens * spec.hidden / layout.sp_degree
    outstanding = min(in_flight, _most_outstanding(order, head_stage))
    return max(0, outstanding - 1) * (software.weight_bytes * (states + head(spec, layout.tp).size))


def _most_outstanding(order: Iterable[Action], stage: int) -> int:
    """The most microbatches of a stage between their forward and their backward pass (I, where that is split)."""
    live = most = 0
    for action in order:
        if action.stage == stage and action.kind is not WEIGHT_GRAD:
            live += 1 if action.kind is FORWARD else -1
            most = max(most, live)
    return most


def _peaks(
    workload: Workload, stages: list[Stage], blocks: RankBlocks, *, peak_precedes_grads: bool
) -> Iterator[tuple[str, Peak]]:
    """The moments of a step that can be its peak."""
    spec, layout, software, tokens = workload.spec, workload.layout, workload.software, workload.block_cost.tokens
    table = head(spec).size / layout.tp if spec.vocab > 1 else 0.0
    gradient_bytes = software.gradient_bytes
    has_embedding, has_head = any(stage.first for stage in stages), any(stage.last for stage in stages)
    # Embedding and head are dense: they have no part in what ZeRO 3 gathers where only experts have copies.
    gathers = layout.zero == 3 and layout.size("dp_cp") > 1
    gathered = (has_embedding + has_head) * table * software.weight_bytes if gathers else 0.0  # embedding and head
    # FSDP's root keeps both gathered, and the head's gradient, to the end of the backward pass.
    kept = gathered + (has_head * table * software.weight_bytes if gathered else 0.0) if software.keeps_ends else 0.0
    worst = highest(backward_peak(workload, stage, blocks, peak_precedes_grads=peak_precedes_grads) for stage in stages)
    yield "a block's backward", worst._replace(bytes=worst.bytes + kept)
    reduces_each = layout.zero == 2 and layout.size("dp_cp") > 1  # gradients, in every microbatch
    if spec.vocab > 1 and has_head:
        final = blocks.of_layer(spec.layers - 1)
        # The last block is still gathered.
        gathered_at_head = gathered + (final.params.total * software.weight_bytes if gathered else 0.0)
        yield "the loss", Peak(loss_peak(spec, layout, software, tokens) + gathered_at_head)
        if reduces_each:
            residual = residual_bytes(spec, layout, tokens) + gathered_at_head
            peak = _head_grad(workload, final, table, residual, peak_precedes_grads=peak_precedes_grads)
            yield "the head's gradient", peak
    if has_embedding:
        # Its microbatch's activations are freed by then, but for what is held for W.
        freed = sum(blocks.of_layer(layer).freed for layer in stages[0].layers)
        reducing = gradient_bytes * table if reduces_each else 0.0
        yield "the embedding's gradient", Peak(software.weight_bytes * table + reducing - freed)


def _head_grad(
    workload: Workload, final: BlockMemory, table: float, residual: float, *, peak_precedes_grads: bool
) -> Peak:
    """ZeRO 2: the head's gradient is being reduced while the last block computes its own."""
    software, peaks = workload.software, [Peak(table * workload.software.weight_bytes + residual)]
    for moment in final.moments:
        reducing = grads_being_reduced(workload, final.params, moment)
        new_grads = lazy_expert_grads(workload, final, moment.expert_grads_fraction) if peak_precedes_grads else 0.0
        peaks.append(Peak(moment.bytes + reducing, new_grads))
    worst = highest(peaks)
    return worst._replace(bytes=worst.bytes + table * software.gradient_bytes)


def _embedding_grad(workload: Workload, stage: Stage) -> Peak:
    """The embedding's gradient, when all others are allocated and the gradient of its output is the last activation.
    A tied table's has three parts: the head's, which has waited, the embedding's, and their sum."""
    if not stage.first or workload.spec.vocab == 1:
        return Peak(0.0)
    spec, layout = workload.spec, workload.layout
    residual = workload.block_cost.tokens * spec.hidden / layout.sp_degree
    parts = 3 if spec.tied and stage.last else 1
    return Peak(workload.software.weight_bytes * (parts * head(spec).size / layout.tp + residual))


def residual_bytes(spec: ModelSpec, layout: Layout, tokens: int) -> float:
    """Bytes of the residual stream at the last norm; under sp of this rank's tokens."""
    return LAST_NORM_BYTES * spec.hidden * tokens / layout.sp_degree


def loss_peak(spec: ModelSpec, layout: Layout, software: SoftwareProfile, tokens: int) -> float:
    """Bytes while the loss is computed: logits, their gradients, and the residual stream."""
    return residual_bytes(spec, layout, tokens) + _logit_bytes(spec, layout, software, tokens)


def _logit_bytes(spec: ModelSpec, layout: Layout, software: SoftwareProfile, tokens: int) -> float:
    """In one pass: the logits of a slice of the tokens, or what is left of them when its gradients are computed."""
    local_head, compute_bytes, per_logit = head(spec, layout.tp), software.weight_bytes, software.peak_logit_bytes
    if not software.one_pass:
        gathered = software.gathers_logits and layout.tp > 1
        return tokens * (
            (per_logit + GATHERED_LOGIT_BYTES) * spec.vocab if gathered else per_logit * local_head.outputs
        )
    parts = slices(tokens, local_head.outputs)
    logits, table = len(parts[0]) * local_head.outputs, local_head.size
    accumulated = accum_bytes(compute_bytes) * table if len(parts) > 1 else 0  # the head's gradient, over slices
    states = compute_bytes * tokens * spec.hidden * (2 if layout.sp else 1)  # the gradient, and what sp has gathered
    return states + max(per_logit * logits + accumulated, compute_bytes * (logits + table) + accumulated)
