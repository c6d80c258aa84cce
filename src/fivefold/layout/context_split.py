"""The positions of a sequence that each cp rank holds: zigzag or contiguous. Pure arithmetic, for ranks and planner."""

from fivefold.layout.layout import Layout
from fivefold.layout.rules import is_zigzag
from fivefold.layout.sharding import chunk


def context_share(seq: int, layout: Layout, rank: int) -> list[range]:
    """The positions of a sequence that cp rank `rank` holds, in order: a zigzag for ring and allgather, a contiguous
    piece for Ulysses, which shards heads for attention."""
    return zigzag_share(seq, layout.cp, rank) if is_zigzag(layout) else [chunk(seq, layout.cp, rank)]


def zigzag_share(seq: int, ranks: int, rank: int) -> list[range]:
    """One early piece and one late piece: so every rank has the same number of causal scores."""
    pieces = 2 * ranks
    return [chunk(seq, pieces, rank), chunk(seq, pieces, pieces - 1 - rank)]
