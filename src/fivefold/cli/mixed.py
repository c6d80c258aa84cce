"""`fivefold mixed`: pipeline schedules on GPUs of several generations, compared."""

from typing import Annotated

import typer

SHORT = "Compare schedules on unlike GPUs.  [dim]fivefold mixed llama3-70b --cluster 2x8xH100+2x8xA100[/]"


def mixed(
    words: Annotated[list[str], typer.Argument(metavar="MODEL [KEY=VALUE ...]", help="A model, and changes to it.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="Unlike nodes, such as 2x8xH100+2x8xA100; or like ones and --slower.")
    ] = "2x8xH100+2x8xA100",
    layout: Annotated[
        str | None, typer.Option(help="Degrees, microbatches and recompute of all schedules; default: the planner's.")
    ] = None,
    schedules: Annotated[
        str, typer.Option(help="Schedules to compare, with commas; default: 1f1b,interleaved,zb-h1,zb-v,auto.")
    ] = "",
    slower: Annotated[str, typer.Option(help="Make half of like nodes so many times slower: 1.5,2.")] = "",
    batch: Annotated[
        int | None, typer.Option(help="Sequences per step; default: as published runs of the size, 4M tokens or more.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence; default: 8192, or the model's context.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a step of every schedule on devices of unequal speed, with layers divided evenly and by speed.

    Schedules run on the planner's clock, each stage with the times of its own
    device, and auto is made for these times. Nothing is executed; `fivefold bench
    mixed` does that on CPU ranks. An accelerator may be a file of `fivefold
    calibrate`.

    [dim]Examples:[/]

      fivefold mixed llama3-70b --cluster 2x8xH100+2x8xA100 --batch 128

      fivefold mixed llama3-8b --cluster 4x8xH100 --slower 1.5,2 --batch 128

      fivefold mixed small --cluster 2xCPU --slower 2 --layout pp=2,microbatches=8 --batch 16 --seq 128
    """
    from fivefold.planner.mixed_compare import SCHEDULES, compare
    from fivefold.render.blocks import show
    from fivefold.support.parsing import numbers

    names = [name.strip() for name in schedules.split(",") if name.strip()] or SCHEDULES
    factors = numbers(slower, "--slower")
    found = compare(
        words[0], cluster, layout=layout, schedules=names, slower=factors, changes=words[1:], batch=batch, seq=seq
    )
    show(found, as_json)
