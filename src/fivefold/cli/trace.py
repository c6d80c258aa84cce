"""`fivefold trace`: where the time of a step goes."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.job_args import JobWords, split
from fivefold.render.blocks import check_writable, console_of, show

SHORT = "See where a step's time goes.  [dim]fivefold trace job.toml layout=pp=2,microbatches=4[/]"


def trace(
    job: JobWords = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; .html: a page.")] = Path(
        "trace.json"
    ),
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a few steps of a job and show what every rank did and waited for.

    Starts the layout's ranks on this machine, trains trace.after steps to warm
    up and trace.steps (3) more, and writes one file for all ranks, which
    ui.perfetto.dev opens: every action with stage and microbatch, every
    collective by axis with its bytes, every wait, and beside them the same
    schedule as the simulator runs it with the measured durations. Nothing else
    is kept. To trace a longer run on a cluster: fivefold train ... trace.steps=3

    [dim]Examples:[/]

      fivefold trace layout=pp=4,schedule=zb-h1,microbatches=8

      fivefold trace job.toml layout=dp=2,tp=2,pp=2 -o 3d.json

      fivefold trace job.toml -o trace.html

      fivefold trace job.toml trace.steps=10 --json
    """
    from fivefold.trainer.start import trace as run

    html = output.suffix.lower() == ".html"
    check_writable(output if html else None)
    with console_of(stderr=True).status("training the traced steps"):
        found = run(*split(job), output=output.with_suffix(".json") if html else output, timeout=timeout)
    show(found, as_json)
    if html:
        from fivefold.web.report import report

        written = report(found, output, shlex.join(["fivefold", *sys.argv[1:]]))
        if not as_json:
            typer.echo(str(written).rstrip())
