"""One harness for all benchmarks: systems take turns, so that all of them meet the same noise.

    list(turns(("A", "B"), rounds=2))                          # [(0, "A"), (0, "B"), (1, "B"), (1, "A")]
    Times({"A": [1.0, 2.0], "B": [2.0, 4.0]}).ratio("A", "B")  # 0.5: the median of each round's own ratio

A benchmark has a case (what it measures, on how many ranks), its systems and its result. `bench.rank` is the half of
the harness that runs on ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

OURS = "fivefold"
HUGGING_FACE = "Hugging Face"
Told = Callable[[str], None]  # hears what is measured next


class Times(dict[str, list[float]]):
    """Seconds of every round by system, in the order in which they were taken."""

    def median(self, system: str) -> float:
        return median(self[system])

    def ratio(self, system: str, base: str) -> float:
        return ratio(self[system], self[base])

    @property
    def spread(self) -> float:
        """The slowest round divided by the fastest, of the system in which they lie farthest apart."""
        return max(max(seconds) / min(seconds) for seconds in self.values())


def ratio(ours: Iterable[float], others: Iterable[float]) -> float:
    """The median of each round's own ratio: both sides of it have met the same noise."""
    return median(mine / other for mine, other in zip(ours, others, strict=True))


def turns(systems: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, system), forwards in one round and backwards in the next: drift favours no place in the order."""
    order = list(systems)
    for number in range(rounds):
        for system in order[:: -1 if number % 2 else 1]:
            yield number, system


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran."""

    cores: int
    torch: str  # version
    name: str


def refuse(problems: Sequence[str]) -> None:
    """Raise all problems at once, before any process starts."""
    if problems:
        raise UserError(problems)


def too_small(**options: int) -> list[str]:
    return [f"--{name} {value} must be at least 1" for name, value in options.items() if value < 1]


def choices(text: str, option: str, known: Sequence[str]) -> list[str]:
    """The words of a list with commas, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise UserError(f"{option} names nothing; leave it out for the default")
    if unknown := [word for word in found if word not in known]:
        raise UserError(f"{option} {unknown[0]} is not a choice; {did_you_mean(unknown[0], known)}")
    return found
