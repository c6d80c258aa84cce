"""Who holds what: the rows and columns of every parameter over tp, and the tokens of a sequence over cp.

Pure arithmetic, read by the ranks that hold the pieces and by the planner that counts them.
"""

from dataclasses import dataclass

from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec, Parameter


@dataclass(frozen=True)
class TensorShard:
    """How one parameter lies over the tp axis."""

    dim: int | None  # the dim that is dealt out; None: every rank holds all of it
    partial: bool = False  # each rank's gradient is a summand: the whole is the sum over tp


def chunk(length: int, parts: int, index: int) -> range:
    """Part `index` of `length` things: torch.chunk's rule, so all parts have the first's length but the last ones."""
    size = -(-length // parts)
    return range(min(length, index * size), min(length, (index + 1) * size))


SLICE = 2**28  # logits at a time: half a GiB in bfloat16, and enough rows for a product to run at full pace


def slices(tokens: int, words: int) -> list[range]:
    """The tokens whose logits, over so many words, are held at a time."""
    parts = max(1, -(-tokens * words // SLICE))
    return [part for index in range(parts) if len(part := chunk(tokens, parts, index)) or not index]


def over_tp(spec: ModelSpec, layout: Layout) -> dict[str, TensorShard]:
    """Every parameter's place on the tp axis."""
    return {parameter.name: _over_tp(spec, layout, parameter) for parameter in spec.parameters()}


def _over_tp(spec: ModelSpec, layout: Layout, parameter: Parameter) -> TensorShard:
    module, _, kind = parameter.name.rpartition(".")
    part = module.rpartition(".")[2]
    if part in ("embedding", "head", "q", "gate", "up"):
        return TensorShard(0)
    if part in ("k", "v"):
        # Fewer kv heads than ranks: every rank holds all and uses one, so several ranks add to a head's gradient.
        return TensorShard(0) if spec.kv_heads % layout.tp == 0 else TensorShard(None, partial=True)
    if part in ("o", "down") and kind == "weight":
        return TensorShard(1)
    if part in ("q_norm", "k_norm"):
        return TensorShard(None, partial=layout.tp > 1)  # one scale for all heads, and each rank sees only its own
    return TensorShard(None, partial=layout.sp)  # norms, positions, row biases: under sp a rank sees only its tokens


def kv_head(spec: ModelSpec, layout: Layout, rank: int) -> range:
    """The kv heads that tp rank `rank` works with."""
    if spec.kv_heads % layout.tp == 0:
        return chunk(spec.kv_heads, layout.tp, rank)
    head = rank * spec.kv_heads // layout.tp
    return range(head, head + 1)


def context_share(seq: int, layout: Layout, rank: int) -> list[range]:
    """The positions of a sequence that cp rank `rank` holds, in order.

    Zigzag (one early piece and one late piece) gives every rank the same number of causal scores; Ulysses deals the
    heads out for attention, so its pieces can stay whole.
    """
    if layout.cp == 1 or layout.cp_kind == "ulysses":
        return [chunk(seq, layout.cp, rank)]
    pieces = 2 * layout.cp
    return [chunk(seq, pieces, rank), chunk(seq, pieces, pieces - 1 - rank)]
