"""Pipeline schedules on the command line: draw one, compare all, time the machinery.

fivefold draw zb-v --pp 4 --microbatches 8
fivefold draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o compare.svg
fivefold schedules --pp 8 --microbatches 32 --times f=1,i=1,w=1,comm=0.1
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.errors import UserError
from fivefold.schedule.actions import SENDS
from fivefold.schedule.benchmark import CASES, measure
from fivefold.schedule.catalogue import CATALOGUE, Entry, build, entry_of
from fivefold.schedule.check import prove
from fivefold.schedule.draw import PICTURES, legend, save_picture, to_terminal
from fivefold.schedule.files import load, save
from fivefold.schedule.published import PUBLISHED, reproduce
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.schedule.times import Times, parse_slow

SCHEDULE_FILES = (".txt", ".json")

Ranks = Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p).")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Chunks = Annotated[int | None, typer.Option("--chunks", help="Stages per rank (v), for interleaved and bfs.")]
Group = Annotated[int | None, typer.Option("--group", help="Interleaved's group size (N); by default the smallest.")]
Memory = Annotated[int | None, typer.Option("--memory", help="Most live activations per rank, for auto; default p.")]
TimesText = Annotated[str, typer.Option("--times", help="Durations of a whole rank: f=1,i=1,w=1,comm=0.1.")]
Slow = Annotated[str, typer.Option("--slow", help="Slower ranks, as RANK=FACTOR: 1=1.5,3=2.")]
Sends = Annotated[Literal["eager", "blocking"], typer.Option("--sends", help="Whether a sender computes on.")]
Overlap = Annotated[bool, typer.Option(help="Whether messages travel while the receiver computes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def draw(
    schedule: Annotated[list[str], typer.Argument(help="Names of schedules, or files to load; several are compared.")],
    pp: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=".svg or .png: the picture; .txt or .json: the schedule.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule: who computes what when, where the bubbles are, what each rank holds.

    Example: fivefold draw zb-v --pp 4 --microbatches 8 --times f=1,i=1,w=1,comm=0.1 -o zb-v.svg
    """
    durations = replace(Times.parse(times), slow=parse_slow(slow), sends=sends, overlap=overlap)
    simulations = []
    for name in schedule:
        if _is_file(name):
            built = _loaded(name, pp, microbatches)
        else:
            built = _built(name, pp, microbatches, chunks, group, memory, durations)
        simulations.append(simulate(built, durations.costs(built.placement)))
    if output is not None:
        _write(simulations, output)
    if as_json:
        figures = [_figures(simulation) | _details(simulation) for simulation in simulations]
        print(json.dumps(figures[0] if len(figures) == 1 else {"schedules": figures}))
    elif output is not None:
        for simulation in simulations:
            print(f"{simulation.schedule.name}: {_summary(simulation)}")
        print(f"written to {output}")
    else:
        _show(simulations)


def _is_file(name: str) -> bool:
    return name not in CATALOGUE and (Path(name).suffix in SCHEDULE_FILES or "/" in name or Path(name).is_file())


def _loaded(name: str, pp: int | None, microbatches: int | None) -> Schedule:
    schedule = load(Path(name))
    for option, given, held in (("--pp", pp, schedule.p), ("--microbatches", microbatches, schedule.m)):
        if given not in (None, held):
            raise UserError(f"{option} is {given}, and {name} is a schedule for {held}; leave the option out")
    return schedule


def _built(
    name: str,
    pp: int | None,
    microbatches: int | None,
    chunks: int | None,
    group: int | None,
    memory: int | None,
    times: Times,
) -> Schedule:
    entry = entry_of(name)
    missing = [option for option, value in (("--pp", pp), ("--microbatches", microbatches)) if value is None]
    if pp is None or microbatches is None:
        raise UserError(f"{name} needs {' and '.join(missing)}, as in --pp 4 --microbatches 8")
    if pp < 1:
        raise UserError(f"--pp is {pp}, and must be at least 1")
    # What belongs to one schedule only is given to that one, so that several can be compared in one command.
    mine = {
        "chunks": chunks if entry.any_chunks else None,
        "group": group if name == "interleaved" else None,
        "memory": memory if name == "auto" else None,
    }
    costs = times.costs(entry.place(pp, mine["chunks"] or entry.chunks))
    return prove(build(name, pp, microbatches, costs=costs, **mine))


def _write(simulations: list[Simulation], path: Path) -> None:
    if path.suffix in PICTURES:
        save_picture(simulations, path)
    elif path.suffix in SCHEDULE_FILES:
        if len(simulations) > 1:
            raise UserError(f"{path} can hold one schedule, and {len(simulations)} are given; draw them one by one")
        save(simulations[0].schedule, path)
    else:
        raise UserError(
            f"{path} should end in {', '.join(PICTURES)} for a picture, {', '.join(SCHEDULE_FILES)} for data"
        )


def _show(simulations: list[Simulation]) -> None:
    console = Console()
    colour = console.color_system is not None
    for simulation in simulations:
        schedule = simulation.schedule
        head = Text.assemble((schedule.name, "bold"), f"  p={schedule.p} m={schedule.m}  {_summary(simulation)}")
        console.print(head)
        console.print(to_terminal(simulation, console.width, colour), no_wrap=True, crop=True)
    console.print(legend(simulations, colour))


def _summary(simulation: Simulation) -> str:
    return (
        f"makespan {simulation.makespan:.6g}, bubble {simulation.bubble_makespan:.2%} of the makespan and "
        f"{simulation.bubble_span:.2%} of the span, peak {max(simulation.peak_activations):.4g} A"
    )


def _figures(simulation: Simulation) -> dict[str, Any]:
    """What both commands say about a schedule. Bubbles are fractions of what they are measured over."""
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
        "buffers": schedule.buffers,
    }


def _details(simulation: Simulation) -> dict[str, Any]:
    ranks = [{"busy": rank.busy, "wait": rank.wait, "idle": rank.idle} for rank in simulation.ranks]
    timeline = [[[str(action), start, end] for action, start, end in spans] for spans in simulation.timeline]
    return {"ranks": ranks, "timeline": timeline}


def schedules(
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks (p).")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")] = 8,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    published: Annotated[bool, typer.Option(help="Reproduce the zero-bubble paper's bubble rates instead.")] = False,
    as_json: Json = False,
) -> None:
    """Compare all schedules: bubble, memory, communication, and what each one needs.

    Example: fivefold schedules --pp 8 --microbatches 32 --times f=1,i=1,w=1,comm=0.1
    """
    if published:
        _show_published(as_json)
        return
    durations = replace(Times.parse(times), slow=parse_slow(slow), sends=sends, overlap=overlap)
    rows: dict[str, Simulation | str] = {}
    for name in CATALOGUE:
        try:
            built = _built(name, pp, microbatches, chunks, group, memory, durations)
            rows[name] = simulate(built, durations.costs(built.placement))
        except UserError as refusal:
            rows[name] = str(refusal)
    if as_json:
        print(json.dumps({"pp": pp, "microbatches": microbatches, "schedules": [_row(*row) for row in rows.items()]}))
    else:
        _show_table(pp, microbatches, rows)


def _row(name: str, result: Simulation | str) -> dict[str, Any]:
    needs = {"needs": CATALOGUE[name].needs}
    return {"schedule": name, "refused": result, **needs} if isinstance(result, str) else _figures(result) | needs


def _show_table(pp: int, microbatches: int, rows: dict[str, Simulation | str]) -> None:
    table = _table("schedule", "makespan", "bubble", "of span", "peak A", "messages", "bubble by formula")
    notes = []
    for name, result in rows.items():
        if isinstance(result, str):
            notes.append(f"{name} is refused: {result}")
        else:
            table.add_row(name, *_cells(result, CATALOGUE[name]))
            notes += [f"{name} needs {CATALOGUE[name].needs}"] if CATALOGUE[name].needs else []
    console = Console()
    console.print(f"p={pp}, m={microbatches}; bubble of the makespan, peak in A, messages per microbatch\n", table)
    console.print("", *notes, sep="\n", highlight=False)


def _cells(simulation: Simulation, entry: Entry) -> Iterable[str]:
    schedule = simulation.schedule
    yield f"{simulation.makespan:.6g}"
    yield f"{simulation.bubble_makespan:.2%}"
    yield f"{simulation.bubble_span:.2%}"
    yield f"{max(simulation.peak_activations):.4g}"
    yield f"{schedule.count(*SENDS) / schedule.m:g}"
    yield entry.bubble


def _show_published(as_json: bool) -> None:
    results = [(row, reproduce(row)) for row in PUBLISHED]
    if as_json:
        print(json.dumps([{"model": row.model, "published": row.rates, "ours": ours} for row, ours in results]))
        return
    table = _table("model", "p", "m", "schedule", "published", "ours")
    for row, ours in results:
        for name, rate in row.rates.items():
            table.add_row(row.model, str(row.p), str(row.m), name, f"{rate:.4f}", f"{ours[name]:.4f}")
    Console().print(table)


def bench_schedules(as_json: Json = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    Example: fivefold bench-schedules
    """
    timings = [measure(case) for case in CASES]
    if as_json:
        keys = ("compute_actions", "actions", "build", "check", "simulate", "total")
        print(json.dumps([t.case._asdict() | {key: getattr(t, key) for key in keys} for t in timings]))
        return
    table = _table("schedule", "p", "m", "v", "compute", "actions", "build", "check", "run", "total", "us")
    for timing in timings:
        name, p, m, v = timing.case
        counts = (p, m, v or 1, timing.compute_actions, timing.actions)
        seconds = (timing.build, timing.check, timing.simulate, timing.total)
        per_action = f"{1e6 * timing.total / timing.actions:.1f}"
        table.add_row(name, *map(str, counts), *(f"{value:.3f}" for value in seconds), per_action)
    Console().print("seconds to build, check and simulate; microseconds per action\n", table)


LEFT_ALIGNED = ("schedule", "model", "bubble by formula")


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right", no_wrap=True)
    return table
