"""Bytes that one microbatch keeps for its backward pass, by kind, on one rank.

kept(spec, layout, stack, samples, seq)      # of a block
Letters as in work.py. Textbook case: a GPT block with dropout, fused softmax and no recompute keeps
T E (34 + 5 H S / E) bytes on one rank (arXiv 2205.05198, section 4.1); tp divides all but 10 T E of it, sp that, too.
"""

import math
from typing import NamedTuple

from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.plan.cost.expert_memory import MixtureMemory, written_by_activation
from fivefold.plan.cost.stack import Stack
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Block, Matmul, block


class Kept(NamedTuple):
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
    stack: Stack,
    samples: int,
    seq: int,
    wide: int = 2,
    *,
    dense: bool = False,
    imbalance: float = 1.0,
) -> Kept:
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
        return Kept(residual=stream)
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
    return Kept(residual=stream, attention=attention, mlp=mlp, experts=mixture.outputs if mixture else 0.0)


def put_off(spec: ModelSpec, layout: Layout, tokens: int, wide: int = 2, dense: bool = False) -> float:
    """Bytes of a block between its I and its W: what the linears read, and the gradients of what they wrote. Of the
    experts `MixtureMemory` says it."""
    own, part = _block(spec, layout, dense), layout.tp if layout.sp else 1
    groups = [group for group in own.groups if not _of_experts(group[0])]
    every = [one for group in groups for one in group]
    read = sum(group[0].inputs / (part if group[0].reads_residual else 1) for group in groups)
    return tokens * wide * (read + sum(one.outputs / (part if one.tp == "whole" else 1) for one in every))


def _of_experts(one: Matmul) -> bool:
    """Whether it is an expert's, or the router's."""
    return one.experts > 0 or one.tp == "tokens"


def _block(spec: ModelSpec, layout: Layout, dense: bool = False) -> Block:
    """A tp rank's block as attention keeps it: Ulysses repeats kv heads that are few."""
    own = block(spec, layout.tp, dense)
    if layout.cp == 1 or layout.cp_kind != "ulysses":
        return own
    more = structs.replace(spec, kv_heads=math.lcm(own.attention.kv_heads, layout.cp) * layout.tp)
    return block(more, layout.tp, dense)


def _outputs(own: Block, branch: str, layout: Layout) -> float:
    """Features that the matmuls of a branch write; of those that every rank has, sp leaves a rank its part."""
    part = layout.tp if layout.sp else 1
    return sum(one.outputs / (part if one.whole else 1) for one in own.of(branch) if not _of_experts(one))


def _everything(
    spec: ModelSpec, layout: Layout, stack: Stack, tokens: int, seq: int, wide: int, mixture: MixtureMemory | None
) -> Kept:
    """What autograd saves without recompute."""
    own = _block(spec, layout, dense=mixture is None)

    def stream(kind: str) -> float:
        """Elements that operations of a kind read. Without sp every tp rank holds all of them."""
        return tokens * sum(one.share(layout.tp, layout.sp) for one in own.elementwise if one.kind == kind)

    # Each norm keeps its input (the residual stream) and its output, which the columns read; in eager float32 RMSNorm
    # the input as float32 and the normalised values besides. A dropout keeps its mask.
    eager = stack.norm == "eager" and spec.norm == "rmsnorm"
    norm = (stream("norm") + stream("qk_norm")) * (wide + (8 if eager else 0)) + stream("dropout")
    network = [one for one in own.of("mlp") if not _of_experts(one)]
    if not network:  # nothing but the router reads the second norm's output
        norm -= tokens * wide * spec.hidden / (layout.tp if layout.sp else 1)
    scores = 0.0
    if stack.attention in ("torch", "fused"):
        # Fused: probabilities, a mask, and what it leaves of them. Torch: float32 softmax, cast, mask.
        per_score = 2 * wide + {"fused": 1, "torch": 4}[stack.attention]
        scores = float(per_score * tokens * own.attention.heads * seq)
    inner = sum(one.outputs for one in network[:-1])
    inner += sum((1 + written_by_activation(spec, stack)) * one.inputs for one in network[-1:])
    attention = _attention(spec, layout, stack, own, tokens, wide)
    experts = mixture.everything if mixture else 0.0
    return Kept(stream("residual") * wide, norm, attention, scores, float(wide * tokens * inner), experts=experts)


def _attention(spec: ModelSpec, layout: Layout, stack: Stack, own: Block, tokens: int, wide: int) -> float:
    """Queries, keys, values, the output (or two copies of it), a number for each query."""
    outputs, one = 2 if stack.copies_attention else 1, own.attention
    if spec.mla is None:
        return float(tokens * (wide * ((1 + outputs) * one.width + 2 * one.kv_width) + 4 * one.heads))
    # Of latent attention the norms' outputs are the latents that heads are made of, side by side; with sp those of all
    # tokens. Values are padded to the width of the keys.
    values = one.width if stack.pads_values else one.seen
    part, latents = layout.tp if layout.sp else 1, spec.mla.q_rank + spec.mla.cached
    made = 2 * one.width + 2 * values + (outputs - 1) * one.seen
    return float(tokens * (wide * (made + latents + spec.mla.rope_dim / part) + 4 * one.heads))
