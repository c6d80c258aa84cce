"""Bytes that one microbatch saves for its backward pass, by kind, on one rank.

saved_activations(spec, layout, software, samples, seq)      # of a block
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.cost.moe import expert_matmuls
from fivefold.cost.routing import ExpertLoad
from fivefold.cost.software import SoftwareProfile
from fivefold.layout.layout import Layout, Recompute
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import accum_bytes

# ---- expert activations ---------------------------------------------------------------------------------------------
# Bytes of the experts of one block on one rank: what a microbatch saves, and the peaks of its backward pass.
#
#     experts = ExpertActivationMemory(spec=spec, layer=layer, layout=layout, software=software, tokens=4096)
#     experts.saved, experts.saved_selective     # without recompute, and with selective recompute
#     experts.during_last_linear                 # in backward, on top of `saved`
#
# A rank routes each of its tokens of the microbatch to several experts: a slot is such a (token, expert) pair. A row is
# a slot once it is dispatched: a rank computes those that its own experts receive, the most loaded rank `imbalance`
# times the mean. Experts' outputs are weighted in float32, and the peak is often there: the gradients of the slots, and
# their products with the slots.


# Tensors of a gated activation that a fused kernel does not save: the gate's output; or, where the gate is clamped, the
# clamped gate, its sigmoid, their product, and the clamped input.
GATED_ACTIVATION_EXTRA_TENSORS = {"swiglu": 1, "swiglu_clamped": 4}
INDEX_BYTES = 8  # int64
# Per slot, nearly: its expert, its places before and after sorting, and its weight.
ROUTING_METADATA_BYTES = 5 * INDEX_BYTES


def num_saved_activation_tensors(spec: ModelSpec, software: SoftwareProfile) -> int:
    """Tensors that an activation function saves beside its inputs and its output, each as wide as the output."""
    eager = software.pointwise in ("eager", "fivefold")
    return GATED_ACTIVATION_EXTRA_TENSORS.get(spec.activation, 0) if eager else 0


@dataclass(frozen=True, kw_only=True)
class ExpertActivationMemory(ExpertLoad):
    """The experts of one block, for a microbatch with `tokens` on a cp rank.

    The properties `during_...` are moments of the backward pass, in its order: bytes on top of `saved`.
    """

    spec: ModelSpec
    layer: Layer
    layout: Layout
    software: SoftwareProfile
    tokens: int
    activation_bytes: int = 2  # per element
    imbalance: float = 1.0
    splits_backward: bool = False  # into input gradients (I) and weight gradients (W)

    # ---- saved in forward --------------------------------------------------------------------------------------------

    @property
    def saved(self) -> float:
        """What autograd saves without recompute."""
        *columns, down = self._matmuls
        activation_tensors = 1 + num_saved_activation_tensors(self.spec, self.software)
        inner = sum(matmul.outputs for matmul in columns) + activation_tensors * down.inputs
        bytes_ = self.saved_by_router + self.rows * self.activation_bytes * (self.spec.hidden + inner)
        if not self._unfused_probs:
            return bytes_
        return bytes_ + self._expert_outputs * (2 if self._allgather_dispatch else 1)  # sums over ranks keep an input

    @property
    def saved_by_router(self) -> float:
        """The router's input and weight in float32, the scores, and the metadata of the slots."""
        experts, hidden = self.experts.count, self.spec.hidden
        inputs = self.routed * hidden * (self._accum_bytes if self._unfused_probs else self.activation_bytes)
        weight = experts * hidden * self._accum_bytes if self.activation_bytes < self._accum_bytes else 0
        return inputs + weight + self._router_scores + self.slots * ROUTING_METADATA_BYTES

    @property
    def saved_selective(self) -> float:
        """What selective recompute saves: outputs of matmuls, and all that came from other ranks."""
        # The combine all-to-all sends the outputs of the last linear away, so autograd does not keep them here.
        sends_outputs = self.layout.ep > 1 and not self._allgather_dispatch
        kept = self._matmuls[:-1] if sends_outputs else self._matmuls
        bytes_ = self.rows * self.activation_bytes * sum(matmul.outputs for matmul in kept)
        bytes_ += self._router_scores
        if self._allgather_dispatch:
            bytes_ += self._gathered_elements * self.activation_bytes + self._gathered_choices
            bytes_ += self._combined_tokens
        elif self.layout.ep > 1:  # rows that came to their experts, and outputs that came back
            bytes_ += (self.rows + self.slots) * self.spec.hidden * self.activation_bytes
        return bytes_ + self._saved_token_gather

    @property
    def _gathered_choices(self) -> float:
        """The expert and its weight for every slot of all ranks of ep."""
        return self.layout.ep * self.slots * (INDEX_BYTES + self._accum_bytes)

    @property
    def _combined_tokens(self) -> float:
        """The sums of experts' outputs that the reduce-scatter leaves a rank."""
        return self.routed * self.spec.hidden * self._accum_bytes

    @property
    def _saved_token_gather(self) -> float:
        """Without sp each tp rank routes a slice of the tokens, and the slices' outputs are gathered."""
        gathers = self.layout.tp > 1 and not self.layout.sp
        return self.tokens * self.spec.hidden * self.activation_bytes if gathers else 0.0

    # ---- moments of backward -----------------------------------------------------------------------------------------

    @property
    def during_combine(self) -> float:
        """The combine by a reduce-scatter: zeros and the sums; or, where a block is recomputed, zeros and the gathered
        gradient of the sums, which are as large. Beside them the rows that are summed, and what selective recompute
        saves of the combine, which is not read yet."""
        if not self._allgather_dispatch:
            return 0.0
        unread = self._combined_tokens if self.layout.recompute == "selective" else 0.0
        return self._gathered_elements * (2 * self._accum_bytes + self.activation_bytes) + self._row_bytes + unread

    @property
    def during_weighting(self) -> float:
        """The backward pass of weighting the experts' outputs; none of the block's gradients are allocated yet."""
        if not self._unfused_probs:
            return 0.0
        return 2 * (self.rows if self._allgather_dispatch else self.slots) * self.spec.hidden * self._accum_bytes

    @property
    def _freed_by_weighting(self) -> float:
        """The part of `saved` that is freed once the weighting's backward pass is done."""
        return self._expert_outputs * (2 if self._allgather_dispatch else 1) if self._unfused_probs else 0.0

    @property
    def during_combine_backward(self) -> float:
        """The gradients of rows are received from other ranks, and put in order."""
        if self.layout.ep == 1 or self._allgather_dispatch:
            return 0.0
        return 2 * self._row_bytes - self._freed_by_weighting

    @property
    def during_last_linear(self) -> float:
        """The experts' last linear and their activation function: gradients of two intermediates; or of a row, an
        intermediate and the weight. Where backward is split, W still needs an intermediate and the gradient of a row.
        """
        if self.splits_backward:
            return 3 * self._intermediate_bytes + self._row_bytes - self._freed_by_weighting
        wgrad = self._row_bytes + self._intermediate_bytes + self._wgrad_bytes
        return max(2 * self._intermediate_bytes, wgrad) - self._freed_by_weighting

    @property
    def last_linear_fraction(self) -> float:
        """The fraction of the experts' parameters in their last linear, whose gradient comes first."""
        return 1 / len(self._matmuls)

    @property
    def during_first_linears(self) -> float:
        """The end of the linears before it: gradients of rows and of a weight; the intermediates are freed."""
        held = self.deferred_wgrad_bytes if self.splits_backward else self._wgrad_bytes
        return self._row_bytes + held - (self.saved - self.saved_by_router)

    @property
    def during_dispatch_backward(self) -> float:
        """After all linears: gradients of rows, and buffers for them in the order in which they came."""
        held = self.deferred_wgrad_bytes if self.splits_backward else 0.0
        return 3 * self._row_bytes + held - (self.saved - self.saved_by_router)

    @property
    def deferred_wgrad_bytes(self) -> float:
        """What a block holds from I to W: rows and intermediates, and the gradients of the linears' outputs."""
        *columns, down = self._matmuls
        features = columns[0].inputs + down.inputs + sum(matmul.outputs for matmul in self._matmuls)
        return self.rows * self.activation_bytes * features

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def _allgather_dispatch(self) -> bool:
        """Whether every rank of ep gets all tokens."""
        return self.layout.dispatch == "allgather" and self.layout.ep > 1

    @property
    def _accum_bytes(self) -> int:
        return accum_bytes(self.activation_bytes)

    @property
    def _unfused_probs(self) -> bool:
        """Whether experts' outputs are weighted, and the router's input is cast, by kernels of their own. Other
        software weights inside of the activation function, and its router reads the norm's output."""
        return self.software.pointwise in ("eager", "fivefold")

    @cached_property
    def _matmuls(self) -> list[Matmul]:
        return expert_matmuls(self.spec, self.layer)

    @property
    def _router_scores(self) -> float:
        """A score per token and expert."""
        return self.routed * self.experts.count * self._accum_bytes

    @property
    def _expert_outputs(self) -> float:
        """The experts' outputs: a row for each slot; where tokens are gathered, for each row here, in float32."""
        if self._allgather_dispatch:
            return self.spec.hidden * (self.rows * self._accum_bytes)
        return self.spec.hidden * (self.slots * self.activation_bytes)

    @property
    def _intermediate_bytes(self) -> float:
        """One of the experts' intermediates."""
        return self.rows * self._matmuls[-1].inputs * self.activation_bytes

    @property
    def _gathered_elements(self) -> float:
        """Elements (not bytes) of the tokens of all ranks of ep."""
        return self.layout.ep * self.routed * self.spec.hidden

    @property
    def _row_bytes(self) -> float:
        """All rows of this rank."""
        return self.rows * self.spec.hidden * self.activation_bytes

    @property
    def _wgrad_bytes(self) -> float:
        """The gradient of one weight, of all experts of this rank, before it is cast to float32."""
        down = self._matmuls[-1]
        return down.inputs * down.outputs * self.experts.count / self.layout.ep * self.activation_bytes


# ---- activations ----------------------------------------------------------------------------------------------------


class SavedActivations(NamedTuple):
    """Bytes by kind."""

    residual: float = 0.0  # the residual stream: a block's input
    norm: float = 0.0
    attention: float = 0.0
    scores: float = 0.0  # attention probabilities, where attention is not one kernel
    mlp: float = 0.0
    head: float = 0.0  # gradients that are computed with the loss, and wait for the backward pass
    experts: float = 0.0  # router, rows that this rank's experts received, their intermediates

    @property
    def total(self) -> float:
        return sum(self)


def saved_activations(
    spec: ModelSpec,
    layout: Layout,
    software: SoftwareProfile,
    samples: int,
    seq: int,
    activation_bytes: int = 2,
    *,
    layer: Layer | None = None,
    imbalance: float = 1.0,
) -> SavedActivations:
    """What one block, of the model's last layer unless `layer` is given, saves of one microbatch. `activation_bytes`
    are per element; experts are those of the rank with `imbalance` times the mean of the tokens.

    Textbook case: a GPT block with dropout and fused softmax, without recompute, saves T E (34 + 5 H S / E) bytes for T
    tokens of sequences of S, hidden size E and H heads (arXiv 2205.05198, section 4.1). TP divides all but 10 T E of
    it; SP also divides that.
    """
    saved = SavedByBlock(
        spec=spec,
        layer=layer or spec.kinds(spec.layers - 1),
        layout=layout,
        software=software,
        tokens=samples * seq // layout.cp,
        seq=seq,
        activation_bytes=activation_bytes,
        imbalance=imbalance,
    )
    return saved.under(layout.recompute)


@dataclass(frozen=True, kw_only=True)
class SavedByBlock:
    """What one block saves of one microbatch, by what is recomputed; whatever the layout recomputes."""

    spec: ModelSpec
    layer: Layer
    layout: Layout
    software: SoftwareProfile
    tokens: int  # on a cp rank
    seq: int
    activation_bytes: int
    imbalance: float

    def under(self, recompute: Recompute) -> SavedActivations:
        """Where this is recomputed."""
        if recompute == "none":
            return self.without_recompute
        return SavedActivations(residual=self.block_input) if recompute == "full" else self.selective

    # ---- selective recompute -----------------------------------------------------------------------------------------

    @cached_property
    def selective(self) -> SavedActivations:
        """Recompute of attention's core alone; or of all but matmuls; or of these and half of the matmuls."""
        if self.software.selective == "attention":
            return self.without_recompute._replace(scores=0.0)
        half = self.software.selective == "half"
        return SavedActivations(
            residual=self.block_input,
            attention=self._attention_half if half else self._attention_matmul_outputs,
            mlp=self._mlp_matmul_outputs / 2 if half else self._mlp_matmul_outputs,
            experts=self._experts.saved_selective if self._experts else 0.0,
        )

    @property
    def _attention_matmul_outputs(self) -> float:
        """The outputs of every matmul and of attention, and what Ulysses exchanged before attention and after it."""
        operations = block(self.spec, self.layout.tp, self.layer)
        bytes_ = self._bytes(operations.attention.width + self._output_features(operations, self._mixer_branch))
        if self.layout.cp > 1 and self.layout.cp_kind == "ulysses":
            exchanged = self._operations.attention
            bytes_ += self._bytes(2 * exchanged.width + 2 * exchanged.kv_width)
        if self.layout.sp:  # the latents of all tokens, gathered
            bytes_ += self._bytes(operations.attending.latents)
        return bytes_

    @property
    def _attention_half(self) -> float:
        """Half of queries, keys, values, attention's output and the output projection's: 3 times the queries' width and
        2 times the keys'."""
        scores = block(self.spec, self.layout.tp, self.layer).attention
        return self._bytes(1.5 * scores.width + 1.0 * scores.kv_width)

    @property
    def _mlp_matmul_outputs(self) -> float:
        return self._bytes(self._output_features(block(self.spec, self.layout.tp, self.layer), self._mlp_branch))

    def _output_features(self, operations: BlockOperations, branch: str) -> float:
        """Features that the matmuls of a branch write. Of those that all tp ranks have whole, be they computed alike or
        summed, sp leaves a rank its part of the tokens."""
        matmuls = (matmul for matmul in operations.of(branch) if matmul.dense)
        return sum(matmul.outputs / (self.layout.sp_degree if matmul.whole else 1) for matmul in matmuls)

    # ---- no recompute ------------------------------------------------------------------------------------------------

    @cached_property
    def without_recompute(self) -> SavedActivations:
        """What autograd saves."""
        return SavedActivations(
            residual=self._read_by("residual") * self.activation_bytes,
            norm=self._norm,
            attention=self._attention if self.layer.attends else self._other_mixer,
            scores=self._attention_probs,
            mlp=self._mlp,
            experts=self._experts.saved if self._experts else 0.0,
        )

    @property
    def block_input(self) -> float:
        """The residual stream at the block's beginning: of what its branches save of it, each as much, one part."""
        return self.without_recompute.residual / len(self.layer.branches)

    @property
    def _norm(self) -> float:
        """Each norm saves its input (the residual stream) and its output, which the column-parallel linears read; an
        eager RMSNorm also its input as float32 and the normalised values. A dropout saves its mask."""
        eager = self.software.norm == "eager" and self.spec.norm == "rmsnorm"
        bytes_per_element = self.activation_bytes + (8 if eager else 0)
        norm = (self._read_by("norm") + self._read_by("qk_norm")) * bytes_per_element + self._read_by("dropout")
        if self._experts and not self._mlp_matmuls:  # nothing but the router reads the second norm's output
            norm -= self.tokens * self.activation_bytes * self.spec.hidden / self.layout.sp_degree
        return norm

    @property
    def _attention_probs(self) -> float:
        """Fused: probabilities, a mask, and their product. Torch: float32 softmax, cast, mask."""
        if self.software.attention not in ("torch", "fused"):
            return 0.0
        bytes_per_score = 2 * self.activation_bytes + {"fused": 1, "torch": 4}[self.software.attention]
        return float(bytes_per_score * self.tokens * self._operations.attention.heads * self.seq)

    @property
    def _attention(self) -> float:
        """Queries, keys, values, the output (or two copies of it), and a log-sum-exp in float32 for each query."""
        operations, scores = self._operations, self._operations.attention
        copies = 2 if self.software.copies_attention else 1
        log_sum_exp = 4 * scores.heads
        if operations.latent:
            # Of MLA the norms' outputs are the latents that heads are made of, side by side; with sp those of all
            # tokens. Values are padded to the width of the keys.
            latents, unread = operations.attending.latents, operations.attending.unread
            values = scores.width if self.software.pads_values else scores.seen
            heads = 2 * scores.width + 2 * values + (copies - 1) * scores.seen
            features = heads + latents + unread / self.layout.sp_degree
        else:
            features = (1 + copies) * scores.width + 2 * scores.kv_width
            features += self._plugin_saved_features(self._mixer_branch)
        return float(self.tokens * (self.activation_bytes * features + log_sum_exp))

    @property
    def _other_mixer(self) -> float:
        """What the first matmuls write, what the last one reads, and what the operations between them save."""
        matmuls = self._operations.of(self._mixer_branch)
        features = 0.0
        if matmuls:
            features = float(sum(matmul.outputs for matmul in matmuls[:-1]) + matmuls[-1].inputs)
        features += self._plugin_saved_features(self._mixer_branch)
        return self.tokens * self.activation_bytes * features

    @property
    def _mlp(self) -> float:
        """What the first matmuls write, and the activation function and a plugin's operations save."""
        features = 0.0
        if matmuls := self._mlp_matmuls:
            activation_tensors = 1 + num_saved_activation_tensors(self.spec, self.software)
            features = float(sum(matmul.outputs for matmul in matmuls[:-1])) + activation_tensors * matmuls[-1].inputs
        features += self._plugin_saved_features(self._mlp_branch)
        return float(self.activation_bytes * self.tokens * features)

    def _plugin_saved_features(self, branch: str) -> float:
        """Features that a plugin's own operations save."""
        layout = self.layout
        return sum(
            operation.saved * operation.features_per_rank(layout.tp, layout.sp)
            for operation in self._operations.elementwise
            if operation.kind == "other" and operation.name.startswith(f"{branch}.")
        )

    # ---- parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def _operations(self) -> BlockOperations:
        return block_with_repeated_kv(self.spec, self.layout, self.layer)

    @cached_property
    def _experts(self) -> ExpertActivationMemory | None:
        if not self.layer.routed:
            return None
        return ExpertActivationMemory(
            spec=self.spec,
            layer=self.layer,
            layout=self.layout,
            software=self.software,
            tokens=self.tokens,
            activation_bytes=self.activation_bytes,
            imbalance=self.imbalance,
        )

    @property
    def _mixer_branch(self) -> str:
        return self.layer.mixer.place if self.layer.mixer else ""

    @property
    def _mlp_branch(self) -> str:
        return self.layer.mlp.place if self.layer.mlp else ""

    @property
    def _mlp_matmuls(self) -> list[Matmul]:
        """Those that every token visits: of a mixture of experts the shared one's."""
        return [matmul for matmul in self._operations.of(self._mlp_branch) if matmul.dense]

    def _bytes(self, features: float) -> float:
        return self.tokens * self.activation_bytes * features

    def _read_by(self, kind: str) -> float:
        """Elements that operations of a kind read. Without sp every tp rank holds all of them."""
        layout = self.layout
        return self.tokens * sum(
            operation.features_per_rank(layout.tp, layout.sp)
            for operation in self._operations.elementwise
            if operation.kind == kind
        )


def deferred_wgrad_bytes(spec: ModelSpec, layout: Layout, tokens: int, activation_bytes: int, layer: Layer) -> float:
    """Bytes that a block holds from I to W, without its experts: the inputs of its linears, and the gradients of their
    outputs. Under sp a rank holds its own tokens only of what it gathers again for W, the residual stream, and of the
    gradients of replicated linears. The gradients of row-parallel outputs are whole: backward has gathered them."""
    operations = block_with_repeated_kv(spec, layout, layer)
    groups = [group for group in operations.groups if group[0].dense]
    matmuls = [matmul for group in groups for matmul in group]
    inputs = sum(group[0].inputs / (layout.sp_degree if group[0].reads_residual else 1) for group in groups)
    outputs = sum(matmul.outputs / (layout.sp_degree if matmul.tp == "replicated" else 1) for matmul in matmuls)
    return tokens * activation_bytes * (inputs + outputs)


def block_with_repeated_kv(spec: ModelSpec, layout: Layout, layer: Layer) -> BlockOperations:
    """A tp rank's block as attention saves it: Ulysses repeats kv heads that are fewer than its ranks."""
    operations = block(spec, layout.tp, layer)
    if layout.cp == 1 or layout.cp_kind != "ulysses" or not layer.attends:
        return operations
    scores = operations.attention
    repeated = scores._replace(kv_heads=math.lcm(scores.kv_heads, layout.cp))
    return BlockOperations(tuple(repeated if each is scores else each for each in operations.operations))
