"""Bytes that one microbatch keeps for its backward pass, by kind, on one rank.

kept(spec, layout, stack, samples, seq)      # of a block
Letters as in work.py. Textbook case: a GPT block with dropout, fused softmax and no recompute keeps
T E (34 + 5 H S / E) bytes on one rank (arXiv 2205.05198, section 4.1); tp divides all but 10 T E of it, sp that, too.
"""

import math
from typing import NamedTuple

from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.plan.cost.stack import Stack
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Block, block

# What a fused kernel does not write of a gated activation: the gate's; or clamped gate, sigmoid, their product, input.
_GATES = {"swiglu": 1, "swiglu_clamped": 4}


class Kept(NamedTuple):
    """Bytes by kind."""

    residual: float = 0.0  # the stream itself: what a block is given
    norm: float = 0.0
    attention: float = 0.0
    scores: float = 0.0  # where attention is not one kernel
    mlp: float = 0.0
    head: float = 0.0  # gradients that were taken with the loss, and wait for the backward pass

    @property
    def total(self) -> float:
        return sum(self)


def kept(spec: ModelSpec, layout: Layout, stack: Stack, samples: int, seq: int, wide: int = 2) -> Kept:
    """Of one block and microbatch; `wide` is the bytes of an activation."""
    tokens = samples * seq // layout.cp
    everything = _everything(spec, layout, stack, tokens, seq, wide)
    if layout.recompute == "none":
        return everything
    stream = everything.residual / 2
    if layout.recompute == "full":
        return Kept(residual=stream)
    if stack.selective == "attention":
        return everything._replace(scores=0.0)
    own = block(spec, layout.tp)
    # The outputs of every matmul and of attention, and what Ulysses traded before it and after it.
    attention = tokens * wide * (own.attention.width + _outputs(own, "attention", layout))
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        traded = _block(spec, layout).attention
        attention += tokens * wide * (2 * traded.width + 2 * traded.kv_width)
    mlp = tokens * wide * _outputs(own, "mlp", layout)
    if stack.selective == "half":
        attention, mlp = tokens * wide * (1.5 * own.attention.width + 1.0 * own.attention.kv_width), mlp / 2
    return Kept(residual=stream, attention=attention, mlp=mlp)


def put_off(spec: ModelSpec, layout: Layout, tokens: int, wide: int = 2) -> float:
    """Bytes of a block between its I and its W: what the linears read, and the gradients of what they wrote."""
    own, part = _block(spec, layout), layout.tp if layout.sp else 1
    read = sum(group[0].inputs / (part if group[0].reads_residual else 1) for group in own.groups)
    return tokens * wide * (read + sum(one.outputs / (part if one.tp == "whole" else 1) for one in own.matmuls))


def _block(spec: ModelSpec, layout: Layout) -> Block:
    """A tp rank's block as attention keeps it: Ulysses repeats kv heads that are few."""
    own = block(spec, layout.tp)
    if layout.cp == 1 or layout.cp_kind != "ulysses":
        return own
    return block(structs.replace(spec, kv_heads=math.lcm(own.attention.kv_heads, layout.cp) * layout.tp), layout.tp)


def _outputs(own: Block, branch: str, layout: Layout) -> float:
    """Features that the matmuls of a branch write; of those that every rank has, sp leaves a rank its part."""
    part = layout.tp if layout.sp else 1
    return sum(one.outputs / (part if one.whole else 1) for one in own.of(branch))


def _everything(spec: ModelSpec, layout: Layout, stack: Stack, tokens: int, seq: int, wide: int) -> Kept:
    """What autograd saves without recompute."""
    own = _block(spec, layout)
    heads, kv = own.attention.width, own.attention.kv_width

    def stream(kind: str) -> float:
        """Elements that operations of a kind read. Without sp every tp rank holds all of them."""
        return tokens * sum(one.share(layout.tp, layout.sp) for one in own.elementwise if one.kind == kind)

    # Each norm keeps its input (the residual stream) and its output, which the columns read; in eager float32 RMSNorm
    # the input as float32 and the normalised values besides. A dropout keeps its mask.
    eager = stack.norm == "eager" and spec.norm == "rmsnorm"
    norm = stream("norm") * (wide + (8 if eager else 0)) + stream("dropout")
    outputs = 2 if stack.copies_attention else 1
    attention = float(tokens * (wide * ((1 + outputs) * heads + 2 * kv) + 4 * own.attention.heads))
    scores = 0.0
    if stack.attention in ("torch", "fused"):
        # Fused: probabilities, a mask, and what it leaves of them. Torch: float32 softmax, cast, mask.
        per_score = 2 * wide + {"fused": 1, "torch": 4}[stack.attention]
        scores = float(per_score * tokens * own.attention.heads * seq)
    *columns, down = own.of("mlp")
    inner = sum(one.outputs for one in columns) + down.inputs
    if stack.pointwise in ("eager", "fivefold"):
        inner += _GATES.get(spec.activation, 0) * down.inputs
    return Kept(stream("residual") * wide, norm, attention, scores, float(wide * tokens * inner))
