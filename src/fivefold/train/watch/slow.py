"""Which rank has become slow, in which phase, and by how much: rank 0 judges, every `watch.slow_every` steps.

A rank is held against the others of its pipeline stage, which do the same work; where there are none, against itself
before. It is named when it has been slow in two looks, and when it no longer is, and not in between.
"""

from collections.abc import Iterator, Sequence
from statistics import median

_SHARE = 0.05  # of a step: a phase that takes less more than others do is not worth a word
_KNOWN = 3  # looks at a rank that it is held against, where it has no peers
_MOST = 20  # of them


class SlowRanks:
    """`stages`: of every rank, which others do the same work; `places`: where it stands in the layout."""

    def __init__(self, factor: float, stages: Sequence[int], places: Sequence[str], phases: Sequence[str]):
        self.factor, self.stages, self.places, self.phases = factor, stages, places, phases
        self.suspect: dict[
            tuple[int, str], int
        ] = {}  # rank and phase -> the step of the first look at which it was slow
        self.slow: dict[tuple[int, str], int] = {}  # the same, of those that have been named
        self.before: dict[tuple[int, str], list[float]] = {}

    def look(self, step: int, table: Sequence[Sequence[float]]) -> list[str]:
        """What has changed. A row a rank: seconds of each phase, and of a step."""
        return [sentence for rank in range(len(table)) for sentence in self._rank(step, rank, table)]

    def _rank(self, step: int, rank: int, table: Sequence[Sequence[float]]) -> Iterator[str]:
        peers = [peer for peer, stage in enumerate(self.stages) if stage == self.stages[rank] and peer != rank]
        whole = median(row[-1] for row in table)
        for number, phase in enumerate(self.phases):
            own, key = table[rank][number], (rank, phase)
            known = [table[peer][number] for peer in peers] or self.before.setdefault(key, [])
            usual = median(known) if len(known) >= (1 if peers else _KNOWN) else 0.0
            share = _SHARE * (usual if phase == "matmul" else whole)
            times = own / usual if usual > 0 else 1.0
            late = times > self.factor and own - usual > share
            first = self.suspect.pop(key, None)
            if late and key not in self.slow and first is None:
                self.suspect[key] = step
            elif late and key not in self.slow and first is not None:
                self.slow[key] = first
                than = f"the median of {_others(peers)}" if peers else "what it took before"
                yield (
                    f"step {step}: {self._name(rank)} is slow in {phase}, {times:.1f}x {than} ({own * 1e3:.3g} ms "
                    f"against {usual * 1e3:.3g})"
                )
            elif key in self.slow and times < (1 + self.factor) / 2:
                since = self.slow.pop(key)
                yield f"step {step}: {self._name(rank)} is no longer slow in {phase}, as it was from step {since} on"
            if not peers and not late and key not in self.slow and own > 0:
                self.before[key] = [*self.before[key], own][-_MOST:]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.places[rank]})" if self.places[rank] else f"rank {rank}"


def _others(peers: list[int]) -> str:
    if len(peers) > 4:
        return f"the {len(peers)} other ranks of its stage"
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
