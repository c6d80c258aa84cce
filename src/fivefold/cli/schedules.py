"""`fivefold draw` and `fivefold schedules`: pipeline schedules, drawn and compared."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.render.blocks import console_of, render, show
from fivefold.support.errors import UserError

DRAW = "Draw a pipeline schedule, or the mesh.  [dim]fivefold draw zb-v --pp 4 --microbatches 8[/]"
SCHEDULES = "Compare all schedules: bubble, memory, messages.  [dim]fivefold schedules --pp 8 --microbatches 32[/]"

Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Ranks = Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p).")]
Chunks = Annotated[int | None, typer.Option(help="Stages per rank (v), for interleaved and bfs.")]
Group = Annotated[int | None, typer.Option(help="Group size (N), for interleaved; default: the smallest that works.")]
Memory = Annotated[int | None, typer.Option(help="Most live activations per rank, for auto; default: p.")]
TimesText = Annotated[
    str,
    typer.Option(
        "--times",
        help="Durations of a whole rank, like f=1,i=1,w=1,comm=0.1. ep=0.4: so much of f and of i are messages of "
        "experts, which joined pairs (F&B) hide; fb=2.5: how long a pair takes.",
    ),
]
Slow = Annotated[str, typer.Option(help="Slower ranks, as RANK=FACTOR: 1=1.5,3=2.")]
Sends = Annotated[
    Literal["eager", "blocking"], typer.Option(help="Whether a sender goes on while its message travels.")
]
Overlap = Annotated[bool, typer.Option(help="Whether messages travel while the receiver computes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="A picture: .svg, .png; a page: .html; the schedule: .txt, .json."),
]


def draw(
    schedule: Annotated[list[str], typer.Argument(help="Names of schedules, or files; several are compared; or mesh.")],
    pp: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    layout: Annotated[str, typer.Option(help="Of the mesh: dp=2,tp=4,pp=2.")] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="Of the mesh: 2x8xH100; default: nodes of eight.")
    ] = "",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule: which rank computes what when, where the bubbles are, what each rank holds.

    A schedule is proven before it is drawn: complete, in order, free of deadlock, within its memory.

    `draw mesh` draws a layout on a cluster instead: which rank of which node stands where on each axis, and
    over which links the axis communicates. A file that ends in .dark.svg or .dark.png is dark.

    [dim]Examples:[/]

      fivefold draw zb-v --pp 4 --microbatches 8

      fivefold draw zb-v --pp 4 --microbatches 8 --times f=1,i=1,w=1,comm=0.1 -o zb-v.svg

      fivefold draw dualpipe-v --pp 4 --microbatches 10 --times f=1,i=1,w=1,ep=0.4

      fivefold draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o compare.png

      fivefold draw zb-v --pp 4 --microbatches 8 -o zb-v.html

      fivefold draw my-schedule.txt

      fivefold draw mesh --layout dp=2,tp=4,pp=2 --cluster 2x8xH100 -o mesh.svg
    """
    from fivefold.schedules.result import check_output, draw

    if schedule == ["mesh"]:
        others = (pp, microbatches, chunks, group, memory, times or None, slow or None)
        if any(value is not None for value in others) or sends != "eager" or not overlap:
            raise UserError("the mesh is of a layout: give --layout and --cluster, and leave out what times a schedule")
        _draw_mesh(layout, cluster, output, as_json)
        return
    if layout or cluster:
        raise UserError(f"--layout and --cluster are for `draw mesh`; {schedule[0]} has --pp and --microbatches")
    check_output(output, len(schedule))
    result = draw(*schedule, pp=pp, microbatches=microbatches, chunks=chunks, group=group, memory=memory, times=times,
                  slow=slow, sends=sends, overlap=overlap)  # fmt: skip
    if output is not None and output.suffix.lower() == ".html":
        from fivefold.cli.report import write_report

        write_report(result, output, as_json)
        return
    said = None if output is None else list(result.save(output))
    if as_json or said is None:
        show(result, as_json)
    else:
        render(said, console_of(), None)


def _draw_mesh(layout: str, cluster: str, output: Path | None, as_json: bool) -> None:
    from fivefold.planner.pictures import mesh
    from fivefold.render.blocks import check_writable
    from fivefold.render.paint import PICTURES

    if not layout:
        raise UserError("the mesh is of a layout; give one, as in --layout dp=2,tp=4,pp=2")
    check_writable(output, *PICTURES)
    show(mesh(layout, cluster or None), as_json, output)


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
    from fivefold.schedules.result import PublishedResult, compare

    if published:
        numbers = (pp, microbatches, chunks, group, memory)
        if any(number is not None for number in numbers) or times or slow or sends != "eager" or not overlap:
            raise UserError("--published prints the paper's own cases; leave out the options that describe another one")
        show(PublishedResult(), as_json)
        return
    p, m = 4 if pp is None else pp, 8 if microbatches is None else microbatches
    show(compare(p, m, chunks=chunks, group=group, memory=memory, times=times, slow=slow, sends=sends,
                 overlap=overlap), as_json)  # fmt: skip
