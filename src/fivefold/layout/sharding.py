"""Who holds what: the block of every parameter on a tp rank, and the tokens of a sequence on a cp rank.

Pure arithmetic, read by the ranks that hold the pieces and by the planner that counts them.
"""

from dataclasses import dataclass
from typing import Literal

from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.parameters import Parameter

Box = tuple[range, ...]  # a part of a tensor: the indices along each dimension of the whole


@dataclass(frozen=True)
class TensorShard:
    """How one parameter lies over the tp axis; that of experts over the ep axis."""

    dim: int | None  # the dimension that is divided; None: every rank holds all of it
    partial: bool = False  # each rank's gradient is a summand: the whole is the sum over tp
    axis: Literal["tp", "ep"] = "tp"


def chunk(length: int, parts: int, index: int) -> range:
    """Part `index` of `length` things: torch.chunk's rule, so all parts have the first's length but the last ones."""
    size = -(-length // parts)
    return range(min(length, index * size), min(length, (index + 1) * size))


SLICE = 2**28  # logits at a time, about: half a GiB in bfloat16, and enough rows for a matmul to run at full pace
TILE = 256  # rows: those of a matmul's tiles


def slices(tokens: int, words: int) -> list[range]:
    """The tokens whose logits, over so many words, are held at a time: whole tiles of them, as even as these allow."""
    tiles, parts = -(-tokens // TILE), max(1, round(tokens * words / SLICE))
    rows = (chunk(tiles, parts, index) for index in range(parts))
    return [range(part.start * TILE, min(part.stop * TILE, tokens)) for part in rows if len(part)] or [range(0)]


def tensor_shard(parameter: Parameter, spec: ModelSpec, layout: Layout) -> TensorShard:
    """The parameter's rule, evaluated for a layout."""
    match parameter.tp:
        case "rows":
            return TensorShard(parameter.row_dim)
        case "columns":
            return TensorShard(parameter.row_dim + 1)
        case "kv rows" if spec.kv_heads % layout.tp == 0:
            return TensorShard(parameter.row_dim)
        case "kv rows":  # fewer kv heads than ranks: several ranks use a head, and add to its gradient
            return TensorShard(None, partial=True)
        case "heads" | "tokens":
            return TensorShard(None, partial=layout.tp > 1)
        case "experts":  # whole ones: their number divides by ep
            return TensorShard(0, axis="ep")
    return TensorShard(None, partial=layout.sp)  # under sp a rank sees only its tokens


def kv_head(spec: ModelSpec, layout: Layout, rank: int) -> range:
    """The kv heads that tp rank `rank` works with."""
    if spec.kv_heads % layout.tp == 0:
        return chunk(spec.kv_heads, layout.tp, rank)
    head = rank * spec.kv_heads // layout.tp
    return range(head, head + 1)


def context_share(seq: int, layout: Layout, rank: int) -> list[range]:
    """The positions of a sequence that cp rank `rank` holds, in order.

    Zigzag (one early piece and one late piece) gives every rank the same number of causal scores; Ulysses divides the
    heads for attention, so its pieces can stay whole.
    """
    if layout.cp == 1 or layout.cp_kind == "ulysses":
        return [chunk(seq, layout.cp, rank)]
    pieces = 2 * layout.cp
    return [chunk(seq, pieces, rank), chunk(seq, pieces, pieces - 1 - rank)]
