"""`fivefold curve`: a job's loss curve under its layout and in one process."""

import json
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli.job_args import JobWords, split
from fivefold.support.errors import UserError

SHORT = "Follow one process's loss curve.  [dim]fivefold curve layout=dp=2,tp=2 train.steps=50[/]"


def curve(
    job: JobWords = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each of the three runs.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Train a job under its layout and in one process, and compare the losses.

    A third run is the control: one process again, with the samples of every
    batch in another order, so that only the order of additions differs. The
    layout follows if it strays at most three times as far as the control.
    Nothing is saved. Exit code 0 if it follows, 1 if not.

    [dim]Examples:[/]

      fivefold curve layout=dp=2,tp=2,zero=1 train.steps=50

      fivefold curve job.toml layout=cp=4,cp_kind=ulysses --json
    """
    from fivefold.job.config import read_job
    from fivefold.job.preflight import preflight
    from fivefold.plan.memory_check import proof_problems
    from fivefold.verify.curve import follow, report, rows

    path, changes = split(job)
    resolved = read_job(path, changes)
    preflight(resolved, resolved.layout.world)
    if problems := proof_problems(resolved):
        raise UserError(problems)
    console = Console(stderr=True, highlight=False)
    with console.status(f"three runs of {resolved.train.steps} steps"):
        curves = follow(resolved, timeout)
    if as_json:
        typer.echo(json.dumps(rows(curves)))
    else:
        report(Console(highlight=False), curves)
    raise typer.Exit(0 if curves.passed else 1)
