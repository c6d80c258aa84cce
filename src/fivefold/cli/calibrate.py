"""`fivefold calibrate`: what the device at hand reaches, as a file for the planner."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.calibrate.fit import Row

SHORT = "Measure this device for the planner.  [dim]fivefold calibrate -o mine.toml[/]"


def calibrate(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write an accelerator file here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less sure.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Measure what kernels and collectives reach here, as shares of the maker's ceilings.

    Products in the three layouts of training, attention, element-wise kernels,
    launches, and collectives between the devices of this machine. The constants
    are those with which the planner's formulas give the measured times best; the
    last two columns say how well. A cluster then names the file like a device.

    [dim]Examples:[/]

      fivefold calibrate

      fivefold calibrate -o mine.toml

      fivefold calibrate --quick --json
    """
    if output is not None and (output.suffix != ".toml" or not output.parent.is_dir()):
        raise UserError(f"-o {output} must be a file of an existing directory, with a name that ends in .toml")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("calibrate starts its own ranks, one for each GPU of this machine; run it without a launcher")
    from fivefold.calibrate.accelerator_file import to_toml
    from fivefold.calibrate.calibrate import STEPS, device_name
    from fivefold.calibrate.calibrate import calibrate as measure
    from fivefold.launch.device import choose_device

    chosen = choose_device(device)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(STEPS))
        done = -1

        def told(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=what, completed=done)

        found = measure(chosen, quick, told)
    command = " ".join(["fivefold", *sys.argv[1:]])
    comments = [
        f"Made by: {command}",
        f"host: {found.host * 1e3:.3f} ms to launch one block's forward pass",
    ]
    if output is not None:
        output.write_text(to_toml(found.accelerator, comments))
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found)))
        return
    out = Console(highlight=False)
    out.print(f"{device_name(chosen)}, as {found.accelerator.name}")
    out.print(_table(found.rows))
    if output is not None:
        out.print(f"written to {output}; a cluster of them is for example 8x{output}", soft_wrap=True)


def _table(rows: "list[Row]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "measured", "of ceiling", "error", "worst", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    for row in rows:
        shares = ("" if x is None else f"{100 * x:.1f}%" for x in (row.share, row.median, row.worst))
        table.add_row(row.what, row.measured, *shares, row.note)
    return table
