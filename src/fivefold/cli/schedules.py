"""`fivefold draw` and `fivefold schedules`: pipeline schedules, drawn and compared."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.report import show
from fivefold.report.terminal import console_of, render
from fivefold.support.errors import UserError

DRAW = "Draw a pipeline schedule.  [dim]fivefold draw zb-v --pp 4 --microbatches 8[/]"
SCHEDULES = "Compare all schedules: bubble, memory, messages.  [dim]fivefold schedules --pp 8 --microbatches 32[/]"

Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Ranks = Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p).")]
Chunks = Annotated[int | None, typer.Option(help="Stages per rank (v), for interleaved and bfs.")]
Group = Annotated[int | None, typer.Option(help="Group size (N), for interleaved; default: the smallest that works.")]
Memory = Annotated[int | None, typer.Option(help="Most live activations per rank, for auto; default: p.")]
TimesText = Annotated[str, typer.Option("--times", help="Durations of a whole rank, like f=1,i=1,w=1,comm=0.1.")]
Slow = Annotated[str, typer.Option(help="Slower ranks, as RANK=FACTOR: 1=1.5,3=2.")]
Sends = Annotated[
    Literal["eager", "blocking"], typer.Option(help="Whether a sender goes on while its message travels.")
]
Overlap = Annotated[bool, typer.Option(help="Whether messages travel while the receiver computes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
    """Draw a schedule: which rank computes what when, where the bubbles are, what each rank holds.

    A schedule is proven before it is drawn: complete, in order, free of deadlock, within its memory.

    [dim]Examples:[/]

      fivefold draw zb-v --pp 4 --microbatches 8

      fivefold draw zb-v --pp 4 --microbatches 8 --times f=1,i=1,w=1,comm=0.1 -o zb-v.svg

      fivefold draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o compare.png

      fivefold draw my-schedule.txt
    """
    from fivefold.schedule.result import check_output, draw

    check_output(output, len(schedule))
    result = draw(*schedule, pp=pp, microbatches=microbatches, chunks=chunks, group=group, memory=memory, times=times,
                  slow=slow, sends=sends, overlap=overlap)  # fmt: skip
    said = None if output is None else list(result.save(output))
    if as_json or said is None:
        show(result, as_json)
    else:
        render(said, console_of(), None)


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
    from fivefold.schedule.result import PublishedResult, compare

    if published:
        numbers = (pp, microbatches, chunks, group, memory)
        if any(number is not None for number in numbers) or times or slow or sends != "eager" or not overlap:
            raise UserError("--published prints the paper's own cases; leave out the options that describe another one")
        show(PublishedResult(), as_json)
        return
    p, m = 4 if pp is None else pp, 8 if microbatches is None else microbatches
    show(compare(p, m, chunks=chunks, group=group, memory=memory, times=times, slow=slow, sends=sends,
                 overlap=overlap), as_json)  # fmt: skip
