"""`fivefold bench`: measurements, each with the command that repeats them."""

import json
from typing import Annotated

import typer
from rich.console import Console

SHORT = "Measure how fast things are.  [dim]fivefold bench schedules[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Benchmarks.")


@app.command(short_help="Build, check and simulate pipeline schedules.  [dim]fivefold bench schedules[/]")
def schedules(as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    [dim]Example:[/]

      fivefold bench schedules
    """
    from fivefold.schedule.benchmark import CASES, best
    from fivefold.schedule.tables import benchmark_rows, benchmark_table

    timings = [best(case) for case in CASES]
    if as_json:
        typer.echo(json.dumps(benchmark_rows(timings)))
        return
    head = "seconds to build, check and simulate, best of 3; microseconds per action\n"
    Console(highlight=False).print(head, benchmark_table(timings))
