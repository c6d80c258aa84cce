"""Every schedule by name, with what it is good for; `build` makes one from numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.layout.layout import CHUNKED, LEAST, SCHEDULES
from fivefold.schedule.builders.auto import auto
from fivefold.schedule.builders.breadth_first import breadth_first
from fivefold.schedule.builders.dualpipe_v import dualpipe_v
from fivefold.schedule.builders.gpipe import gpipe
from fivefold.schedule.builders.interleaved import interleaved
from fivefold.schedule.builders.naive import naive
from fivefold.schedule.builders.one_f_one_b import one_f_one_b
from fivefold.schedule.builders.v_half_min import v_half, v_min
from fivefold.schedule.builders.zero_bubble import zb_h1, zb_h2
from fivefold.schedule.builders.zero_bubble_v import zb_v
from fivefold.schedule.costs import Costs
from fivefold.schedule.schedule import Placement, Schedule
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted, did_you_mean, either


@dataclass(frozen=True)
class Request:
    """What a schedule is wanted for. `chunks` are stages per rank (v), `group` is interleaved's N, and `auto` alone
    looks at `costs` and `memory`."""

    p: int
    m: int
    chunks: int
    group: int | None = None
    costs: Costs | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Entry:
    """A schedule of the catalogue; its name and its chunks are the layout's."""

    name: str
    build: Callable[[Request], Schedule]
    place: Callable[[int, int], Placement]  # of p and chunks
    bubble: str  # in times of a whole rank
    also: str = ""  # what it needs besides its least microbatches

    @property
    def needs(self) -> str:
        """What it asks of the numbers; empty when any will do."""
        least = {0: "", 1: "m >= p"}.get(times := LEAST.get(self.name, 0), f"m >= {times}p")
        return "; ".join(filter(None, (least, self.also)))

    @property
    def chunks(self) -> int:
        """Stages per rank: the number it has, or with `any_chunks` the number it starts from."""
        return SCHEDULES[self.name]

    @property
    def any_chunks(self) -> bool:
        return self.name in CHUNKED

    def takes(self, option: str) -> bool:
        """Whether `chunks`, `group` or `memory` makes a difference to it."""
        return {"chunks": self.any_chunks, "group": self.name == "interleaved", "memory": self.name == "auto"}[option]


def _single(p: int, chunks: int) -> Placement:
    return Placement.single(p)


def _vee(p: int, chunks: int) -> Placement:
    return Placement.vee(p)


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("naive", lambda r: naive(r.p, r.m), _single, "(p-1)/p of the time"),
        Entry("gpipe", lambda r: gpipe(r.p, r.m), _single, "(p-1)(F+B)"),
        Entry("1f1b", lambda r: one_f_one_b(r.p, r.m), _single, "(p-1)(F+B)"),
        Entry(
            "interleaved",
            lambda r: interleaved(r.p, r.m, r.chunks, r.group),
            Placement.looped,
            "(p-1)(F+B)/v",
            "p <= N <= m, and m % N is 0 or >= p",
        ),
        Entry(
            "bfs",
            lambda r: breadth_first(r.p, r.m, r.chunks),
            Placement.looped,
            "(p-1)(F+B)/v",
        ),
        Entry("zb-h1", lambda r: zb_h1(r.p, r.m), _single, "(p-1)(F+I-W)"),
        Entry("zb-h2", lambda r: zb_h2(r.p, r.m), _single, "span (p-1)(F+I-2W)"),
        Entry("zb-v", lambda r: zb_v(r.p, r.m), _vee, "span 0 if F=I=W"),
        Entry("v-half", lambda r: v_half(r.p, r.m), _vee, ""),
        Entry("v-min", lambda r: v_min(r.p, r.m), _vee, ""),
        Entry("dualpipe-v", lambda r: dualpipe_v(r.p, r.m), _vee, "(p-1)(F&B+B-3W)/2"),
        Entry("auto", lambda r: auto(r.p, r.m, r.costs, r.memory), _single, ""),
    )
}


def entry_of(name: str) -> Entry:
    """The schedule of that name, or the nearest one to suggest."""
    if name not in CATALOGUE:
        raise UserError(f"unknown schedule {name!r}; {did_you_mean(name, list(CATALOGUE))}")
    return CATALOGUE[name]


def placement(name: str, p: int, chunks: int | None = None) -> Placement:
    """Where the stages of a schedule live."""
    entry = entry_of(name)
    return entry.place(p, chunks or entry.chunks)


def build(
    name: str,
    p: int,
    m: int,
    *,
    chunks: int | None = None,
    group: int | None = None,
    costs: Costs | None = None,
    memory: int | None = None,
) -> Schedule:
    """A schedule by name for p ranks and m microbatches; what cannot be is refused with the reason."""
    entry = entry_of(name)
    problems = _problems(entry, p, m, chunks, group, memory)
    if problems:
        raise UserError(problems)
    return entry.build(Request(p, m, chunks or entry.chunks, group, costs, memory))


def _problems(entry: Entry, p: int, m: int, chunks: int | None, group: int | None, memory: int | None) -> list[str]:
    found = [
        f"{what} is {value}, and must be at least 1"
        for what, value in (("the number of ranks", p), ("the number of microbatches", m), ("chunks", chunks))
        if value is not None and value < 1
    ]
    if chunks is not None and chunks != entry.chunks and not entry.any_chunks:
        tunable = either([other.name for other in CATALOGUE.values() if other.any_chunks])
        found.append(
            f"{entry.name} has {counted(entry.chunks, 'chunk')} per rank, not {chunks}; leave it out, or use {tunable}"
        )
    if group is not None and not entry.takes("group"):
        found.append(f"{entry.name} has no group size N; leave it out, or use interleaved")
    if memory is not None and not entry.takes("memory"):
        found.append(f"{entry.name} takes no memory limit; leave it out, or use auto")
    return found
