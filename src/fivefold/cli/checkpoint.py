"""`fivefold checkpoint`: list a run's checkpoints, show them, verify them, reshard them."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.progress import bytes_bar
from fivefold.render.blocks import show as show_result
from fivefold.support.errors import UserError
from fivefold.support.files import whole_or_nothing
from fivefold.support.places import place_of

SHORT = "List, show, verify and reshard checkpoints.  [dim]fivefold checkpoint ls runs/demo[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="A run's checkpoints.")

Run = Annotated[str, typer.Argument(help="A run's directory, or one of its checkpoints; a URL.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Step = Annotated[int | None, typer.Option(help="Which one; default: the newest complete one.")]


@app.command("ls", short_help="List a run's checkpoints.  [dim]fivefold checkpoint ls runs/demo[/]")
def ls(run: Run, as_json: Json = False) -> None:
    """List a run's checkpoints: step, layout, size, and whether they are complete.

    Files are looked at, not read; `fivefold checkpoint verify` reads them.

    [dim]Examples:[/]

      fivefold checkpoint ls runs/demo

      fivefold checkpoint ls runs/demo --json
    """
    from fivefold.checkpoint.inspect import list_checkpoints

    show_result(list_checkpoints(run), as_json)


@app.command("show", short_help="Show what one holds.  [dim]fivefold checkpoint show runs/demo[/]")
def show(run: Run, step: Step = None, as_json: Json = False) -> None:
    """Show a checkpoint: the run's position, its job, its files and its tensors.

    [dim]Examples:[/]

      fivefold checkpoint show runs/demo

      fivefold checkpoint show runs/demo --step 100 --json
    """
    from fivefold.checkpoint.inspect import show_checkpoint

    show_result(show_checkpoint(run, step), as_json)


@app.command("verify", short_help="Read every byte of them.  [dim]fivefold checkpoint verify runs/demo[/]")
def verify(run: Run, step: Step = None, as_json: Json = False) -> None:
    """Hash every file of every complete checkpoint, and compare it with the manifest.

    Nothing is changed. Exit code 1 where something is damaged.

    [dim]Examples:[/]

      fivefold checkpoint verify runs/demo

      fivefold checkpoint verify runs/demo --step 100 --json
    """
    from fivefold.checkpoint.inspect import verify_checkpoints

    with bytes_bar("reading") as progress:
        found = verify_checkpoints(run, step, progress)
    show_result(found, as_json)


@app.command(
    "reshard",
    short_help="Rewrite one for a layout.  [dim]fivefold checkpoint reshard runs/demo --layout tp=8 -o big[/]",
)
def reshard(
    run: Run,
    layout: Annotated[str, typer.Option(help="The layout whose ranks are to read it.")],
    output: Annotated[str, typer.Option("--output", "-o", help="A run directory to make; or its URL.")],
    step: Step = None,
) -> None:
    """Write a checkpoint again, in the pieces of another layout.

    No layout needs this: any reads any. It makes one file for each rank, with
    what that rank holds. One process does it, with no more than one rank's
    share in memory.

    [dim]Examples:[/]

      fivefold checkpoint reshard runs/demo --layout tp=2,pp=2 -o runs/demo-4

      fivefold checkpoint reshard runs/demo --step 100 --layout dp=8,zero=3 -o runs/eight

      fivefold checkpoint reshard runs/demo --layout dp=8 -o s3://bucket/runs/demo
    """
    from fivefold.checkpoint.find import find, job_of, run_of
    from fivefold.checkpoint.hf_extras import carry
    from fivefold.checkpoint.load import reshard as cut
    from fivefold.checkpoint.storage import making_at
    from fivefold.checkpoint.store import Store
    from fivefold.job.config import to_toml
    from fivefold.layout.layout import Layout

    one, to = find(run, step), place_of(output)
    wanted = Layout.parse(layout)
    job = job_of(one, layout=wanted, run=to if isinstance(to, Path) else None)
    if problems := job.layout.problems(job.model, seq=job.data.seq, batch=job.train.batch):
        raise UserError(problems)
    if damage := one.damage():
        raise UserError(damage)
    making = whole_or_nothing(to) if isinstance(to, Path) else making_at(to)
    with making, bytes_bar("writing", one.bytes) as advance:
        if isinstance(to, Path):
            to.mkdir(parents=True, exist_ok=True)
        path = cut(one, job.model, wanted, job.data.seq, Store(to / "checkpoints"), advance)
        if isinstance(to, Path):
            (to / "job.toml").write_text(to_toml(job))
            carry(run_of(one), to)
    how = f"{to / 'job.toml'}" if isinstance(to, Path) else f"JOB checkpoint.url={to.parent} run.name={to.name}"
    typer.echo(f"{path}; resume with: fivefold train {how} --nproc {wanted.world}")
