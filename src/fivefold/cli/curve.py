"""`fivefold curve`: a job's loss curve under its layout and in one process."""

from typing import Annotated

import typer

from fivefold.cli.job_args import JobWords, split
from fivefold.render.blocks import console_of, show

SHORT = "Compare a loss curve with one process's.  [dim]fivefold curve layout=dp=2,tp=2 train.steps=50[/]"


def curve(
    job: JobWords = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each of the three runs.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    from fivefold.verifier.verify import curve as follow

    with console_of(stderr=True).status("three runs: one process, its control, the layout"):
        found = follow(*split(job), timeout=timeout)
    show(found, as_json)
