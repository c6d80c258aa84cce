"""`draw` and `compare`: schedules proven, timed and drawn, as results for the terminal, scripts and notebooks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fivefold.report import Block, Drawing, Result, Table, Text
from fivefold.report.show import check_writable
from fivefold.schedule.actions import SENDS
from fivefold.schedule.builders.interleaved import legal_groups
from fivefold.schedule.catalogue import CATALOGUE
from fivefold.schedule.check import prove
from fivefold.schedule.compare import Query
from fivefold.schedule.draw import PICTURES, legend_text, picture, save_picture, timeline, to_svg
from fivefold.schedule.files import SUFFIXES, save
from fivefold.schedule.published import PUBLISHED, reproduce
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.schedule.times import Times, parse_slow
from fivefold.schedule.wording import figure
from fivefold.support.errors import UserError
from fivefold.support.formatting import bytes_text

Sends = Literal["eager", "blocking"]


@dataclass(frozen=True)
class DrawResult(Result):
    """Schedules on a clock: `simulations` has the timeline, the bubble and the memory of each."""

    simulations: tuple[Simulation, ...]

    def blocks(self) -> Iterator[Block]:
        for simulation in self.simulations:
            schedule = simulation.schedule
            yield Text(f"{schedule.name}  p={schedule.p} m={schedule.m}  {_summary(simulation)}", "bold")
            yield Drawing(partial(timeline, simulation))
        yield Drawing(lambda _, colour: legend_text(self.simulations, colour))

    def to_dict(self) -> dict[str, Any]:
        rows = [_figures(simulation) | _details(simulation) for simulation in self.simulations]
        return rows[0] if len(rows) == 1 else {"schedules": rows}

    def svg(self) -> str:
        return to_svg(picture(self.simulations))

    def save(self, path: Path) -> Iterator[Block]:
        """Write the picture (.svg, .png) or the one schedule (.txt, .json); and what there is to say about that."""
        if path.suffix.lower() in PICTURES:
            save_picture(self.simulations, path)
        else:
            save(self.simulations[0].schedule, path)
        for simulation in self.simulations:
            yield Text(f"{simulation.schedule.name}: {_summary(simulation)}")
        yield Text(f"written to {path}")


def draw(
    *schedules: str | Path | Schedule,
    pp: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group: int | None = None,
    memory: int | None = None,
    times: str | Times = "",
    slow: str | Mapping[int, float] = "",
    sends: Sends = "eager",
    overlap: bool = True,
) -> DrawResult:
    """Draw schedules: which rank computes what when, where the bubbles are, and what each rank holds.

        draw("zb-v", pp=4, microbatches=8)
        draw("1f1b", "zb-h1", pp=4, microbatches=8, slow={1: 1.5})    # compared on one time scale

    A schedule is a name, a file or an object, and is proven before it is drawn. `times` are durations of a whole rank,
    like "f=1,i=1,w=1,comm=0.1"; `slow` says how many times as long a rank takes.
    """
    if not schedules:
        raise UserError("there is no schedule to draw; give a name, for example '1f1b', a file or a Schedule")
    names = tuple(str(one) for one in schedules if not isinstance(one, Schedule))
    query = Query(names, pp, microbatches, chunks, group, memory, _times(times, slow, sends, overlap))
    return DrawResult(
        tuple(
            simulate(prove(one), query.times.costs(one.placement))
            if isinstance(one, Schedule)
            else query.simulate(str(one))
            for one in schedules
        )
    )


def schedule(name: str | Path, pp: int | None = None, microbatches: int | None = None, **options: Any) -> Schedule:
    """A schedule of the catalogue for `pp` ranks, or the one in a file, proven; `options` are those of `draw`."""
    return draw(name, pp=pp, microbatches=microbatches, **options).simulations[0].schedule


def check_output(path: Path | None, schedules: int) -> None:
    """Refuse a file that `DrawResult.save` cannot write, before minutes are spent on its content."""
    if path is None:
        return
    suffix = path.suffix.lower()
    if suffix not in (*PICTURES, *SUFFIXES):
        raise UserError(f"{path} should end in {', '.join(PICTURES)} for a picture, {', '.join(SUFFIXES)} for data")
    if suffix in SUFFIXES and schedules > 1:
        raise UserError(f"{path} can hold one schedule, and {schedules} are given; write them one by one")
    check_writable(path)


# ---- all of them compared ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompareResult(Result):
    """Every schedule of the catalogue for the same numbers: its simulation, or why it is refused."""

    query: Query
    results: Mapping[str, Simulation | UserError]

    @property
    def group(self) -> int | None:
        """Interleaved's N."""
        p, m = self.query.pp or 0, self.query.microbatches or 0
        return self.query.group or next(iter(legal_groups(p, m)), None)

    def blocks(self) -> Iterator[Block]:
        query, n = self.query, self.group
        yield Text(f"p={query.pp}, m={query.microbatches}{f', N={n}' if n else ''}, {query.times}")
        sent = (
            "bytes that a rank sends per step" if "bytes" in query.times.values else "messages per rank and microbatch"
        )
        yield Text(f"bubble: of the makespan; peak: in A; sends: {sent}\n")
        heads = ["schedule", ">v", ">makespan", ">bubble", ">of span", ">peak A", ">sends", "~bubble by formula"]
        found = {name: one for name, one in self.results.items() if isinstance(one, Simulation)}
        yield Table(heads, [[name, *_cells(one), CATALOGUE[name].bubble] for name, one in found.items()])
        yield Text("")
        for name in found:
            if needs := CATALOGUE[name].needs:
                yield Text(f"{name} needs {needs}")
        refused: dict[str, list[str]] = {}  # why -> who; the same reason is given once
        for name, one in self.results.items():
            if isinstance(one, UserError):
                refused.setdefault(str(one), []).append(name)
        for reason, names in refused.items():
            yield Text(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused: {reason}")

    def to_dict(self) -> dict[str, Any]:
        rows = [
            (_figures(one) if isinstance(one, Simulation) else {"schedule": name, "refused": str(one)})
            | {"needs": CATALOGUE[name].needs}
            for name, one in self.results.items()
        ]
        asked = {"pp": self.query.pp, "microbatches": self.query.microbatches, "group": self.group}
        return asked | {"times": str(self.query.times), "schedules": rows}


def compare(
    pp: int = 4,
    microbatches: int = 8,
    *,
    chunks: int | None = None,
    group: int | None = None,
    memory: int | None = None,
    times: str | Times = "",
    slow: str | Mapping[int, float] = "",
    sends: Sends = "eager",
    overlap: bool = True,
) -> CompareResult:
    """Compare all schedules: bubble, memory, messages, and what each one needs. Arguments are those of `draw`."""
    durations = _times(times, slow, sends, overlap)
    query = Query(tuple(CATALOGUE), pp, microbatches, chunks, group, memory, durations)
    return CompareResult(query, query.compare())


@dataclass(frozen=True)
class PublishedResult(Result):
    """The bubble rates that the zero-bubble paper publishes, beside ours for the same durations."""

    def blocks(self) -> Iterator[Block]:
        rows = [
            [row.model, str(row.p), str(row.m), name, f"{rate:.4f}", f"{ours[name]:.4f}"]
            for row in PUBLISHED
            for ours in [reproduce(row)]
            for name, rate in row.rates.items()
        ]
        yield Table(["model", ">p", ">m", "schedule", ">published", ">ours"], rows)

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"model": row.model, "published": row.rates, "ours": reproduce(row)} for row in PUBLISHED]


# ---- figures -----------------------------------------------------------------------------------------------------


def _times(times: str | Times, slow: str | Mapping[int, float], sends: Sends, overlap: bool) -> Times:
    if isinstance(times, Times):
        return times
    return Times(Times.parse(times).values, parse_slow(slow) if isinstance(slow, str) else slow, sends, overlap)


def _summary(simulation: Simulation) -> str:
    return (
        f"makespan {figure(simulation.makespan)}, bubble {simulation.bubble_makespan:.2%} of the makespan and "
        f"{simulation.bubble_span:.2%} of the span, peak {max(simulation.peak_activations):.4g} A"
    )


def _figures(simulation: Simulation) -> dict[str, Any]:
    """The numbers of one schedule. Bubbles are fractions of what they are measured over; peaks are per rank, in A."""
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "pp": schedule.p,
        "microbatches": schedule.m,
        "chunks": schedule.placement.chunks,
        "makespan": simulation.makespan,
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "peak_activations": simulation.peak_activations,
        "messages": schedule.count(*SENDS),
        "bytes_sent": schedule.count(*SENDS) * simulation.costs.link.message,
        "buffers": schedule.buffers,
    }


def _details(simulation: Simulation) -> dict[str, Any]:
    """Where the time of each rank goes, and the whole timeline as [action, start, end]."""
    ranks = [{"busy": rank.busy, "wait": rank.wait, "idle": rank.idle} for rank in simulation.ranks]
    timeline = [[[str(action), start, end] for action, start, end in spans] for spans in simulation.timeline]
    return {"ranks": ranks, "timeline": timeline}


def _cells(simulation: Simulation) -> Iterator[str]:
    schedule, size = simulation.schedule, simulation.costs.link.message
    per_rank = schedule.count(*SENDS) / schedule.p
    yield str(schedule.placement.chunks)
    yield figure(simulation.makespan)
    yield f"{simulation.bubble_makespan:.2%}"
    yield f"{simulation.bubble_span:.2%}"
    yield f"{max(simulation.peak_activations):.4g}"
    yield bytes_text(per_rank * size) if size else f"{per_rank / schedule.m:.3g}"
