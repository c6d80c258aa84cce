"""`fivefold draw` and `fivefold schedules`: pipeline schedules, drawn and compared."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from fivefold.report import show
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.schedule.compare import Wish
    from fivefold.schedule.simulate import Simulation

DRAW = "Draw a pipeline schedule.  [dim]fivefold draw zb-v --pp 4 --microbatches 8[/]"
SCHEDULES = "Compare all schedules: bubble, memory, messages.  [dim]fivefold schedules --pp 8 --microbatches 32[/]"

Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Ranks = Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p).")]
Chunks = Annotated[int | None, typer.Option(help="Stages per rank (v), for interleaved and bfs.")]
Group = Annotated[int | None, typer.Option(help="Group size (N), for interleaved; default: the smallest that works.")]
Memory = Annotated[int | None, typer.Option(help="Most live activations per rank, for auto; default: p.")]
TimesText = Annotated[str, typer.Option("--times", help="Durations of a whole rank, like f=1,i=1,w=1,comm=0.1.")]
Slow = Annotated[str, typer.Option(help="Slower ranks, as RANK=FACTOR: 1=1.5,3=2.")]
Sends = Annotated[Literal["eager", "blocking"], typer.Option(help="Whether a sender computes on.")]
Overlap = Annotated[bool, typer.Option(help="Whether messages travel while the receiver computes.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help=".svg, .png: the picture; .txt, .json: the schedule.")
]


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
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule: who computes what when, where the bubbles are, what each rank holds.

    Whatever is drawn is proven first: complete, in order, free of deadlock, within its memory.

    [dim]Examples:[/]

      fivefold draw zb-v --pp 4 --microbatches 8

      fivefold draw zb-v --pp 4 --microbatches 8 --times f=1,i=1,w=1,comm=0.1 -o zb-v.svg

      fivefold draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o compare.png

      fivefold draw my-schedule.txt
    """
    from fivefold.schedule.result import draw
    from fivefold.schedule.tables import summary

    if output is not None:
        _check_output(output, len(schedule))
    result = draw(*schedule, pp=pp, microbatches=microbatches, chunks=chunks, group=group, memory=memory, times=times,
                  slow=slow, sends=sends, overlap=overlap)  # fmt: skip
    if output is not None:
        _write(result.simulations, output)
    if as_json or output is None:
        show(result, as_json)
    else:
        for simulation in result.simulations:
            typer.echo(f"{simulation.schedule.name}: {summary(simulation)}")
        typer.echo(f"written to {output}")


def _wish(
    names: Iterable[str],
    pp: int | None,
    microbatches: int | None,
    chunks: int | None,
    group: int | None,
    memory: int | None,
    times: str,
    slow: str,
    sends: Literal["eager", "blocking"],
    overlap: bool,
) -> "Wish":
    from fivefold.schedule.compare import Wish
    from fivefold.schedule.times import Times, parse_slow

    durations = Times(Times.parse(times).values, parse_slow(slow), sends, overlap)
    return Wish(tuple(names), pp, microbatches, chunks, group, memory, durations)


def _check_output(path: Path, schedules: int) -> None:
    """Before minutes are spent on what could not be written."""
    from fivefold.schedule.draw import PICTURES
    from fivefold.schedule.files import SUFFIXES

    suffix = path.suffix.lower()
    if suffix not in (*PICTURES, *SUFFIXES):
        raise UserError(f"{path} should end in {', '.join(PICTURES)} for a picture, {', '.join(SUFFIXES)} for data")
    if suffix in SUFFIXES and schedules > 1:
        raise UserError(f"{path} can hold one schedule, and {schedules} are given; write them one by one")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}")


def _write(simulations: Sequence["Simulation"], path: Path) -> None:
    from fivefold.schedule.draw import PICTURES, save_picture
    from fivefold.schedule.files import save

    if path.suffix.lower() in PICTURES:
        save_picture(simulations, path)
    else:
        save(simulations[0].schedule, path)


def schedules(
    pp: Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p); default: 4.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m); default: 8.")
    ] = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    published: Annotated[bool, typer.Option("--published", help="The zero-bubble paper's rates, and ours.")] = False,
    as_json: Json = False,
) -> None:
    """Compare all schedules: bubble, memory, communication, and what each one needs.

    [dim]Examples:[/]

      fivefold schedules --pp 8 --microbatches 32 --times f=1,i=1,w=1,comm=0.1

      fivefold schedules --pp 8 --microbatches 32 --slow 3=1.5 --json

      fivefold schedules --published
    """
    from fivefold.schedule import CATALOGUE, tables
    from fivefold.schedule.builders.interleaved import legal_groups

    console = Console(highlight=False)
    if published:
        numbers = (pp, microbatches, chunks, group, memory)
        if any(number is not None for number in numbers) or times or slow or sends != "eager" or not overlap:
            raise UserError("--published prints the paper's own cases; leave out the options that describe another one")
        if as_json:
            typer.echo(json.dumps(tables.published_rows()))
        else:
            console.print(tables.published_table())
        return
    p, m = 4 if pp is None else pp, 8 if microbatches is None else microbatches
    wish = _wish(CATALOGUE, p, m, chunks, group, memory, times, slow, sends, overlap)
    results = wish.compare()
    n = group or next(iter(legal_groups(p, m)), None)
    if as_json:
        rows = tables.comparison_rows(results)
        asked = {"pp": p, "microbatches": m, "group": n, "times": str(wish.times)}
        typer.echo(json.dumps(asked | {"schedules": rows}))
        return
    table, notes = tables.comparison_table(results)
    console.print(f"p={p}, m={m}{f', N={n}' if n else ''}, {wish.times}")
    sent = "bytes that a rank sends per step" if "bytes" in wish.times.values else "messages per rank and microbatch"
    console.print(f"bubble: of the makespan; peak: in A; sends: {sent}\n", table)
    console.print("", *notes, sep="\n")
