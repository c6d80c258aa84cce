"""`fivefold list`: built-in models and accelerators. `fivefold accuracy`: the planner's errors on measured runs."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli import completion
from fivefold.cli.options import Json, Output, Picture, command, counting_bar
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import TEXT_SUFFIXES, show
from fivefold.support.errors import UserError
from fivefold.support.text import either

LIST = "List models or accelerators, or show one.  [dim]fivefold list models llama3-8b[/]"
ACCURACY = "Compare the planner with measured runs.  [dim]fivefold accuracy[/]"
app = typer.Typer(
    cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="List built-in models and accelerators."
)


@command(app, "models", "All built-in models, or one.  [dim]fivefold list models llama3-8b[/]", TEXT_SUFFIXES)
def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one: a preset, a Hugging Face config.json or its directory.",
            autocompletion=completion.models,
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(help="Sequence length for the FLOPs; default: each model's context.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """List the built-in models, or show everything that follows from the numbers of one.

    FLOPs are those of one training token, forward and backward, without
    recomputation. Attention is counted in full (as PaLM does) and as the causal
    half (as newer reports do).

    [dim]Examples:[/]

      fivefold list models

      fivefold list models --seq 8192 --json

      fivefold list models llama3-8b

      fivefold list models path/to/config.json
    """
    from fivefold.spec import presets

    if name is None:
        show(presets.models(seq=seq), as_json=as_json, output=output)
        return
    from fivefold.planner.model_summary import model

    show(model(name, seq=seq), as_json=as_json, output=output)


@command(
    app, "accelerators", "All built-in accelerators, or one.  [dim]fivefold list accelerators H100[/]", TEXT_SUFFIXES
)
def accelerators(
    name: Annotated[
        str | None, typer.Argument(help="Show this one with all its figures.", autocompletion=completion.accelerators)
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """List the built-in accelerators: memory, dense rates, links, and the source of every figure.

    Other accelerators need no code: `fivefold calibrate -o mine.toml` measures the
    device at hand, and `--cluster 2x8xmine.toml` plans for it.

    [dim]Examples:[/]

      fivefold list accelerators

      fivefold list accelerators MI300X

      fivefold list accelerators --json
    """
    from fivefold.hardware import cluster

    show(cluster.accelerators(name), as_json=as_json, output=output)


_LeaveOut = Annotated[
    bool,
    typer.Option("--leave-out", help="Also predict each source with constants fitted without it."),
]
_Coverage = Annotated[
    bool,
    typer.Option(
        "--coverage", help="Show how many runs fall within the ranges that plans print, each source held out."
    ),
]
_Sweeps = Annotated[
    bool, typer.Option("--sweeps", help="Show each sweep of layouts: the planner's choice and rules of thumb.")
]
_Write = Annotated[
    bool, typer.Option("--write", help="Save the fitted constants or coverage, so that `plan` uses them.")
]


def accuracy(
    data: Annotated[
        Path | None,
        typer.Option(help="A directory of CSV files, or the JSON of checkup; default: those of the package."),
    ] = None,
    rows: Annotated[str, typer.Option(help="Show one source row by row: llama3, torchtitan, ...")] = "",
    sources: Annotated[bool, typer.Option("--sources", help="Show the assumptions about each source.")] = False,
    leave_out: _LeaveOut = False,
    coverage: _Coverage = False,
    sweeps: _Sweeps = False,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the constants to the runs, and print them.")] = False,
    write: _Write = False,
    output: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict published training runs, and show how far off the planner is.

    Per source: rows with a time, the mean and median absolute error of the step
    time, the bias, and the error of a null model that knows one hardware
    utilisation per source and nothing else; the error of memory; and how many
    out-of-memory failures the planner predicts. Then the sweeps: how much slower
    the planner's choice is than the best measured layout.

    [dim]Examples:[/]

      fivefold accuracy

      fivefold accuracy --rows llama3

      fivefold accuracy --data my-runs/ --json

      fivefold accuracy --data checkup.json

      fivefold accuracy --leave-out

      fivefold accuracy --coverage

      fivefold accuracy --sweeps --leave-out

      fivefold accuracy --fit --write
    """
    from fivefold.accuracy.result import SourceList, planner_accuracy

    if sources:
        show(SourceList(), as_json=as_json, output=output)
        return
    if write and not (fit or coverage):
        raise UserError("--write needs --fit or --coverage, whose results it saves", "option.conflict")
    if coverage or sweeps:
        others = {"--fit": fit, "--leave-out": leave_out, "--rows": rows}
        others["-o"] = output if output and output.suffix.lower() not in TEXT_SUFFIXES else None  # they have no picture
        _show_coverage_or_sweeps(
            data, others, coverage=coverage, sweeps=sweeps, write=write, output=output, as_json=as_json
        )
        return
    with counting_bar() as progress:
        result = planner_accuracy(data, rows=rows, leave_out=leave_out, refit=fit, progress=progress)
    if write and result.constants:
        result.constants.write()
    show(result, as_json=as_json, output=output)


def _show_coverage_or_sweeps(
    data: Path | None,
    others: dict[str, object],
    *,
    coverage: bool,
    sweeps: bool,
    write: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show --coverage or --sweeps, which have their own tables; `others` are the values of the other options."""
    from fivefold.accuracy.coverage import coverage as measure_coverage
    from fivefold.accuracy.sweeps import sweeps as compare_sweeps

    name = "--coverage" if coverage else "--sweeps"
    leave_out = bool(others["--leave-out"]) and not coverage
    # Only --sweeps can be combined with --leave-out.
    others |= {"--sweeps": coverage and sweeps, "--leave-out": others["--leave-out"] and coverage}
    if conflicting := [option for option, value in others.items() if value]:
        raise UserError(
            f"{name} prints its own tables; remove {either(conflicting)}",
            "option.conflict",
        )
    with counting_bar() as progress:
        if coverage:
            result = measure_coverage(data, progress=progress)
            if write:
                result.write()
            show(result, as_json=as_json, output=output)
            return
        sweeps_result = compare_sweeps(data, leave_out=leave_out, progress=progress)
    show(sweeps_result, as_json=as_json, output=output)
