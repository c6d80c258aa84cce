"""`fivefold trace`: where the time of a step goes."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli.job_args import JobWords, split
from fivefold.support.errors import UserError

SHORT = "See where a step's time goes.  [dim]fivefold trace job.toml layout=pp=2,microbatches=4[/]"


def trace(
    job: JobWords = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="The summary, for scripts.")] = False,
) -> None:
    """Run a few steps of a job and show what every rank did, and waited for.

    Starts the layout's ranks on this machine, trains trace.after steps to warm
    up and trace.steps (3) more, and writes one file for all ranks, which
    ui.perfetto.dev opens: every action with stage and microbatch, every
    collective by axis with its bytes, waits, and beside them the same schedule
    as the simulator runs it with the durations that were measured. Nothing else
    is kept. A longer run on a cluster is traced by: fivefold train ...
    trace.steps=3

    [dim]Examples:[/]

      fivefold trace layout=pp=4,schedule=zb-h1,microbatches=8

      fivefold trace job.toml layout=dp=2,tp=2,pp=2 -o 3d.json

      fivefold trace job.toml trace.steps=10 --json
    """
    from fivefold.job.config import read_job
    from fivefold.job.preflight import preflight
    from fivefold.trace.chrome import write
    from fivefold.trace.report import rows, show
    from fivefold.trace.summary import Summary
    from fivefold.train.traced import short
    from fivefold.train.traced import trace as run

    if not output.expanduser().absolute().parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {output.parent}")
    path, changes = split(job)
    resolved = short(read_job(path, changes))
    preflight(resolved, resolved.layout.world)
    with Console(stderr=True, highlight=False).status(f"{resolved.train.steps} steps on {resolved.layout.world} ranks"):
        summary = Summary(run(resolved, timeout))
    write(summary, output.expanduser())
    if as_json:
        typer.echo(json.dumps(rows(summary) | {"file": str(output)}))
        return
    console = Console(highlight=False)
    show(console, summary)
    console.print(f"trace of all ranks: {output}; ui.perfetto.dev opens it", markup=False)
