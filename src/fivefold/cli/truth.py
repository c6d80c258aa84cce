"""`fivefold truth`: the planner against published, measured runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.truth.cases import Measured
    from fivefold.truth.rows import Row
    from fivefold.truth.score import Result, Score

SHORT = "The planner against measured runs.  [dim]fivefold truth[/]"


def truth(
    data: Annotated[Path | None, typer.Option(help="A directory of CSV files; default: those that come along.")] = None,
    rows: Annotated[str, typer.Option(help="One source, row by row: llama3, torchtitan, ...")] = "",
    sources: Annotated[bool, typer.Option("--sources", help="What is assumed of each source, and why.")] = False,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Also predict each source with constants fitted without it (minutes)."),
    ] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the constants to the runs, and print them.")] = False,
    write: Annotated[bool, typer.Option("--write", help="With --fit: keep them in efficiency.toml.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=".svg: predicted against measured.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: every row's prediction.")] = False,
) -> None:
    """Predict published training runs, and show how far off the planner is.

    Per source: rows with a time, the mean and median absolute error of a step's
    time, the bias, and beside it the error of a null model that knows one hardware
    utilisation per source and nothing else; the error of memory; and of runs that
    ran out of memory how many the planner says would. Then the sweeps: how much
    slower the planner's choice is than the best layout that was measured.

    [dim]Examples:[/]

      fivefold truth

      fivefold truth --rows llama3

      fivefold truth --data my-runs/ --json

      fivefold truth --leave-out

      fivefold truth --fit --write
    """
    from fivefold.truth.rows import DATA, read_rows
    from fivefold.truth.score import evaluate, scores

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=150)
    if sources:
        _show_sources(console)
        return
    if output is not None and output.suffix.lower() != ".svg":
        raise UserError(f"{output} should end in .svg")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"{output} cannot be written: there is no directory {output.parent}")
    if write and not fit:
        raise UserError("--write keeps what --fit finds; give both")
    every = read_rows(data or DATA)
    if rows and rows not in {row.file for row in every}:
        raise UserError(f"unknown source {rows!r}; there are {', '.join(dict.fromkeys(row.file for row in every))}")
    if rows and not fit:
        every = [row for row in every if row.file == rows]
    quiet = as_json or not console.is_terminal
    constants = None
    if fit:
        constants = _fit(console, every, write, quiet, silent=as_json)
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("predicting", total=len(every))
        results = evaluate(every, constants, tick=lambda: progress.advance(task))
    left = _left_out(every, quiet, console) if leave_out else {}
    found = scores(results)
    if output is not None:
        from fivefold.truth.picture import scatter

        output.write_text(scatter(results))
    if as_json:
        typer.echo(json.dumps(_to_dict(found, results, left)))
        return
    console.print(_table(found, left))
    _show_regret(console, results)
    _show_alarms(console, results)
    if rows:
        console.print(_rows_table([result for result in results if result.row.file == rows]))
    _show_refused(console, results)
    if output is not None:
        console.print(f"written to {output}")


def _measured(every: "list[Row]") -> "list[Measured]":
    from fivefold.truth.cases import measured

    runs = []
    for row in every:
        if row.status == "ok":
            try:
                runs.append(measured(row))
            except UserError:
                continue
    return runs


def _fit(console: Console, every: "list[Row]", write: bool, quiet: bool, silent: bool) -> Any:
    from fivefold.truth.constants import FITTED
    from fivefold.truth.fit import STEPS, fit

    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("fitting", total=STEPS)
        constants = fit(_measured(every), lambda: progress.advance(task))
    if not silent:
        table = Table(title="Constants", caption="guess: what kernel benchmarks and papers report")
        for name in ("of", "constant", "guess", "fitted"):
            table.add_column(name, justify="left" if name in ("of", "constant") else "right")
        for one in FITTED:
            table.add_row(one.where, one.name, f"{one.guess:.4g}", f"{constants.value(one):.4g}")
        console.print(table)
    if write:
        constants.write()
    return constants


def _left_out(every: "list[Row]", quiet: bool, console: Console) -> dict[str, float]:
    """The mean error of each source with constants that have not seen it."""
    from fivefold.truth.fit import STEPS, fit, predict

    runs = [run for run in _measured(every) if run.seconds]
    files = list(dict.fromkeys(run.row.file for run in runs))
    found = {}
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("leaving out", total=STEPS * len(files))
        for name in files:
            progress.update(task, description=f"without {name}")
            others = [run for run in runs if run.row.file != name]
            if not others:
                continue
            constants = fit(others, lambda: progress.advance(task))
            mine = [run for run in runs if run.row.file == name]
            errors = [abs(predict(run, constants, exact=True) / (run.seconds or 1.0) - 1) for run in mine]
            found[name] = sum(errors) / len(errors)
    return found


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def _table(found: "list[Score]", left: dict[str, float]) -> Table:
    table = Table(title="The planner against measured runs", caption="error: mean absolute, of a step's time")
    names = ["source", "rows", "refused", "timed", "error", "median", "bias", "null model", "worst"]
    names += ["left out"] if left else []
    for name in (*names, "memory", "OOM right", "precision", "recall"):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for one in found:
        worst = _percent(one.worst.error, signed=True) if one.worst else ""
        cells = [one.source, str(one.rows), str(one.refused or ""), str(one.timed), _percent(one.mape)]
        cells += [_percent(one.median_ape), _percent(one.bias, signed=True), _percent(one.null_mape), worst]
        cells += [_percent(left.get(one.source))] if left else []
        memory = f"{_percent(one.memory_mape)} ({one.memory_rows})" if one.memory_rows else ""
        ooms = (_percent(one.oom_right), _percent(one.oom_precision), _percent(one.oom_recall))
        table.add_row(*cells, memory, *ooms)
    timed = [one for one in found if one.mape is not None]
    if timed:
        table.add_section()
        mean = sum(one.mape or 0.0 for one in timed) / len(timed)
        null = sum(one.null_mape or 0.0 for one in timed) / len(timed)
        last = [_percent(sum(left.values()) / len(left))] if left else []
        table.add_row("mean of sources", "", "", "", _percent(mean), "", "", _percent(null), "", *last)
    return table


def _show_regret(console: Console, results: "list[Result]") -> None:
    from fivefold.truth.regret import choices, median_regret

    found = choices(results)
    if not found:
        return
    failed = sum(choice.out_of_memory for choice in found)
    finite = [choice.regret for choice in found if not choice.out_of_memory]
    console.print(
        f"sweeps: {len(found)}; the planner's choice is slower than the best measured layout by "
        f"{_percent(median_regret(found))} in the median, {_percent(sum(finite) / len(finite))} in the mean; "
        f"{failed} of its choices ran out of memory",
        soft_wrap=True,
    )


def _show_alarms(console: Console, results: "list[Result]") -> None:
    """Runs that ran, and that the planner would have refused."""
    ran = [result for result in results if result.row.status == "ok" and result.fits is not None]
    alarms = [result for result in ran if not result.fits and not (result.run and result.run.memory)]
    if not alarms:
        return
    names = dict.fromkeys(result.row.file for result in alarms)
    counts = ", ".join(f"{sum(one.row.file == name for one in alarms)} of {name}" for name in names)
    console.print(f"of {len(ran)} runs that ran, {len(alarms)} are said not to fit: {counts}", soft_wrap=True)


def _show_refused(console: Console, results: "list[Result]") -> None:
    reasons: dict[tuple[str, str], int] = {}
    for result in results:
        if result.refused:
            key = (result.row.file, result.refused)
            reasons[key] = reasons.get(key, 0) + 1
    for (source, reason), count in reasons.items():
        console.print(f"refused: {count} of {source}: {reason}", soft_wrap=True)


def _rows_table(results: "list[Result]") -> Table:
    table = Table(title="Rows")
    # Only where memory was measured, or ran out, is what the planner says of it held against anything.
    judged = any(result.row.status == "oom" or (result.run and result.run.memory) for result in results)
    memory = ("memory", "predicted", "fits") if judged else ()
    for name in ("line", "model", "layout", "measured", "predicted", "error", *memory):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for result in results:
        run = result.run
        if run is None:
            table.add_row(str(result.row.line), result.row.text("model"), result.refused or "arithmetic of a paper")
            continue
        seconds = "out of memory" if result.row.status == "oom" else f"{run.seconds:.4g} s" if run.seconds else ""
        table.add_row(
            str(result.row.line),
            run.case.spec.name,
            str(run.case.layout).partition(",split=")[0],
            seconds,
            f"{result.seconds:.4g} s" if result.seconds else "",
            _percent(result.error, signed=True),
            *((_gigabytes(run.memory), _gigabytes(result.memory), "yes" if result.fits else "no") if judged else ()),
        )
    return table


def _gigabytes(size: float | None) -> str:
    return f"{size / 1e9:.1f} GB" if size else ""


def _show_sources(console: Console) -> None:
    from fivefold.truth.sources import ANY, SOURCES

    table = Table(title="What is assumed of each source where its rows are silent", show_lines=True)
    for name in ("source", "software", "ZeRO", "sp", "recompute", "why"):
        table.add_column(name)
    for one in (*SOURCES, ANY):
        cells = (one.match or "any other", one.stack.name, str(one.zero), "yes" if one.sp else "no", one.recompute)
        table.add_row(*cells, one.why)
    console.print(table)


def _to_dict(found: "list[Score]", results: "list[Result]", left: dict[str, float]) -> dict[str, Any]:
    from fivefold.truth.regret import choices, median_regret

    timed = [one.mape for one in found if one.mape is not None]
    sweeps = choices(results)
    return {
        "sources": {
            one.source: one.to_dict() | ({"left_out_mape": left[one.source]} if one.source in left else {})
            for one in found
        },
        "mean_mape": sum(timed) / len(timed) if timed else None,
        "sweeps": {
            "count": len(sweeps),
            "median_regret": median_regret(sweeps),
            "out_of_memory": sum(choice.out_of_memory for choice in sweeps),
        },
        "rows": [result.to_dict() for result in results],
    }
