"""`fivefold draw`: pipeline schedules, and the mesh of a layout."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.cli.completion import schedules
from fivefold.cli.options import DRAWABLE_SUFFIXES, Html, Json, write_page
from fivefold.render.blocks import Text, check_writable, console_of, render, show
from fivefold.support.errors import UserError

DRAW = "Draw a pipeline schedule, or the mesh.  [dim]fivefold draw zb-v --pp 4 --microbatches 8[/]"

Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
Ranks = Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p).")]
Chunks = Annotated[int | None, typer.Option(help="Stages per rank (v), for interleaved and bfs.")]
Group = Annotated[int | None, typer.Option(help="Group size (N), for interleaved; default: the smallest that works.")]
Memory = Annotated[int | None, typer.Option(help="Maximum live activations per rank, for auto; default: p.")]
TimesText = Annotated[
    str,
    typer.Option(
        "--times",
        help="Durations for a whole rank: f=1,i=1,w=1,comm=0.1. ep=0.4 is the part of f and of i spent on expert "
        "messages, which overlapped pairs (F&B) hide; fb=2.5 is how long a pair takes.",
    ),
]
Slow = Annotated[str, typer.Option(help="Slower ranks, as RANK=FACTOR: 1=1.5,3=2.")]
Sends = Annotated[
    Literal["eager", "blocking"], typer.Option(help="Whether a sender continues while its message is in flight.")
]
Overlap = Annotated[bool, typer.Option(help="Whether messages are in flight while the receiver computes.")]


_Cluster = Annotated[str, typer.Option("--cluster", "-c", help="For `draw mesh`: 2x8xH100; default: nodes of eight.")]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write a picture (.svg, .png) or the schedule (.txt, .json).")
]


def draw(
    schedule: Annotated[
        list[str],
        typer.Argument(help="Schedules by name or file, compared if several; or mesh.", autocompletion=schedules),
    ],
    pp: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    layout: Annotated[str, typer.Option(help="For `draw mesh`: dp=2,tp=4,pp=2.")] = "",
    cluster: _Cluster = "",
    output: _Output = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Draw a pipeline schedule: what each rank computes when, its bubbles, and the activations it holds.

    Before a schedule is drawn, it is proven complete, in order, free of deadlock, and within its memory.

    `draw mesh` draws a layout on a cluster instead: each rank's node and coordinates, and the links that
    each axis communicates over. Name the file .dark.svg or .dark.png for a dark background. --html also
    writes the schedules as a self-contained page of `fivefold ui`.

    [dim]Examples:[/]

      fivefold draw zb-v --pp 4 --microbatches 8

      fivefold draw zb-v --pp 4 --microbatches 8 --times f=1,i=1,w=1,comm=0.1 -o zb-v.svg

      fivefold draw dualpipe-v --pp 4 --microbatches 10 --times f=1,i=1,w=1,ep=0.4

      fivefold draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o compare.png

      fivefold draw zb-v --pp 4 --microbatches 8 --html zb-v.html

      fivefold draw my-schedule.txt

      fivefold draw mesh --layout dp=2,tp=4,pp=2 --cluster 2x8xH100 -o mesh.svg
    """
    from fivefold.schedules.result import check_output, draw

    if schedule == ["mesh"]:
        others = (pp, microbatches, chunks, group, memory, times or None, slow or None)
        timed = any(value is not None for value in others) or sends != "eager" or not overlap
        _draw_mesh(layout, cluster, output, html, as_json=as_json, timed=timed)
        return
    if layout or cluster:
        raise UserError(
            f"--layout and --cluster are for `draw mesh`; {schedule[0]} has --pp and --microbatches", "option.conflict"
        )
    check_output(output, len(schedule))
    result = draw(*schedule, pp=pp, microbatches=microbatches, chunks=chunks, group=group, memory=memory, times=times,
                  slow=slow, sends=sends, overlap=overlap)  # fmt: skip
    remarks = [] if output is None else list(result.save(output))
    remarks += [] if html is None else [Text(write_page(result, html))]
    if as_json or not remarks:
        show(result, as_json=as_json)
    else:
        render(remarks, console_of(), None)


def _draw_mesh(
    layout: str, cluster: str, output: Path | None, html: Path | None, *, as_json: bool, timed: bool
) -> None:
    from fivefold.planner.mesh_picture import mesh

    if timed:
        raise UserError(
            "`draw mesh` draws a layout: give --layout and --cluster, without options that time a schedule",
            "option.conflict",
        )
    if html is not None:
        raise UserError(
            f"--html {html} draws schedules; `fivefold plan --html` writes a page with the mesh of a plan",
            "option.conflict",
        )
    if not layout:
        raise UserError("`draw mesh` needs a layout, as in --layout dp=2,tp=4,pp=2", "option.missing")
    check_writable(output, *DRAWABLE_SUFFIXES)
    show(mesh(layout, cluster or None), as_json=as_json, output=output)
