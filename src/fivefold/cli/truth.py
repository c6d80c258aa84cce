"""`fivefold truth`: the planner against published, measured runs."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.progress import counting_bar
from fivefold.support.errors import UserError
from fivefold.support.text import either

SHORT = "Compare the planner with measured runs.  [dim]fivefold truth[/]"


def truth(
    data: Annotated[Path | None, typer.Option(help="A directory of CSV files; default: those of the package.")] = None,
    rows: Annotated[str, typer.Option(help="Show one source row by row: llama3, torchtitan, ...")] = "",
    sources: Annotated[bool, typer.Option("--sources", help="Show what is assumed of each source, and why.")] = False,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Also predict each source with constants fitted without it."),
    ] = False,
    coverage: Annotated[
        bool,
        typer.Option("--coverage", help="Show how many runs lie in the ranges that plans print, sources left out."),
    ] = False,
    sweeps: Annotated[
        bool, typer.Option("--sweeps", help="Show each sweep of layouts: the planner's choice, and rules of thumb.")
    ] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the constants to the runs, and print them.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Keep what --fit or --coverage finds, for plans to use.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw predicted against measured: .svg, .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every row's prediction.")] = False,
) -> None:
    """Predict published training runs, and show how far off the planner is.

    Per source: rows with a time, the mean and median absolute error of the step
    time, the bias, and the error of a null model that knows one hardware
    utilisation per source and nothing else; the error of memory; and how many of
    the runs that ran out of memory the planner predicts. Then the sweeps: how much
    slower the planner's choice is than the best layout that was measured.

    [dim]Examples:[/]

      fivefold truth

      fivefold truth --rows llama3

      fivefold truth --data my-runs/ --json

      fivefold truth --leave-out

      fivefold truth --coverage

      fivefold truth --sweeps --leave-out

      fivefold truth --fit --write
    """
    from fivefold.accuracy import result as comparing
    from fivefold.accuracy.result import SourceList
    from fivefold.render.blocks import check_writable, show
    from fivefold.render.paint import PICTURES

    if sources:
        show(SourceList(), as_json)
        return
    check_writable(output, *PICTURES)
    if write and not (fit or coverage):
        raise UserError("--write keeps what --fit or --coverage finds; give one of them too")
    others = {"--fit": fit, "--leave-out": leave_out, "--rows": rows, "-o": output}
    if coverage or sweeps:
        _by_itself(data, others, coverage, sweeps, write, as_json)
        return
    with counting_bar() as progress:
        found = comparing.truth(data, rows=rows, leave_out=leave_out, refit=fit, progress=progress)
    if write and found.constants:
        found.constants.write()
    show(found, as_json, output)


def _by_itself(
    data: Path | None, others: dict[str, object], coverage: bool, sweeps: bool, write: bool, as_json: bool
) -> None:
    """--coverage or --sweeps, which have tables of their own."""
    from fivefold.accuracy.coverage import coverage as ranges
    from fivefold.accuracy.sweeps import sweeps as comparing
    from fivefold.render.blocks import show

    name = "--coverage" if coverage else "--sweeps"
    leave_out = bool(others["--leave-out"]) and not coverage
    others |= {"--sweeps": coverage and sweeps, "--leave-out": others["--leave-out"] and coverage}
    if given := [option for option, value in others.items() if value]:
        raise UserError(f"{name} prints tables of its own, with all errors that it needs; leave {either(given)} out")
    with counting_bar() as progress:
        held = ranges(data, progress=progress) if coverage else None
        found = held or comparing(data, leave_out=leave_out, progress=progress)
    if held and write:
        held.write()
    show(found, as_json)
