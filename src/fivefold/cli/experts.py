"""`fivefold experts`: how the tokens of a run were spread over its experts."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.render.blocks import check_writable, show
from fivefold.render.paint import PICTURES

SHORT = "See the load of a run's experts.  [dim]fivefold experts runs/moe -o load.svg[/]"


def experts(
    run: Annotated[str, typer.Argument(help="The directory of a run.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it: .svg, .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: tokens by step, layer and expert.")] = False,
) -> None:
    """Show how many tokens the experts of each layer got, at the start and now.

    Reads metrics.jsonl of the run, which has the load of every expert for the
    steps of train.log_every; the run may still be going on. The picture has a
    line for each expert over all these steps. A run that finishes draws it, too,
    as load.svg in its directory.

    [dim]Examples:[/]

      fivefold experts runs/moe

      fivefold experts runs/moe -o load.svg

      fivefold experts runs/moe --json
    """
    from fivefold.trainer.result import experts as read

    check_writable(output, *PICTURES)
    show(read(run), as_json, output)
