"""Where one kind of context parallelism overtakes another: methods.py, asked at many lengths and degrees.

Nothing is derived here. Lengths double from one tile per piece upwards, and where an answer changes between two of
them the change is bisected. Attention grows with the square of the length and traffic with its first power, so there is
usually one change between two neighbours. Kernels that fill their last wave badly can add more, which may be missed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from fivefold.layout.layout import ContextKind
from fivefold.plan.context.methods import LayerAttention, allgather, compare, possible, ring
from fivefold.plan.cost.kernels import QUERIES

LONGEST = 1 << 24  # tokens; longer sequences are not asked about

T = TypeVar("T")


class Since(NamedTuple, Generic[T]):
    """An answer, and the least number that has it."""

    start: int
    answer: T


def changes(ask: Callable[[int], T], numbers: Sequence[int], step: int) -> list[Since[T]]:
    """The answers over ascending multiples of `step`: the first, and every other one where it begins."""
    found = [Since(numbers[0], ask(numbers[0]))]
    for low, high in pairwise(numbers):
        at, last = low, ask(high)
        while found[-1].answer != last:
            end, answer = high, last
            while end - at > step:
                middle = (at + end) // 2 // step * step
                if ask(middle) == found[-1].answer:
                    at = middle
                else:
                    end, answer = middle, ask(middle)
            found.append(Since(end, answer))
            at = end
    return found


def _over_lengths(case: LayerAttention, ask: Callable[[LayerAttention], T]) -> list[Since[T]]:
    step = 2 * case.ranks * QUERIES  # pieces are whole tiles
    doubled = [step << power for power in range(64) if step << power <= max(LONGEST, step)]
    return changes(lambda seq: ask(replace(case, seq=seq)), doubled, step)


def by_length(case: LayerAttention) -> list[Since[ContextKind]]:
    """The fastest kind, by the length of the sequence."""
    return _over_lengths(case, lambda asked: possible(asked)[0].kind)


def ring_or_gather(case: LayerAttention) -> list[Since[ContextKind]]:
    """The faster of the two kinds that do not divide heads."""
    return _over_lengths(case, lambda asked: min(ring(asked), allgather(asked), key=lambda one: one.seconds).kind)


def ring_is_free(case: LayerAttention) -> list[Since[bool]]:
    """Whether attention hides every send of a ring but that of the last gradient."""
    return _over_lengths(case, lambda asked: ring(asked).waits == 0)


class Degree(NamedTuple):
    """One sequence over a number of ranks."""

    ranks: int
    seconds: dict[ContextKind, float | None]  # None: it cannot run

    @property
    def best(self) -> ContextKind:
        return min((time, kind) for kind, time in self.seconds.items() if time is not None)[1]


def by_degree(case: LayerAttention, most: int) -> list[Degree]:
    """The same sequence over 2, 4, 8, ... ranks, as far as there are any and it divides; and over as many as asked."""
    doubled = {1 << power for power in range(1, most.bit_length())}
    fits = sorted(c for c in doubled | {case.ranks} if c <= most and case.seq % (2 * c) == 0)
    return [
        Degree(ranks, {kind: getattr(one, "seconds", None) for kind, one in compare(case.over(ranks)).items()})
        for ranks in fits
    ]
