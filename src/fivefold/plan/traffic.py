"""What one rank sends in one training step, in closed form. `fivefold verify` holds it against what runs.

    expected(spec, layout, seq=4096, batch=512, dtype="bfloat16")     # rows: axis, kind, calls, payload, wire

Letters: B sequences of a microbatch on one dp rank, S tokens of a sequence on one cp rank, m microbatches, L layers,
E hidden, H and K query and kv heads of one tp rank, D head dim, t tp, c cp, N ranks of the zero axis, M the bytes of
the weights of one tp rank. `narrow` is the compute dtype, in which activations and weights travel; `wide`, float32 or
float64, is that of gradients and of whatever is summed on the way.

Textbook cases: dp, one all-reduce of M, 2M(N-1)/N on the wire; ZeRO 3 with one microbatch, 3M(N-1)/N; tp, four
all-reduces of BSE a layer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.buckets import MINIMUM, buckets, held, unit_of
from fivefold.layout import Layout
from fivefold.sharding import kv_head
from fivefold.spec import ModelSpec
from fivefold.wire import Kind, Traffic, same_axis, sizes, total, wire

_NARROW = {"float64": 8, "float32": 4, "bfloat16": 2}
_WIDE = {"float64": 8, "float32": 4, "bfloat16": 4}
_SCALAR = 8  # losses and norms are added up in float64


@dataclass(frozen=True)
class _Step:
    """The numbers that the formulas below are made of."""

    spec: ModelSpec
    layout: Layout
    tokens: int  # B S
    narrow: int  # bytes
    wide: int
    minimum: int  # elements of a bucket
    smoothing: bool

    @property
    def forwards(self) -> int:
        """How often a block runs forward for one backward. Selective recompute keeps what its collectives made."""
        return 2 if self.layout.recompute == "full" else 1


_Sent = tuple[str, Kind, int, int]  # axis, kind, calls, bytes of one call


def expected(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    *,
    tp_rank: int = 0,
    minimum: int = MINIMUM,
    smoothing: bool = False,
) -> list[Traffic]:
    """One step of one rank. Ranks along tp differ where the vocabulary does not divide."""
    tokens = batch // layout.dp // layout.microbatches * (seq // layout.cp)
    step = _Step(spec, layout, tokens, _NARROW[dtype], _WIDE[dtype], minimum, smoothing)
    degrees = sizes(layout)
    sent: list[_Sent] = [*_numbers(step), *_gradients_and_weights(step, tp_rank)]
    for axis, kind, calls, payload in (*_tensor(step), *_context(step)):
        sent.append((axis, kind, calls * layout.microbatches, payload))
    return total(
        Traffic(same_axis(layout, axis), kind, calls, calls * payload, wire(kind, calls * payload, degrees[axis]))
        for axis, kind, calls, payload in sent
        if degrees[axis] > 1 and calls
    )


def _numbers(step: _Step) -> Iterator[_Sent]:
    """The loss over the ranks that have other tokens, and the square of the gradient norm over all."""
    yield "data", "all-reduce", 1, _SCALAR
    yield "world", "all-reduce", 1, _SCALAR


# ---- per microbatch --------------------------------------------------------------------------------------------------


def _tensor(step: _Step) -> Iterator[_Sent]:
    """Megatron-LM's (arXiv 1909.08053, section 3; with sp 2205.05198, section 4.2). All of them carry BSE elements.

    A layer has two column groups (q, k, v; gate, up) and two row linears (o, down). Forward sums the rows' outputs,
    backward the columns' input gradients; with sp a sum leaves each rank its part of the sequence, and what a group
    reads, forward or backward, is gathered first, the columns' saved input once more in backward.
    The embedding sums like a row linear, the head reads like a column group. Neither is recomputed.
    """
    layers, forwards = step.spec.layers, step.forwards
    states = step.tokens * step.spec.hidden * step.narrow
    if step.layout.sp:
        yield "tp", "reduce-scatter", layers * (2 * forwards + 2) + 2, states
        yield "tp", "all-gather", layers * (2 * forwards + 4) + 3, states
    else:
        yield "tp", "all-reduce", layers * (2 * forwards + 2) + 2, states
    # The cross-entropy: the largest logit of each token; then its sum of exponentials and its target's logit, and for
    # label smoothing the sum of its logits.
    yield "tp", "all-reduce", 1, step.tokens * step.wide
    yield "tp", "all-reduce", 1, (3 if step.smoothing else 2) * step.tokens * step.wide


def _context(step: _Step) -> Iterator[_Sent]:
    """Keys and values round the ring, gathered, or traded for heads (parallel/context says how each works)."""
    spec, layout, layers, c = step.spec, step.layout, step.spec.layers, step.layout.cp
    heads, kv_heads = spec.heads // layout.tp, len(kv_head(spec, layout, 0))
    head = step.tokens * spec.head_dim  # elements of one head of this rank's tokens
    pair = 2 * head * kv_heads  # of its keys and values
    if layout.cp_kind == "ring":
        # Round once in each forward and once in backward; their gradient follows, and travels one step further, home.
        yield "cp", "send", layers * (step.forwards + 1) * (c - 1), pair * step.narrow
        yield "cp", "send", layers * c, pair * step.wide
    elif layout.cp_kind == "allgather":
        yield "cp", "all-gather", layers * (step.forwards + 1), c * pair * step.narrow
        yield "cp", "reduce-scatter", layers, c * pair * step.wide
    else:
        # Queries, keys and values one way, outputs the other; kv heads are repeated until c divides them.
        traded = heads + 2 * math.lcm(kv_heads, c)
        yield "cp", "all-to-all", layers * (step.forwards + 1), head * traded * step.narrow
        yield "cp", "all-to-all", layers * (step.forwards + 1), head * heads * step.narrow


# ---- per step, except what ZeRO 2 and 3 repeat -----------------------------------------------------------------------


def _gradients_and_weights(step: _Step, tp_rank: int) -> Iterator[_Sent]:
    if step.layout.zero == 3 and step.layout.dp * step.layout.cp > 1:
        yield from _fully_sharded(step, tp_rank)
    else:
        yield from _replicated(step, tp_rank)


def _replicated(step: _Step, tp_rank: int) -> Iterator[_Sent]:
    """Buckets. Shares are padded to the longest, so a reduce-scatter or all-gather is handed N times that."""
    layout, parts = step.layout, sizes(step.layout)["zero"]
    stage = layout.zero if parts > 1 else 0
    for bucket in buckets(held(step.spec, layout, tp_rank).values(), step.minimum):
        if stage == 0:
            yield "zero", "all-reduce", 1, bucket.size() * step.wide
        else:
            reductions = layout.microbatches if stage == 2 else 1
            yield "zero", "reduce-scatter", reductions, bucket.padded(parts) * step.wide
            yield "zero", "all-gather", 1, bucket.padded(parts) * step.narrow
        if bucket.partial:  # summands of other tp ranks: once a step, of the share that is left
            yield "tp", "all-reduce", 1, (bucket.padded(parts) // parts if stage else bucket.size()) * step.wide


def _fully_sharded(step: _Step, tp_rank: int) -> Iterator[_Sent]:
    """FSDP2: a unit is a block, or what stands around the blocks; it pads like the buckets.

    A unit is gathered for forward and again for backward, and reduce-scattered, in every microbatch; recompute finds
    its weights gathered. Copies (replicate) add up their shares once a step. A gradient that is a summand over tp is
    added up before it is reduce-scattered, parameter by parameter, in every microbatch.
    """
    layout, parts = step.layout, sizes(step.layout)["zero"]
    units: dict[str, int] = {}
    for one in held(step.spec, layout, tp_rank).values():
        unit = unit_of(one.name) if one.name.startswith("layers.") else ""
        units[unit] = units.get(unit, 0) + one.share_size(parts)
        if one.tp.partial:
            yield "tp", "all-reduce", layout.microbatches, one.size * step.narrow
    for share in units.values():
        yield "zero", "all-gather", 2 * layout.microbatches, parts * share * step.narrow
        yield "zero", "reduce-scatter", layout.microbatches, parts * share * step.wide
        yield "replicate", "all-reduce", 1, share * step.wide
