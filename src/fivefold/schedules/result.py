"""`draw` and `compare`: schedules proven, timed and drawn, as results for the terminal, scripts and notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fivefold.render import paint
from fivefold.render.blocks import Block, Drawing, Result, Svg, Table, Text, check_writable
from fivefold.render.paint import PICTURE_SUFFIXES
from fivefold.render.scene import Scene
from fivefold.schedules.actions import SEND_KINDS
from fivefold.schedules.check import prove
from fivefold.schedules.classic import legal_groups
from fivefold.schedules.costs import Costs, Durations, MessageLink, parse_slow
from fivefold.schedules.draw import picture
from fivefold.schedules.registry import CATALOGUE, MAX_SIZE, build, is_file, record_of, size_problem
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.schedules.simulate import Simulation, simulate
from fivefold.schedules.terminal import legend, timeline
from fivefold.schedules.text import FILE_SUFFIXES, save
from fivefold.support.errors import UserError
from fivefold.support.ranges import check_range, within
from fivefold.support.text import bytes_text, figure

Sends = Literal["eager", "blocking"]
SCHEDULE_OPTIONS = ("chunks", "group", "memory")


@dataclass(frozen=True)
class Query:
    """Schedules by name or file, and the numbers to build them for.

    `chunks`, `group` and `memory` go to the schedules that take them, so that several can be compared in one command.
    An option that none of them takes goes to all of them, so that it is refused.
    """

    names: Sequence[str]
    pp: int | None
    microbatches: int | None
    chunks: int | None = None
    group: int | None = None
    memory: int | None = None
    times: Durations = field(default_factory=Durations)

    def __post_init__(self) -> None:
        for option in ("pp", "microbatches", *SCHEDULE_OPTIONS):
            check_range(option, getattr(self, option), within(1, MAX_SIZE))

    def simulate(self, schedule: str | Path | Schedule) -> Simulation:
        """Proves a schedule, which is a name of the catalogue, a file or an object, and runs it on the clock."""
        if isinstance(schedule, Schedule):
            schedule = prove(schedule)
        else:
            schedule = self.load(str(schedule)) if is_file(str(schedule)) else self.build(str(schedule))
        return simulate(schedule, self.times.costs(schedule.placement))

    def compare(self) -> dict[str, Simulation | UserError]:
        """Each schedule's simulation, or why it is refused. Raises UserError where all of them are refused."""
        results: dict[str, Simulation | UserError] = {}
        for name in self.names:
            try:
                results[name] = self.simulate(name)
            except UserError as refusal:
                results[name] = refusal
        refusals = [result for result in results.values() if isinstance(result, UserError)]
        if len(refusals) == len(results):
            raise UserError(dict.fromkeys(problem for refusal in refusals for problem in refusal.coded))
        return results

    def build(self, name: str) -> Schedule:
        record = record_of(name)
        if self.pp is None or self.microbatches is None:
            needed = {"--pp": self.pp, "--microbatches": self.microbatches}
            missing = " and ".join(option for option, value in needed.items() if value is None)
            raise UserError(f"{name} needs {missing}, as in --pp 4 --microbatches 8", "option.missing")
        options = {option: n for option, n in self.options().items() if record.takes(option)} | self.unused_options()
        if problem := size_problem(self.pp * options.get("chunks", record.chunks), self.microbatches):
            raise UserError(problem)
        if not record.uses_stage_times:
            return _build_and_prove(name, self.pp, self.microbatches, tuple(options.items()))
        costs = self.times.costs(record.placement(self.pp, options.get("chunks", 0)))
        return prove(build(name, self.pp, self.microbatches, costs=costs, **options))

    def load(self, name: str) -> Schedule:
        """The schedule in a file, which `record_of` has proven; the query must not ask for another one."""
        schedule = record_of(name).schedule
        assert schedule is not None
        for option, asked, actual in (
            ("--pp", self.pp, schedule.p),
            ("--microbatches", self.microbatches, schedule.m),
        ):
            if asked not in (None, actual):
                raise UserError(
                    f"{option} is {asked}, and {name} is a schedule for {actual}; leave the option out",
                    "option.conflict",
                )
        for option in self.unused_options():
            raise UserError(
                f"{name} is a schedule as it stands, and --{option} cannot change it; leave the option out",
                "option.conflict",
            )
        return schedule

    def options(self) -> dict[str, int]:
        """Those of chunks, group and memory that are set."""
        values = {option: getattr(self, option) for option in SCHEDULE_OPTIONS}
        return {option: value for option, value in values.items() if value is not None}

    def unused_options(self) -> dict[str, int]:
        """The options that are set and that none of the schedules takes."""
        records = [CATALOGUE[name] for name in self.names if name in CATALOGUE]
        return {
            option: n for option, n in self.options().items() if not any(record.takes(option) for record in records)
        }


@lru_cache(maxsize=32)  # a query that changes only durations builds the same schedule; proving takes most of the time
def _build_and_prove(name: str, p: int, m: int, option_items: tuple[tuple[str, int], ...]) -> Schedule:
    options: dict[str, Any] = dict(option_items)
    return prove(build(name, p, m, **options))


# ---- draw --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawResult(Result):
    """Schedules on a clock: `simulations` has the timeline, the bubble and the memory of each."""

    simulations: tuple[Simulation, ...]
    query: Query | None = None  # None: made from simulations

    def blocks(self) -> Iterator[Block]:
        for simulation in self.simulations:
            schedule = simulation.schedule
            yield Text(f"{schedule.name}  p={schedule.p} m={schedule.m}  {_summary(simulation)}", "bold")
            yield Drawing(partial(timeline, simulation))
        yield Drawing(lambda _, colour: legend(self.simulations, colour=colour))

    def to_dict(self) -> dict[str, Any]:
        rows = [figures_of(simulation) | _details(simulation) for simulation in self.simulations]
        return rows[0] if len(rows) == 1 else {"schedules": rows}

    def scene(self) -> Scene:
        return picture(self.simulations)

    def svg(self, *, dark: bool = False) -> Svg:
        return Svg(paint.to_svg(self.scene(), dark=dark))

    def save(self, path: Path) -> Iterator[Block]:
        """Write the picture (.svg, .png) or the one schedule (.txt, .json); yields the lines to print about it."""
        if path.suffix.lower() in PICTURE_SUFFIXES:
            paint.save(self.scene(), path)
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
    times: str | Durations = "",
    slow: str | Mapping[int, float] = "",
    sends: Sends = "eager",
    overlap: bool = True,
) -> DrawResult:
    """Draw schedules: which rank computes what when, where the bubbles are, and what each rank holds.

        >>> picture = ff.draw("zb-v", pp=4, microbatches=8)
        >>> picture = ff.draw("1f1b", "zb-h1", pp=4, microbatches=8, slow={1: 1.5})  # compared on one time scale
        >>> [simulation.schedule.name for simulation in picture.simulations]
        ['1f1b', 'zb-h1']

    Each of `schedules` is a name, a file or an object, and is proven before it is drawn: for `pp` ranks and so many
    `microbatches`, with `chunks` stages a rank, in groups of `group` (interleaved), or within a `memory` of so many
    live activations (auto). `times` are durations of a whole rank, like "f=1,i=1,w=1,comm=0.1"; `slow` says how many
    times as long a rank takes, `sends` whether a sender goes on while its message travels, and `overlap` whether it
    travels while the receiver computes.
    """
    if not schedules:
        raise UserError(
            "there is no schedule to draw; give a name, for example '1f1b', a file or a Schedule", "option.missing"
        )
    names = tuple(str(schedule) for schedule in schedules if not isinstance(schedule, Schedule))
    query = Query(names, pp, microbatches, chunks, group, memory, _times(times, slow, sends, overlap))
    return DrawResult(tuple(map(query.simulate, schedules)), query)


def schedule(name: str | Path, pp: int | None = None, microbatches: int | None = None, **options: Any) -> Schedule:
    """The schedule of a `name` for `pp` ranks and so many `microbatches`, or the one in a file, proven; `options` are
    those of `draw`.

    >>> ff.schedule("zb-v", pp=4, microbatches=8).microbatches
    8
    """
    return draw(name, pp=pp, microbatches=microbatches, **options).simulations[0].schedule


def check_output(path: Path | None, schedules: int) -> None:
    """Refuse a file that can be neither picture nor schedule, before minutes are spent on its content."""
    if path is None:
        return
    suffix = path.suffix.lower()
    if suffix not in (*PICTURE_SUFFIXES, *FILE_SUFFIXES):
        page = f"; the page is --html {path}" if suffix in (".html", ".htm") else ""
        raise UserError(
            f"{path} should end in {', '.join(PICTURE_SUFFIXES)} for a picture, "
            f"{', '.join(FILE_SUFFIXES)} for data{page}",
            "output.kind",
        )
    if suffix in FILE_SUFFIXES and schedules > 1:
        raise UserError(
            f"{path} can hold one schedule, and {schedules} are given; write them one by one", "output.kind"
        )
    check_writable(path)


# ---- compare -----------------------------------------------------------------------------------------------------


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
        by_size = "bytes" in query.times.values
        sends = "bytes that a rank sends per step" if by_size else "messages per rank and microbatch"
        yield Text(f"bubble: of the makespan; peak: in A; sends: {sends}\n")
        heads = ["schedule", ">v", ">makespan", ">bubble", ">of span", ">peak A", ">sends", "~bubble by formula"]
        simulations = {name: result for name, result in self.results.items() if isinstance(result, Simulation)}
        yield Table(heads, [[name, *_cells(result), CATALOGUE[name].bubble] for name, result in simulations.items()])
        yield Text("")
        for name in simulations:
            if needs := CATALOGUE[name].needs:
                yield Text(f"{name} needs {needs}")
        names_by_reason: dict[str, list[str]] = {}  # the schedules that are refused; the same reason is given once
        for name, result in self.results.items():
            if isinstance(result, UserError):
                names_by_reason.setdefault(str(result), []).append(name)
        for reason, names in names_by_reason.items():
            yield Text(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused: {reason}")

    def to_dict(self) -> dict[str, Any]:
        rows = [
            (figures_of(result) if isinstance(result, Simulation) else {"schedule": name, "refused": str(result)})
            | {"needs": CATALOGUE[name].needs}
            for name, result in self.results.items()
        ]
        query = {"pp": self.query.pp, "microbatches": self.query.microbatches, "group": self.group}
        return query | {"times": str(self.query.times), "schedules": rows}


def compare(
    pp: int = 4,
    microbatches: int = 8,
    *,
    chunks: int | None = None,
    group: int | None = None,
    memory: int | None = None,
    times: str | Durations = "",
    slow: str | Mapping[int, float] = "",
    sends: Sends = "eager",
    overlap: bool = True,
) -> CompareResult:
    """Compare all schedules: bubble, memory, messages, and what each one needs. Arguments as in `draw`."""
    query = Query(tuple(CATALOGUE), pp, microbatches, chunks, group, memory, _times(times, slow, sends, overlap))
    return CompareResult(query, query.compare())


class PublishedPipeline(NamedTuple):
    """One model of the zero-bubble paper (Qi et al. 2023): its pipeline, its measured durations in milliseconds of one
    rank, and the bubble rate of each schedule, which is the bubble of the span."""

    model: str
    p: int
    m: int
    f: float
    i: float
    w: float
    comm: float
    rates: dict[str, float]


PUBLISHED = (
    PublishedPipeline("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    PublishedPipeline("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698}),
    PublishedPipeline(
        "14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672}
    ),
    PublishedPipeline(
        "28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}
    ),
)


def reproduce(row: PublishedPipeline) -> dict[str, float]:
    """The bubble rates that our schedules have on the paper's durations."""
    costs = Costs.even(Placement.single(row.p), row.f, row.i, row.w, link=MessageLink(latency=row.comm))
    return {name: simulate(build(name, row.p, row.m), costs).bubble_span for name in row.rates}


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


def _times(times: str | Durations, slow: str | Mapping[int, float], sends: Sends, overlap: bool) -> Durations:
    if isinstance(times, Durations):
        return times
    return Durations(Durations.parse(times).values, parse_slow(slow) if isinstance(slow, str) else slow, sends, overlap)


def _summary(simulation: Simulation) -> str:
    return (
        f"makespan {figure(simulation.makespan)}, bubble {simulation.bubble_makespan:.2%} of the makespan and "
        f"{simulation.bubble_span:.2%} of the span, peak {max(simulation.peak_activations):.4g} A"
    )


def figures_of(simulation: Simulation) -> dict[str, Any]:
    """The numbers of one schedule. Bubbles are fractions of the makespan or the span; peaks are per rank, in A."""
    schedule = simulation.schedule
    messages = schedule.count(*SEND_KINDS)
    return {
        "schedule": schedule.name,
        "pp": schedule.p,
        "microbatches": schedule.m,
        "chunks": schedule.placement.chunks,
        "makespan": simulation.makespan,
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "peak_activations": simulation.peak_activations,
        "messages": messages,
        "bytes_sent": messages * simulation.costs.link.message,
        "buffers": schedule.buffers,
    }


def _details(simulation: Simulation) -> dict[str, Any]:
    """Each rank's busy, waiting and idle time, and the whole timeline as [action, start, end]."""
    timeline = [[[str(action), start, end] for action, start, end in spans] for spans in simulation.timeline]
    return {"ranks": [rank._asdict() for rank in simulation.ranks], "timeline": timeline}


def _cells(simulation: Simulation) -> Iterator[str]:
    """The cells of a row of `compare`, from v to sends."""
    schedule, size = simulation.schedule, simulation.costs.link.message
    per_rank = schedule.count(*SEND_KINDS) / schedule.p
    yield str(schedule.placement.chunks)
    yield figure(simulation.makespan)
    yield f"{simulation.bubble_makespan:.2%}"
    yield f"{simulation.bubble_span:.2%}"
    yield f"{max(simulation.peak_activations):.4g}"
    yield bytes_text(per_rank * size) if size else f"{per_rank / schedule.m:.3g}"
