"""Bytes that one microbatch saves for its backward pass, by kind, on one rank.

saved_activations(spec, layout, software, samples, seq)      # of a block

Letters: T tokens of a microbatch on this rank, E hidden, H heads, S tokens of a sequence. Textbook case: a GPT block
with dropout, fused softmax and no recompute saves T E (34 + 5 H S / E) bytes on one rank (arXiv 2205.05198, section
4.1); tp divides all but 10 T E of it, sp that, too.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.cost.moe import expert_matmuls
from fivefold.cost.routing import ExpertLoad
from fivefold.cost.software import SoftwareProfile
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block
from fivefold.spec.pattern import Layer

# ---- expert memory --------------------------------------------------------------------------------------------------
# Bytes of the experts of one block on one rank: what a microbatch saves, and the peaks of its backward pass.
#
#     moe = MoEMemory(spec, kinds, layout, software, tokens=4096, activation_bytes=2, imbalance=1.2)
#     moe.saved, moe.saved_selective         # without recompute, and with selective recompute
#     moe.during_last_linear                 # in backward, on top of `saved`
#
# A rank routes n of the microbatch's tokens, fills K slots for each (a slot is a token's visit to one expert), and
# computes N rows with its own experts: the most loaded rank `imbalance` times as many as it sends. Letters: E hidden, F
# an expert's width, X experts. This code weights the experts' outputs in float32. Backward needs most bytes for that:
# the gradients of the slots, and their products with the slots.


# Tensors of a gated activation that a fused kernel does not write: the gate's output; or, where the gate is clamped,
# the clamped gate, its sigmoid, their product, and the clamped input.
GATES = {"swiglu": 1, "swiglu_clamped": 4}
_SLOT = 40  # bytes of the numbers of a slot: its expert, its places before and after sorting, its weight


def written_by_activation(spec: ModelSpec, software: SoftwareProfile) -> int:
    """Tensors that an activation function saves beside its inputs and its output, each as wide as the output."""
    return GATES.get(spec.activation, 0) if software.pointwise in ("eager", "fivefold") else 0


@dataclass(frozen=True)
class MoEMemory(ExpertLoad):
    """The experts of one block, for a microbatch with `tokens` on a cp rank.

    The properties `during_...` are moments of the backward pass, in its order: bytes on top of `saved`.
    """

    spec: ModelSpec
    kinds: Layer
    layout: Layout
    software: SoftwareProfile
    tokens: int
    activation_bytes: int = 2  # of one element
    imbalance: float = 1.0
    splits: bool = False  # whether backward passes are split into input gradients (I) and weight gradients (W)

    # ---- saved in forward --------------------------------------------------------------------------------------------

    @property
    def saved(self) -> float:
        """What autograd saves without recompute."""
        *columns, down = self._matmuls
        written = 1 + written_by_activation(self.spec, self.software)
        inner = sum(matmul.outputs for matmul in columns) + written * down.inputs
        bytes_ = self.saved_by_router + self.rows * self.activation_bytes * (self.spec.hidden + inner)
        if not self._weights_apart:
            return bytes_
        return bytes_ + self._expert_outputs * (2 if self._gathers_tokens else 1)  # the sum over ranks saves its input

    @property
    def saved_by_router(self) -> float:
        """The input and the weight in float32, the scores, and the numbers of the slots."""
        experts, hidden = self.experts.count, self.spec.hidden
        entering = self.routed * hidden * (self._accum_bytes if self._weights_apart else self.activation_bytes)
        weight = experts * hidden * self._accum_bytes if self.activation_bytes < self._accum_bytes else 0
        return entering + weight + self.routed * experts * self._accum_bytes + self.slots * _SLOT

    @property
    def saved_selective(self) -> float:
        """What selective recompute saves: outputs of matmuls, and all that came from other ranks."""
        hidden, activation_bytes, experts = self.spec.hidden, self.activation_bytes, self.experts
        # Rows that travel back are not read where they were computed.
        written = self._matmuls[:-1] if self.layout.ep > 1 and not self._gathers_tokens else self._matmuls
        bytes_ = self.rows * activation_bytes * sum(matmul.outputs for matmul in written)
        bytes_ += self.routed * experts.count * self._accum_bytes
        if self._gathers_tokens:
            choices = self.layout.ep * self.slots * (8 + self._accum_bytes)  # an expert's number and weight
            bytes_ += self._gathered_elements * activation_bytes + choices
            bytes_ += self.routed * hidden * self._accum_bytes
        elif self.layout.ep > 1:
            bytes_ += (self.rows + self.slots) * hidden * activation_bytes
        if self.layout.tp > 1 and not self.layout.sp:  # all slices of the tokens
            bytes_ += self.tokens * hidden * activation_bytes
        return bytes_

    # ---- moments of backward -----------------------------------------------------------------------------------------

    @property
    def during_combine(self) -> float:
        """The combine by a reduce-scatter: zeros and the sums; or, where a block is recomputed, zeros and the gathered
        gradient of the sums. Beside them the rows that are summed, and what selective recompute saves of the combine,
        which is not read yet."""
        if not self._gathers_tokens:
            return 0.0
        unread = self.routed * self.spec.hidden * self._accum_bytes if self.layout.recompute == "selective" else 0.0
        return self._gathered_elements * (2 * self._accum_bytes + self.activation_bytes) + self._row_bytes + unread

    @property
    def during_weighting(self) -> float:
        """The backward pass of weighting the experts' outputs; none of the block's gradients are allocated yet."""
        if not self._weights_apart:
            return 0.0
        return 2 * (self.rows if self._gathers_tokens else self.slots) * self.spec.hidden * self._accum_bytes

    @property
    def _freed_by_weighting(self) -> float:
        """The part of `saved` that is freed after that."""
        return self._expert_outputs * (2 if self._gathers_tokens else 1) if self._weights_apart else 0.0

    @property
    def during_combine_backward(self) -> float:
        """The gradients of rows are received from other ranks, and put in order."""
        if self.layout.ep == 1 or self._gathers_tokens:
            return 0.0
        return 2 * self._row_bytes - self._freed_by_weighting

    @property
    def during_last_linear(self) -> float:
        """The experts' last linear and their activation function: gradients of two intermediates; or of a row, an
        intermediate and the weight. Where backward is split, W still needs an intermediate and the gradient of a row.
        """
        if self.splits:
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
        allocated = self._row_bytes + (self.deferred_wgrad if self.splits else self._wgrad_bytes)
        return allocated - (self.saved - self.saved_by_router)

    @property
    def during_dispatch_backward(self) -> float:
        """After all linears: gradients of rows, and buffers for them in the order in which they came."""
        deferred = self.deferred_wgrad if self.splits else 0.0
        return 3 * self._row_bytes + deferred - (self.saved - self.saved_by_router)

    @property
    def deferred_wgrad(self) -> float:
        """Held from I to W: rows and intermediates, and the gradients of what the experts' linears wrote."""
        *columns, down = self._matmuls
        features = columns[0].inputs + down.inputs + sum(matmul.outputs for matmul in self._matmuls)
        return self.rows * self.activation_bytes * features

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def _gathers_tokens(self) -> bool:
        """Whether every rank gets all tokens."""
        return self.layout.dispatch == "allgather" and self.layout.ep > 1

    @property
    def _accum_bytes(self) -> int:
        """Bytes of an element that is computed in float32 at least."""
        return max(4, self.activation_bytes)

    @property
    def _weights_apart(self) -> bool:
        """Whether experts' outputs are weighted, and the router's input is cast, by kernels of their own. Other
        software weights inside of the activation function, and its router reads the norm's output."""
        return self.software.pointwise in ("eager", "fivefold")

    @cached_property
    def _matmuls(self) -> list[Matmul]:
        return expert_matmuls(self.spec, self.kinds)

    @property
    def _expert_outputs(self) -> float:
        """The experts' outputs: a row for each slot; where tokens are gathered, for each row here, in float32."""
        rows_bytes = self.rows * self._accum_bytes if self._gathers_tokens else self.slots * self.activation_bytes
        return self.spec.hidden * rows_bytes

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
    scores: float = 0.0  # where attention is not one kernel
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
    kinds: Layer | None = None,
    imbalance: float = 1.0,
) -> SavedActivations:
    """What one block saves of one microbatch: one of these `kinds`, or of the last layer's. `activation_bytes` are
    those of one element; experts are of the rank with `imbalance` times the mean of the tokens.
    """
    tokens, kinds = samples * seq // layout.cp, kinds or spec.kinds(spec.layers - 1)
    moe = None
    if kinds.routed:
        moe = MoEMemory(spec, kinds, layout, software, tokens, activation_bytes, imbalance)
    without_recompute = _without_recompute(spec, layout, software, tokens, seq, activation_bytes, kinds, moe)
    if layout.recompute == "none":
        return without_recompute
    residual = without_recompute.residual / len(kinds.branches)
    if layout.recompute == "full":
        return SavedActivations(residual=residual)
    if software.selective == "attention":
        return without_recompute._replace(scores=0.0)
    own = block(spec, layout.tp, kinds)
    # The outputs of every matmul and of attention, and what Ulysses exchanged before attention and after it.
    attention = tokens * activation_bytes * (own.attention.width + _output_features(own, _mixer(kinds), layout))
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        exchanged = _block(spec, layout, kinds).attention
        attention += tokens * activation_bytes * (2 * exchanged.width + 2 * exchanged.kv_width)
    if layout.sp:  # the latents of all tokens, gathered
        attention += tokens * activation_bytes * own.attending.latents
    mlp = tokens * activation_bytes * _output_features(own, kinds.mlp.place if kinds.mlp else "", layout)
    if software.selective == "half":
        attention = tokens * activation_bytes * (1.5 * own.attention.width + 1.0 * own.attention.kv_width)
        mlp = mlp / 2
    experts = moe.saved_selective if moe else 0.0
    return SavedActivations(residual=residual, attention=attention, mlp=mlp, experts=experts)


def deferred_wgrad_bytes(spec: ModelSpec, layout: Layout, tokens: int, activation_bytes: int, kinds: Layer) -> float:
    """Bytes that a block holds from its I to its W: the inputs of its linears, and the gradients of their outputs. Of
    experts `MoEMemory.deferred_wgrad` has them."""
    own, parts = _block(spec, layout, kinds), layout.tp if layout.sp else 1
    groups = [group for group in own.groups if group[0].dense]
    matmuls = [matmul for group in groups for matmul in group]
    inputs = sum(group[0].inputs / (parts if group[0].reads_residual else 1) for group in groups)
    outputs = sum(matmul.outputs / (parts if matmul.tp == "replicated" else 1) for matmul in matmuls)
    return tokens * activation_bytes * (inputs + outputs)


def _block(spec: ModelSpec, layout: Layout, kinds: Layer) -> BlockOperations:
    """A tp rank's block as attention keeps it: Ulysses repeats kv heads that are fewer than its ranks."""
    own = block(spec, layout.tp, kinds)
    if layout.cp == 1 or layout.cp_kind != "ulysses" or not kinds.attends:
        return own
    repeated = own.attention._replace(kv_heads=math.lcm(own.attention.kv_heads, layout.cp))
    return BlockOperations(tuple(repeated if each is own.attention else each for each in own.operations))


def _mixer(kinds: Layer) -> str:
    """The branch of its matmuls."""
    return kinds.mixer.place if kinds.mixer else ""


def _output_features(own: BlockOperations, branch: str, layout: Layout) -> float:
    """Features that the matmuls of a branch write. Of those that all tp ranks compute alike, sp leaves a rank its part
    of the tokens."""
    parts = layout.tp if layout.sp else 1
    matmuls = (matmul for matmul in own.of(branch) if matmul.dense)
    return sum(matmul.outputs / (parts if matmul.whole else 1) for matmul in matmuls)


def _saved_between(own: BlockOperations, branch: str, layout: Layout) -> float:
    """Features that a plugin's own operations save."""
    others = (each for each in own.elementwise if each.kind == "other" and each.name.startswith(f"{branch}."))
    return sum(each.saved * each.share(layout.tp, layout.sp) for each in others)


def _without_recompute(
    spec: ModelSpec,
    layout: Layout,
    software: SoftwareProfile,
    tokens: int,
    seq: int,
    activation_bytes: int,
    kinds: Layer,
    moe: MoEMemory | None,
) -> SavedActivations:
    """What autograd saves without recompute."""
    own = _block(spec, layout, kinds)

    def read_by(kind: str) -> float:
        """Elements that operations of a kind read. Without sp every tp rank holds all of them."""
        return tokens * sum(
            operation.share(layout.tp, layout.sp) for operation in own.elementwise if operation.kind == kind
        )

    # Each norm saves its input (the residual stream) and its output, which the column-parallel linears read; an eager
    # RMSNorm also its input as float32 and the normalised values. A dropout saves its mask.
    eager = software.norm == "eager" and spec.norm == "rmsnorm"
    norm = (read_by("norm") + read_by("qk_norm")) * (activation_bytes + (8 if eager else 0)) + read_by("dropout")
    place = kinds.mlp.place if kinds.mlp else ""
    mlp = [matmul for matmul in own.of(place) if matmul.dense]
    if moe and not mlp:  # nothing but the router reads the second norm's output
        norm -= tokens * activation_bytes * spec.hidden / (layout.tp if layout.sp else 1)
    scores = 0.0
    if software.attention in ("torch", "fused"):
        # Fused: probabilities, a mask, and their product. Torch: float32 softmax, cast, mask.
        per_score = 2 * activation_bytes + {"fused": 1, "torch": 4}[software.attention]
        scores = float(per_score * tokens * own.attention.heads * seq)
    inner = float(sum(matmul.outputs for matmul in mlp[:-1]))
    inner += sum((1 + written_by_activation(spec, software)) * matmul.inputs for matmul in mlp[-1:])
    inner += _saved_between(own, place, layout)
    return SavedActivations(
        residual=read_by("residual") * activation_bytes,
        norm=norm,
        attention=_saved_by_mixer(spec, layout, software, own, tokens, activation_bytes, kinds),
        scores=scores,
        mlp=float(activation_bytes * tokens * inner),
        experts=moe.saved if moe else 0.0,
    )


def _saved_by_mixer(
    spec: ModelSpec,
    layout: Layout,
    software: SoftwareProfile,
    own: BlockOperations,
    tokens: int,
    activation_bytes: int,
    kinds: Layer,
) -> float:
    """Of attention: queries, keys, values, the output (or two copies of it), and a log-sum-exp in float32 for each
    query. Of other mixers, what the first matmuls write, what the last one reads, and what the operations between save.
    """
    if not kinds.attends:
        matmuls = own.of(_mixer(kinds))
        features = float(sum(matmul.outputs for matmul in matmuls[:-1]) + sum(last.inputs for last in matmuls[-1:]))
        features += _saved_between(own, _mixer(kinds), layout)
        return tokens * activation_bytes * features
    outputs, attention = 2 if software.copies_attention else 1, own.attention
    log_sum_exp = 4 * attention.heads
    if not own.latent:
        features = (1 + outputs) * attention.width + 2 * attention.kv_width
        features += _saved_between(own, _mixer(kinds), layout)
        return float(tokens * (activation_bytes * features + log_sum_exp))
    # Of latent attention the norms' outputs are the latents that heads are made of, side by side; with sp those of all
    # tokens. Values are padded to the width of the keys.
    values = attention.width if software.pads_values else attention.seen
    parts, latents = layout.tp if layout.sp else 1, own.attending.latents
    heads = 2 * attention.width + 2 * values + (outputs - 1) * attention.seen
    return float(tokens * (activation_bytes * (heads + latents + own.attending.unread / parts) + log_sum_exp))
