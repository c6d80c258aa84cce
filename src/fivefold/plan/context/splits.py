"""How the tokens of a sequence are divided over cp ranks, and what each rank then computes. Exact, by counting.

    zigzag(seq=131072, ranks=16).scores("earlier")      # causal scores between a rank and one before it

Every split here gives out pieces of equal length in rounds, one piece to each rank per round. Contiguous is one round,
the zigzag two (the second backwards), a stripe as many as it takes. So what a rank computes with another's keys depends
only on which of the two comes first, and all counts are closed forms.

Attention kernels work in tiles: a tile with a single unmasked score costs a whole one. They know two masks, everything
and the lower triangle: anything else takes several calls, whose results are merged.
"""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from fivefold.plan.cost.kernels import QUERIES

Side = Literal["own", "earlier", "later"]  # whose keys a rank looks at: its own, or those of a rank before or after it
SIDES: tuple[Side, ...] = ("own", "earlier", "later")

STRIPES = (1, 128, 1024)  # tokens of a piece


@dataclass(frozen=True)
class Call:
    """One run of an attention kernel: every query sees every key, or a square's lower triangle."""

    queries: int
    keys: int
    causal: bool = False
    diagonal: bool = True  # whether the triangle has it; without: shifted by one token

    @property
    def scores(self) -> int:
        if not self.causal:
            return self.queries * self.keys
        return self.queries * (self.queries + (1 if self.diagonal else -1)) // 2

    def computed(self, tile: int = QUERIES) -> int:
        """Scores of all tiles that it touches."""
        rows, columns = math.ceil(self.queries / tile), math.ceil(self.keys / tile)
        return tile**2 * (rows * (rows + 1) // 2 if self.causal else rows * columns)


@dataclass(frozen=True)
class Split:
    name: str
    ranks: int
    piece: int  # tokens
    rounds: int
    turns: bool = False  # every other round runs backwards

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return self.piece * self.rounds

    @property
    def seq(self) -> int:
        return self.tokens * self.ranks

    def places(self, rank: int) -> list[range]:
        """The positions of a rank's tokens, ascending."""
        starts = (self.piece * self._piece(rank, turn) for turn in range(self.rounds))
        return [range(start, start + self.piece) for start in starts]

    def _piece(self, rank: int, turn: int) -> int:
        """The number of the piece that a rank gets in a round."""
        return turn * self.ranks + (self.ranks - 1 - rank if self.turns and turn % 2 else rank)

    def scores(self, side: Side) -> int:
        """Causal scores of a rank's queries and the keys of one rank."""
        if side == "own":
            return self.tokens * (self.tokens + 1) // 2
        backwards = self.rounds // 2 if self.turns else 0
        extra = backwards if side == "later" else self.rounds - backwards
        return self.piece**2 * (self.rounds * (self.rounds - 1) // 2 + extra)

    @property
    def busiest(self) -> int:
        """Scores of the rank that has most: in the middle of the ranks there is a mean of both ends."""
        return self.scores("own") + (self.ranks - 1) * self._worst

    @property
    def balance(self) -> float:
        """The busiest rank's scores over the mean. A ring has the same, since its slowest rank is that one in all
        steps: the first looks at later ranks only, the last at earlier ones."""
        return self.busiest * self.ranks / (self.seq * (self.seq + 1) // 2)

    @property
    def worst_step(self) -> float:
        """The same within one step of a ring, the worst. In step s, s ranks look at later ones and the rest do not."""
        earlier, later = self.scores("earlier"), self.scores("later")
        means = ((step * later + (self.ranks - step) * earlier) / self.ranks for step in range(1, self.ranks))
        return max((self._worst / mean for mean in means if mean), default=1.0)

    @property
    def _worst(self) -> int:
        return max(self.scores("earlier"), self.scores("later"))

    def calls(self, side: Side) -> list[Call]:
        """What a rank computes with the keys of one rank: a call for each set of queries that see the same keys."""
        if side == "own":
            return [Call(self.tokens, self.tokens, causal=True)]
        if self.piece == 1 and not self.turns:
            return [Call(self.tokens, self.tokens, causal=True, diagonal=side == "earlier")]
        # For the queries of each round, how many rounds of the other rank's keys come before them.
        before = (turn + (side == ("later" if self.turns and turn % 2 else "earlier")) for turn in range(self.rounds))
        alike = ((seen, len(list(group))) for seen, group in groupby(before))
        return [Call(count * self.piece, seen * self.piece) for seen, count in alike if seen]

    def gathered(self, rank: int) -> list[Call]:
        """What a rank computes where all keys are at hand: its own, and what lies between its pieces.

        Pieces of one token would leave a call for every query; then rank by rank, as in a ring.
        """
        if self.piece == 1 and not self.turns:
            earlier, later = self.calls("earlier"), self.calls("later")
            return [*self.calls("own"), *rank * earlier, *(self.ranks - 1 - rank) * later]
        found, before = self.calls("own"), -1
        for turn in range(self.rounds):
            own = self._piece(rank, turn)
            if own - before > 1:
                found.append(Call((self.rounds - turn) * self.piece, (own - before - 1) * self.piece))
            before = own
        return found

    @property
    def waste(self) -> float:
        """Scores that a ring's busiest rank computes, in whole tiles, over those that are seen."""
        own, earlier, later = (sum(call.computed() for call in self.calls(side)) for side in SIDES)
        return (own + (self.ranks - 1) * max(earlier, later)) / self.busiest


def contiguous(seq: int, ranks: int) -> Split:
    return Split("contiguous", ranks, seq // ranks, 1)


def zigzag(seq: int, ranks: int) -> Split:
    """One early and one late piece each: what `ring` and `allgather` run."""
    return Split("zigzag", ranks, seq // (2 * ranks), 2, turns=True)


def striped(seq: int, ranks: int, piece: int) -> Split:
    return Split(f"striped by {piece}", ranks, piece, seq // ranks // piece)


def splits(seq: int, ranks: int) -> list[Split]:
    """Those to compare; a stripe is one if there are several rounds of it."""
    fine = [striped(seq, ranks, k) for k in reversed(STRIPES) if seq % (ranks * k) == 0 and seq > ranks * k]
    return [contiguous(seq, ranks), zigzag(seq, ranks), *fine]
