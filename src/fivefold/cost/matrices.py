"""What an optimizer that reads whole matrices adds to a rank's step: what it sends, computes and holds.

    matrices = MatrixCost.of(spec, layout, seq, "bfloat16", Muon(), RankCoords.of(layout, rank=3))
    matrices.calls, matrices.flops, matrices.peak

`layout/matrix_owners.py` deals the matrices out. What travels, and what the rule computes with, has the dtype that the
model computes in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from fivefold.layout.layout import Layout
from fivefold.layout.matrix_owners import Round, elements, matrix_owners
from fivefold.layout.rank_part import RankCoords
from fivefold.optim.base import OptimizerConfig, matrix_memory
from fivefold.spec.model import ModelSpec
from fivefold.support.dtypes import DTYPE_BYTES, wide_bytes


class Exchanged(NamedTuple):
    """Bytes of a collective over the stage's ranks."""

    kind: Literal["all-to-all", "all-gather"]
    payload: int  # includes what a rank keeps for itself only for an all-gather
    sent: int


@dataclass(frozen=True)
class MatrixCost:
    calls: tuple[Exchanged, ...] = ()
    flops: float = 0.0
    most: float = 0.0  # FLOPs of the rank that has most of them, round by round, for which the others wait
    peak: int = 0  # bytes that exist during the update alone

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: Layout, seq: int, dtype: str, config: OptimizerConfig, at: RankCoords
    ) -> "MatrixCost":
        """The cost on the rank at these coordinates; only `pp` and `stage` matter."""
        if config.unit == "element":
            return NO_MATRICES
        return _cost(spec, layout, seq, dtype, config, RankCoords(pp=at.pp, stage=at.stage))


NO_MATRICES = MatrixCost()


@lru_cache(maxsize=256)
def _cost(spec: ModelSpec, layout: Layout, seq: int, dtype: str, config: OptimizerConfig, at: RankCoords) -> MatrixCost:
    owners, each, wide = matrix_owners(spec, layout, seq, config, at.pp), DTYPE_BYTES[dtype], wide_bytes(dtype)
    rounds = [*owners.rounds(at.stage)]
    calls = [call for round_ in rounds for call in _calls(round_, each)]
    peak = max((_peak(round_, config, each, wide) for round_ in rounds), default=0)
    return MatrixCost(tuple(calls), owners.costs[at.stage], owners.longest, peak)


def _calls(round_: Round, each: int) -> Iterator[Exchanged]:
    for call in round_.calls:
        sent, received = (each * elements(side) for side in call)
        yield Exchanged("all-to-all", max(sent, received), sent)
    if round_.gather is not None and round_.last:
        for given in round_.gather.calls:
            ranks, own = len(round_.gather.parts), each * len(given)
            yield Exchanged("all-gather", ranks * own, (ranks - 1) * own)


def _peak(round_: Round, config: OptimizerConfig, each: int, wide: int) -> int:
    """Bytes of a round: while parts are packed and sent, while the rule runs, and while updates are sent back."""
    own = sum(prod(matrix.shape) for matrix in round_.batch)
    to_owners = sum(map(elements, round_.to_owners)) if round_.to_owners is not None else 0
    unread = wide * max((sum(part.size for part in parts) for parts in round_.unread), default=0)
    ahead = wide * sum(part.size for part in round_.read) + each * (own + to_owners)
    rule = each * (own + sum(matrix_memory(config, *matrix.shape) for matrix in round_.batch))
    most = max(unread, ahead, rule, *(each * (own + sum(map(elements, call))) for call in round_.to_holders), 0)
    if (gather := round_.gather) is None:
        return most
    gathered = max((len(gather.parts) * len(call) for call in gather.calls), default=0) if round_.last else 0
    return each * gather.length + max(most, each * gathered)
