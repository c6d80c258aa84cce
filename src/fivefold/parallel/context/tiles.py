"""Tiles: the blocks of the causal score matrix that each rank of a zigzag works on. Pure arithmetic.

A row of S tokens is cut into 2c pieces; rank r of c holds pieces r and 2c-1-r, in that order, so that places within its
share ascend like positions. Of another rank's keys it needs

    from an earlier rank   its early piece, seen by all queries here; its late piece lies in the future
    from a later rank      both pieces, seen by the late queries here; the early ones come before both
    its own                the lower triangle

Each of the first two is half a square and one kernel call, so all ranks do the same work in every step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    queries: range  # places in this rank's share
    keys: range  # places among the keys at hand
    causal: bool = False  # a square, of which the lower triangle is seen; else all of it

    @property
    def scores(self) -> int:
        n = len(self.queries)
        return n * (n + 1) // 2 if self.causal else n * len(self.keys)


def own_tile(share: int) -> Tile:
    return Tile(range(share), range(share), causal=True)


def ring_tile(rank: int, source: int, share: int) -> Tile:
    """What `rank` computes with the `share` keys that `source` holds; keys are places in that share."""
    if source == rank:
        return own_tile(share)
    half = share // 2
    if source < rank:
        return Tile(range(share), range(half))
    return Tile(range(half, share), range(share))


def gathered_tiles(rank: int, ranks: int, share: int) -> list[Tile]:
    """What `rank` computes beside its own tile where all keys are at hand; keys are positions.

    All its earlier ranks' tiles in one, and all its later ranks' tiles in one: both are without gaps.
    """
    half = share // 2
    before = Tile(range(share), range(rank * half))
    between = Tile(range(half, share), range((rank + 1) * half, (2 * ranks - 1 - rank) * half))
    return [tile for tile in (before, between) if tile.keys]
