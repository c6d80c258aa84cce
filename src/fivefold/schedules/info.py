"""What is known of a schedule before it is built: its facts, and the numbers that it is built for.

The facts of a schedule are a `ScheduleInfo`, declared beside its builder and listed in `registry`. Layouts, the planner
and the trainer ask this record, never the name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from fivefold.schedules.costs import Costs
from fivefold.schedules.schedule import Placement, Schedule


@dataclass(frozen=True)
class ScheduleRequest:
    """The numbers that a schedule is built for. `chunks` are stages per rank, None for the schedule's own; `group` is
    the N of interleaved, and only `auto` reads `costs` and `memory`."""

    p: int
    m: int
    chunks: int | None = None
    group: int | None = None
    costs: Costs | None = None
    memory: int | None = None

    @property
    def v(self) -> int:
        """The chunks, as builders get them."""
        assert self.chunks is not None
        return self.chunks


def vee(p: int, chunks: int) -> Placement:
    """`Placement.vee` with the arguments of `ScheduleInfo.place`; a V always has two chunks."""
    return Placement.vee(p)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: a quick key for caches
class ScheduleInfo:
    """The facts of one schedule, of the catalogue or of a file (`registry.record_of`)."""

    name: str
    build: Callable[[ScheduleRequest], Schedule]
    place: Callable[[int, int], Placement] = Placement.looped  # called with p and chunks
    chunks: int = 1  # stages per rank: exactly so many, or with `any_chunks` the default
    any_chunks: bool = False
    splits: bool = False  # computes weight gradients (W) apart from input gradients (I)
    group: Callable[[int, int], int] | None = None  # called with p and m: microbatches that go round in one go; else p
    least: int = 0  # the fewest microbatches that it needs, in multiples of p
    also: str = ""  # what else it needs, in words
    options: tuple[str, ...] = ()  # of `group` and `memory`, those that it takes
    uses_stage_times: bool = False  # built from the durations of the actual stages: fewer microbatches predict nothing
    bubble: str = ""  # its formula, in units of a whole rank's times
    schedule: Schedule | None = None  # as a file has it, for its own p and m alone

    # For the planner's closed forms, with stages, sends and a head as models have them.
    fill: float = 1.0  # how much of 1F1B's warm-up and cool-down bubble it leaves
    waits: bool = False  # with few microbatches its weight gradients fill nothing: p + m forward and input passes
    joins: bool = False  # overlaps nearly every F with a B (F&B, as DualPipe), from the p-th microbatch on
    refills: bool = False  # fills the pipeline again for every microbatch
    live: Callable[[Any, Any, int], Any] = lambda p, m, v: p  # activations of a rank, in A, at most m; also of arrays
    planned: tuple[int, ...] = ()  # the chunks with which the planner tries it; none: it does not

    @property
    def needs(self) -> str:
        """What it requires of p and m, in words; empty when any will do."""
        least = {0: "", 1: "m >= p"}.get(self.least, f"m >= {self.least}p")
        return "; ".join(filter(None, (least, self.also)))

    @property
    def repeats(self) -> bool:
        """Whether more microbatches only repeat the steady state, so that a short step predicts a long one."""
        return not self.uses_stage_times and self.schedule is None

    def period(self, p: int, m: int) -> int:
        """After how many microbatches the steady state begins again, at most."""
        return p if self.group is None else self.group(p, m)

    @cached_property
    def bent(self) -> bool:
        """Whether the first of several ranks also has the last stage: stages in a V."""
        ranks = self.schedule.p if self.schedule else 2
        return ranks > 1 and self.place(ranks, self.chunks).owner[-1] == 0

    def takes(self, option: str) -> bool:
        """Whether `chunks`, `group` or `memory` makes a difference to it."""
        return self.any_chunks if option == "chunks" else option in self.options

    def placement(self, p: int, chunks: int = 0) -> Placement:
        """The rank of each of its stages."""
        return _placement(self, p, chunks or self.chunks)


@lru_cache(maxsize=1024)  # the planner asks for each layout, many times
def _placement(record: ScheduleInfo, p: int, chunks: int) -> Placement:
    return record.place(p, chunks)


# Data parallelism's part of a step: gather parameters, reduce gradients, step the optimizer, each where it is due. A
# pipeline schedule ends with the last weight gradient; what follows depends on how the data-parallel group shares
# parameters, gradients and optimizer state (ZeRO stages 0 to 2; stage 3 gathers inside blocks, not between actions).
