"""Bytes that one microbatch leaves behind for its backward pass, by kind, on one rank.

kept(spec, layout, stack, samples, seq)      # of a block
Letters as in work.py. Textbook case: a GPT block with dropout, fused softmax and no recompute keeps
T E (34 + 5 H S / E) bytes on one rank (arXiv 2205.05198, section 4.1); tp divides all but 10 T E of it, sp that, too.
"""

import math
from typing import NamedTuple

from fivefold.layout.layout import Layout
from fivefold.plan.cost.stack import Stack
from fivefold.spec.model import ModelSpec


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

    def times(self, factor: float) -> "Kept":
        return Kept(*(factor * part for part in self))


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
    t = layout.tp
    heads, kv = _widths(spec, layout)
    columns = (2 if spec.activation == "swiglu" else 1) * spec.ffn / t
    # The outputs of every product and of attention; sp leaves those of row linears in parts.
    part = t if layout.sp else 1
    attention = tokens * wide * (2 * heads + 2 * kv + spec.hidden / part)
    mlp = tokens * wide * (columns + spec.hidden / part)
    if stack.selective == "half":
        attention, mlp = tokens * wide * (1.5 * heads + 1.0 * kv), mlp / 2
    return Kept(residual=stream, attention=attention, mlp=mlp)


def put_off(spec: ModelSpec, layout: Layout, tokens: int, wide: int = 2) -> float:
    """Bytes of a block between its I and its W: what the linears read, and the gradients of what they wrote."""
    t, part = layout.tp, layout.tp if layout.sp else 1
    heads, kv = _widths(spec, layout)
    inner = spec.ffn / t
    gated = 2 if spec.activation == "swiglu" else 1
    read = 2 * spec.hidden / part + heads + inner
    written = heads + 2 * kv + gated * inner + 2 * spec.hidden
    return tokens * wide * (read + written)


def _widths(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Features of queries, and of keys, of a tp rank as attention keeps them: Ulysses repeats kv heads that are few."""
    heads, kv = spec.heads // layout.tp, max(1, spec.kv_heads // layout.tp)
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        kv = math.lcm(kv, layout.cp)
    return heads * spec.head_dim, kv * spec.head_dim


def _everything(spec: ModelSpec, layout: Layout, stack: Stack, tokens: int, seq: int, wide: int) -> Kept:
    """What autograd saves without recompute."""
    t = layout.tp
    part = t if layout.sp else 1
    stream = tokens * spec.hidden / part
    heads, kv = _widths(spec, layout)
    # Each norm keeps its input (the residual stream) and its output, which the columns read; in eager float32 RMSNorm
    # the input as float32 and the normalised values besides. Without sp every tp rank holds all of it.
    eager = stack.norm == "eager" and spec.norm == "rmsnorm"
    norm = 2 * stream * (wide + (8 if eager else 0))
    dropped = 2 * stream if spec.dropout else 0
    outputs = 2 if stack.copies_attention else 1
    attention = tokens * (wide * ((1 + outputs) * heads + 2 * kv) + 4 * spec.heads / t)
    scores = 0.0
    if stack.attention in ("torch", "fused"):
        # Fused: probabilities, a mask, and what it leaves of them. Torch: float32 softmax, cast, mask.
        per_score = 2 * wide + {"fused": 1, "torch": 4}[stack.attention]
        scores = per_score * tokens * (spec.heads / t) * seq
    inner = tokens * spec.ffn / t
    pieces = (4 if stack.pointwise in ("eager", "fivefold") else 3) if spec.activation == "swiglu" else 2
    return Kept(2 * stream * wide, norm + dropped, attention, scores, pieces * wide * inner)
