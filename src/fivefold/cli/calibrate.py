"""`fivefold calibrate`: what the device at hand reaches, as a file for the planner."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.cli.progress import counting_bar
from fivefold.report import show
from fivefold.report.show import check_writable
from fivefold.support.errors import UserError
from fivefold.support.files import write

SHORT = "Measure this device for the planner.  [dim]fivefold calibrate -o mine.toml[/]"


def calibrate(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write an accelerator file here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less sure.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what kernels and collectives reach here, as shares of the maker's ceilings.

    Matmuls in the three layouts of training, attention, element-wise kernels,
    launches, and collectives between the devices of this machine. The constants
    are those with which the planner's formulas give the measured times best; the
    last two columns say how well. A cluster then names the file like a device.

    [dim]Examples:[/]

      fivefold calibrate

      fivefold calibrate -o mine.toml

      fivefold calibrate --quick --json
    """
    check_writable(output, ".toml")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("calibrate starts its own ranks, one for each GPU of this machine; run it without a launcher")
    from fivefold.calibrate.calibrate import calibrate as measure
    from fivefold.calibrate.result import to_toml

    with counting_bar() as progress:
        found = measure(device, quick, progress)
    if output is not None:
        made_by = " ".join(["fivefold", *sys.argv[1:]])
        host = f"host: {found.host * 1e3:.3f} ms to launch one block's forward pass"
        write(output, to_toml(found.accelerator, [f"Made by: {made_by}", host]))
    show(found, as_json)
    if output is not None and not as_json:
        typer.echo(f"written to {output}; a cluster of them is for example 8x{output}")
