"""Bytes that one microbatch keeps for its backward pass, by kind, on one rank.

kept(spec, layout, stack, samples, seq)      # of a block
Letters as in `block.py`. Textbook case: a GPT block with dropout, fused softmax and no recompute keeps
T E (34 + 5 H S / E) bytes on one rank (arXiv 2205.05198, section 4.1); tp divides all but 10 T E of it, sp that, too.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.routing import RoutedTokens
from fivefold.cost.stack import SoftwareProfile
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block

# ---- expert memory --------------------------------------------------------------------------------------------------
# Bytes of a mixture of experts on one rank: what a microbatch keeps, and what its backward pass needs for a while.
#
#     mixture = MixtureMemory(spec, layout, stack, tokens=4096, wide=2, imbalance=1.2)
#     mixture.everything, mixture.outputs, mixture.passing
#
# A rank routes n of the microbatch's tokens, fills K slots for each, and computes N rows of its own experts: the
# fullest rank `imbalance` times as many as it sends. Letters as in `moe.py`: E hidden, F an expert's width, X
# experts. This code weighs what experts said in float32: in backward that is the largest part of it, the gradients of
# the slots and their products with the slots.


# What a fused kernel does not write of a gated activation: the gate's; or clamped gate, sigmoid, their product, input.
GATES = {"swiglu": 1, "swiglu_clamped": 4}
_SLOT = 40  # bytes of the numbers of a slot: its expert, its places before and after, its weight


def written_by_activation(spec: ModelSpec, stack: SoftwareProfile) -> int:
    """Tensors of its width that an activation keeps besides what it read and what it wrote."""
    return GATES.get(spec.activation, 0) if stack.pointwise in ("eager", "fivefold") else 0


@dataclass(frozen=True)
class MixtureMemory(RoutedTokens):
    """Of one block and microbatch with `tokens` on a cp rank; `wide` is the bytes of an activation."""

    spec: ModelSpec
    layout: Layout
    stack: SoftwareProfile
    tokens: int
    wide: int = 2
    imbalance: float = 1.0
    splits: bool = False  # whether backward passes have two halves

    @property
    def gathers(self) -> bool:
        """Whether every rank gets all tokens."""
        return self.layout.dispatch == "allgather" and self.layout.ep > 1

    @property
    def widened(self) -> int:
        """Bytes of what is computed in float32 at least."""
        return max(4, self.wide)

    @property
    def eager(self) -> bool:
        """Whether experts' outputs are weighed, and the router's input is widened, by kernels of their own. Other
        software weighs inside of the activation, and its router reads what the norm wrote."""
        return self.stack.pointwise in ("eager", "fivefold")

    @cached_property
    def matmuls(self) -> list[Matmul]:
        return [matmul for matmul in block(self.spec).matmuls if matmul.experts]

    @property
    def inner(self) -> float:
        """Bytes of one of the experts' intermediates."""
        return self.rows * self.matmuls[-1].inputs * self.wide

    @property
    def said(self) -> float:
        """Bytes of what experts said: a row for each slot; where tokens are gathered, for each row here, widened."""
        return self.spec.hidden * (self.rows * self.widened if self.gathers else self.slots * self.wide)

    @property
    def router(self) -> float:
        """The widened input and weight, the scores, and the numbers of slots."""
        experts, hidden = self.experts.count, self.spec.hidden
        entering = self.routed * hidden * (self.widened if self.eager else self.wide)
        weight = experts * hidden * self.widened if self.wide < self.widened else 0
        return entering + weight + self.routed * experts * self.widened + self.slots * _SLOT

    @property
    def everything(self) -> float:
        """What autograd saves without recompute."""
        *columns, down = self.matmuls
        inner = (
            sum(matmul.outputs for matmul in columns) + (1 + written_by_activation(self.spec, self.stack)) * down.inputs
        )
        bytes_ = self.router + self.rows * self.wide * (self.spec.hidden + inner)
        if not self.eager:
            return bytes_
        return bytes_ + self.said * (2 if self.gathers else 1)  # its sum over ranks keeps what it adds up, too

    @property
    def outputs(self) -> float:
        """What selective recompute keeps: outputs of matmuls, and all that came from other ranks."""
        hidden, wide, experts = self.spec.hidden, self.wide, self.experts
        # Of rows that travel back nothing is read where they were made.
        written = self.matmuls[:-1] if self.layout.ep > 1 and not self.gathers else self.matmuls
        bytes_ = self.rows * wide * sum(matmul.outputs for matmul in written)
        bytes_ += self.routed * experts.count * self.widened
        if self.gathers:
            bytes_ += self._tokens * wide + self.layout.ep * self.slots * (8 + self.widened)
            bytes_ += self.routed * hidden * self.widened
        elif self.layout.ep > 1:
            bytes_ += (self.rows + self.slots) * hidden * wide
        if self.layout.tp > 1 and not self.layout.sp:  # all slices of the tokens
            bytes_ += self.tokens * hidden * wide
        return bytes_

    @property
    def defer_wgrad(self) -> float:
        """Between I and W: rows and intermediates, the gradients of what experts' linears wrote."""
        *columns, down = self.matmuls
        features = columns[0].inputs + down.inputs + sum(matmul.outputs for matmul in self.matmuls)
        return self.rows * self.wide * features

    @property
    def returning(self) -> float:
        """Bytes on top of `everything` while rows are added up for all ranks: zeros and the sums; or, where a block
        runs again, zeros and the gradient of the sums, which has been gathered. Beside them what they are made of, and
        what selective recompute keeps of the way back, for which nobody has asked yet."""
        if not self.gathers:
            return 0.0
        kept = self.routed * self.spec.hidden * self.widened if self.layout.recompute == "selective" else 0.0
        return self._tokens * (2 * self.widened + self.wide) + self._row + kept

    @property
    def weighing(self) -> float:
        """Bytes on top of `everything` while backward undoes the weighing; none of the block's gradients exist yet."""
        if not self.eager:
            return 0.0
        return 2 * (self.rows if self.gathers else self.slots) * self.spec.hidden * self.widened

    @property
    def weighed(self) -> float:
        """Of `everything` what is gone after that."""
        return self.said * (2 if self.gathers else 1) if self.eager else 0.0

    @property
    def arriving(self) -> float:
        """Bytes on top of `everything` when the gradients of rows have come from other ranks, and are put in order."""
        return 2 * self._row - self.weighed if self.layout.ep > 1 and not self.gathers else 0.0

    @property
    def linears(self) -> float:
        """Bytes on top of `everything` while the last of an expert's linears and its activation run backward: gradients
        of intermediates; or of a row, an intermediate and the weight. What the second half of a backward pass reads
        stays: an intermediate, and the gradient of a row."""
        if self.splits:
            return 3 * self.inner + self._row - self.weighed
        return max(2 * self.inner, self._row + self.inner + self._weight) - self.weighed

    @property
    def columns(self) -> float:
        """The same when the linears before it have run: gradients of rows and of a weight; the intermediates are
        gone."""
        made = self._row + (self.defer_wgrad if self.splits else self._weight)
        return made - (self.everything - self.router)

    @property
    def first_gradient(self) -> float:
        """The share of an expert's parameters that its last linear has, whose gradient is made first."""
        return 1 / len(self.matmuls)

    @property
    def _tokens(self) -> float:
        """Elements of the tokens of all ranks of ep."""
        return self.layout.ep * self.routed * self.spec.hidden

    @property
    def _row(self) -> float:
        return self.rows * self.spec.hidden * self.wide

    @property
    def _weight(self) -> float:
        """Bytes of a weight's gradient, of all experts here, before it is widened."""
        down = self.matmuls[-1]
        return down.inputs * down.outputs * self.experts.count / self.layout.ep * self.wide

    @property
    def leaving(self) -> float:
        """The same when they have run: gradients of rows, and room for them in the order in which they came."""
        waits = self.defer_wgrad if self.splits else 0.0
        return 3 * self._row + waits - (self.everything - self.router)


# ---- activations ----------------------------------------------------------------------------------------------------


class SavedActivations(NamedTuple):
    """Bytes by kind."""

    residual: float = 0.0  # the stream itself: what a block is given
    norm: float = 0.0
    attention: float = 0.0
    scores: float = 0.0  # where attention is not one kernel
    mlp: float = 0.0
    head: float = 0.0  # gradients that were taken with the loss, and wait for the backward pass
    experts: float = 0.0  # router, rows that came to this rank's experts, what these made of them

    @property
    def total(self) -> float:
        return sum(self)


def kept(
    spec: ModelSpec,
    layout: Layout,
    stack: SoftwareProfile,
    samples: int,
    seq: int,
    wide: int = 2,
    *,
    dense: bool = False,
    imbalance: float = 1.0,
) -> SavedActivations:
    """Of one block and microbatch; `wide` is the bytes of an activation. In a model with experts it is a block that has
    some, of the rank with `imbalance` times the mean of the tokens; or (`dense`) one that has none."""
    tokens = samples * seq // layout.cp
    mixture = None
    if spec.experts is not None and not dense:
        mixture = MixtureMemory(spec, layout, stack, tokens, wide, imbalance)
    everything = _everything(spec, layout, stack, tokens, seq, wide, mixture)
    if layout.recompute == "none":
        return everything
    stream = everything.residual / 2
    if layout.recompute == "full":
        return SavedActivations(residual=stream)
    if stack.selective == "attention":
        return everything._replace(scores=0.0)
    own = block(spec, layout.tp, dense)
    # The outputs of every matmul and of attention, and what Ulysses traded before it and after it.
    attention = tokens * wide * (own.attention.width + _outputs(own, "attention", layout))
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        traded = _block(spec, layout, dense).attention
        attention += tokens * wide * (2 * traded.width + 2 * traded.kv_width)
    if spec.mla and layout.sp:  # the latents of all tokens, gathered
        attention += tokens * wide * (spec.mla.q_rank + spec.mla.cached)
    mlp = tokens * wide * _outputs(own, "mlp", layout)
    if stack.selective == "half":
        attention, mlp = tokens * wide * (1.5 * own.attention.width + 1.0 * own.attention.kv_width), mlp / 2
    return SavedActivations(residual=stream, attention=attention, mlp=mlp, experts=mixture.outputs if mixture else 0.0)


def defer_wgrad(spec: ModelSpec, layout: Layout, tokens: int, wide: int = 2, dense: bool = False) -> float:
    """Bytes of a block between its I and its W: what the linears read, and the gradients of what they wrote. Of the
    experts `MixtureMemory` says it."""
    own, part = _block(spec, layout, dense), layout.tp if layout.sp else 1
    groups = [group for group in own.groups if not _of_experts(group[0])]
    matmuls = [matmul for group in groups for matmul in group]
    read = sum(group[0].inputs / (part if group[0].reads_residual else 1) for group in groups)
    return (
        tokens * wide * (read + sum(matmul.outputs / (part if matmul.tp == "replicated" else 1) for matmul in matmuls))
    )


def _of_experts(matmul: Matmul) -> bool:
    """Whether it is an expert's, or the router's."""
    return matmul.experts > 0 or matmul.tp == "replicated_partial"


def _block(spec: ModelSpec, layout: Layout, dense: bool = False) -> BlockOperations:
    """A tp rank's block as attention keeps it: Ulysses repeats kv heads that are few."""
    own = block(spec, layout.tp, dense)
    if layout.cp == 1 or layout.cp_kind != "ulysses":
        return own
    more = structs.replace(spec, kv_heads=math.lcm(own.attention.kv_heads, layout.cp) * layout.tp)
    return block(more, layout.tp, dense)


def _outputs(own: BlockOperations, branch: str, layout: Layout) -> float:
    """Features that the matmuls of a branch write; of those that every rank has, sp leaves a rank its part."""
    part = layout.tp if layout.sp else 1
    return sum(matmul.outputs / (part if matmul.whole else 1) for matmul in own.of(branch) if not _of_experts(matmul))


def _everything(
    spec: ModelSpec,
    layout: Layout,
    stack: SoftwareProfile,
    tokens: int,
    seq: int,
    wide: int,
    mixture: MixtureMemory | None,
) -> SavedActivations:
    """What autograd saves without recompute."""
    own = _block(spec, layout, dense=mixture is None)

    def stream(kind: str) -> float:
        """Elements that operations of a kind read. Without sp every tp rank holds all of them."""
        return tokens * sum(
            operation.share(layout.tp, layout.sp) for operation in own.elementwise if operation.kind == kind
        )

    # Each norm keeps its input (the residual stream) and its output, which the columns read; in eager float32 RMSNorm
    # the input as float32 and the normalised values besides. A dropout keeps its mask.
    eager = stack.norm == "eager" and spec.norm == "rmsnorm"
    norm = (stream("norm") + stream("qk_norm")) * (wide + (8 if eager else 0)) + stream("dropout")
    mlp = [matmul for matmul in own.of("mlp") if not _of_experts(matmul)]
    if not mlp:  # nothing but the router reads the second norm's output
        norm -= tokens * wide * spec.hidden / (layout.tp if layout.sp else 1)
    scores = 0.0
    if stack.attention in ("torch", "fused"):
        # Fused: probabilities, a mask, and what it leaves of them. Torch: float32 softmax, cast, mask.
        per_score = 2 * wide + {"fused": 1, "torch": 4}[stack.attention]
        scores = float(per_score * tokens * own.attention.heads * seq)
    inner = sum(matmul.outputs for matmul in mlp[:-1])
    inner += sum((1 + written_by_activation(spec, stack)) * matmul.inputs for matmul in mlp[-1:])
    attention = _attention(spec, layout, stack, own, tokens, wide)
    experts = mixture.everything if mixture else 0.0
    return SavedActivations(
        stream("residual") * wide, norm, attention, scores, float(wide * tokens * inner), experts=experts
    )


def _attention(
    spec: ModelSpec, layout: Layout, stack: SoftwareProfile, own: BlockOperations, tokens: int, wide: int
) -> float:
    """Queries, keys, values, the output (or two copies of it), a number for each query."""
    outputs, attention = 2 if stack.copies_attention else 1, own.attention
    if spec.mla is None:
        return float(tokens * (wide * ((1 + outputs) * attention.width + 2 * attention.kv_width) + 4 * attention.heads))
    # Of latent attention the norms' outputs are the latents that heads are made of, side by side; with sp those of all
    # tokens. Values are padded to the width of the keys.
    values = attention.width if stack.pads_values else attention.seen
    part, latents = layout.tp if layout.sp else 1, spec.mla.q_rank + spec.mla.cached
    made = 2 * attention.width + 2 * values + (outputs - 1) * attention.seen
    return float(tokens * (wide * (made + latents + spec.mla.rope_dim / part) + 4 * attention.heads))
