"""What a schedule is like: one `Record` each, declared beside its builder and listed in `catalogue`.

Layouts, the planner and the trainer ask the record, never the name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fivefold.schedule.costs import Costs
from fivefold.schedule.schedule import Placement, Schedule


@dataclass(frozen=True)
class Request:
    """What a schedule is wanted for. `chunks` are stages per rank (v), `group` is interleaved's N, and only `auto`
    reads `costs` and `memory`."""

    p: int
    m: int
    chunks: int
    group: int | None = None
    costs: Costs | None = None
    memory: int | None = None


def vee(p: int, chunks: int) -> Placement:
    return Placement.vee(p)


@dataclass(frozen=True, eq=False)  # each is one of a kind, and a quick key for caches
class Record:
    """The facts of one schedule. A file is described by a record too (`catalogue.record_of`)."""

    name: str
    build: Callable[[Request], Schedule]
    place: Callable[[int, int], Placement] = Placement.looped  # of p and chunks
    chunks: int = 1  # stages per rank: exactly so many, or with `any_chunks` the default
    any_chunks: bool = False
    splits: bool = False  # computes weight gradients (W) apart from input gradients (I)
    least: int = 0  # microbatches that it cannot do without, times p
    also: str = ""  # what else it needs, in words
    options: tuple[str, ...] = ()  # of `group` and `memory`, those that it takes
    weighs: bool = False  # made for the durations of the stages at hand, so that no shorter one stands for a long one
    bubble: str = ""  # its formula, in times of a whole rank
    schedule: Schedule | None = None  # as a file has it, for its own p and m alone

    # For the planner's closed forms, with stages, sends and a head as models have them.
    fill: float = 1.0  # how much of 1F1B's fill it leaves
    waits: bool = False  # with few microbatches its weight gradients fill nothing: p + m forward and input passes
    joins: bool = False  # nearly every forward pass with a backward pass (F&B), from the p-th microbatch on
    refills: bool = False  # fills the pipeline again for every microbatch
    live: Callable[[Any, Any, int], Any] = lambda p, m, v: p  # activations of a rank, in A, at most m; also of arrays
    planned: tuple[int, ...] = ()  # the chunks with which the planner tries it; none: it does not

    @property
    def needs(self) -> str:
        """What it asks of the numbers; empty when any will do."""
        least = {0: "", 1: "m >= p"}.get(self.least, f"m >= {self.least}p")
        return "; ".join(filter(None, (least, self.also)))

    @property
    def repeats(self) -> bool:
        """Whether a long one only repeats what a shorter one does."""
        return not self.weighs and self.schedule is None

    def takes(self, option: str) -> bool:
        """Whether `chunks`, `group` or `memory` makes a difference to it."""
        return self.any_chunks if option == "chunks" else option in self.options

    def placement(self, p: int, chunks: int = 0) -> Placement:
        """Where its stages live."""
        return _placed(self, p, chunks or self.chunks)


@lru_cache(maxsize=1024)  # the planner asks for each layout, many times
def _placed(record: Record, p: int, chunks: int) -> Placement:
    return record.place(p, chunks)
