"""`fivefold checkpoint`: list a run's checkpoints, verify them, reshard them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Json, Output, bytes_bar, command
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import TEXT_SUFFIXES, show
from fivefold.support.errors import UserError
from fivefold.support.files import whole_or_nothing
from fivefold.support.plugins import options
from fivefold.support.storage_place import place_of

SHORT = "List, verify and reshard checkpoints.  [dim]fivefold checkpoint ls runs/demo[/]"
app = typer.Typer(
    cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="List, verify and reshard checkpoints."
)

Run = Annotated[str, typer.Argument(help="A run's directory, or one of its checkpoints; a URL.", show_default=False)]
Step = Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest complete one.")]


@command(app, "ls", "List a run's checkpoints.  [dim]fivefold checkpoint ls runs/demo --verify[/]", TEXT_SUFFIXES)
def ls(
    run: Run,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file of complete checkpoints and compare it with the manifest.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="With --verify: only this one.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints: step, layout, size, and whether they are complete.

    Files are listed, not read. With --verify, every file of every complete
    checkpoint is hashed and compared with the manifest; exit code 1 if one is
    damaged. Nothing is changed. `fivefold inspect` shows a checkpoint's contents.

    [dim]Examples:[/]

      fivefold checkpoint ls runs/demo

      fivefold checkpoint ls runs/demo --json

      fivefold checkpoint ls runs/demo --verify

      fivefold checkpoint ls runs/demo --verify --step 100
    """
    from fivefold.checkpoint.inspect import list_checkpoints, verify_checkpoints

    if not verify:
        if step is not None:
            raise UserError(
                f"--step {step} needs --verify; `fivefold inspect {run} --step {step}` shows one checkpoint",
                "option.conflict",
            )
        show(list_checkpoints(run), as_json=as_json, output=output)
        return
    with bytes_bar("reading") as progress:
        result = verify_checkpoints(run, step, progress)
    show(result, as_json=as_json, output=output)


@command(app, "reshard", "Rewrite one.  [dim]fivefold checkpoint reshard runs/demo --layout tp=8 -o big[/]")
def reshard(
    run: Run,
    layout: Annotated[str, typer.Option(help="Layout to write for.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Run directory to create, or its URL.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint with one file for each rank of another layout.

    No layout needs this, as any layout reads any checkpoint. One process does it,
    with at most one rank's share in memory.

    [dim]Examples:[/]

      fivefold checkpoint reshard runs/demo --layout tp=2,pp=2 -o runs/demo-4

      fivefold checkpoint reshard runs/demo --step 100 --layout dp=8,zero=3 -o runs/eight

      fivefold checkpoint reshard runs/demo --layout dp=8 -o s3://bucket/runs/demo
    """
    from fivefold.checkpoint.find import find, job_of, run_of
    from fivefold.checkpoint.hf_extras import copy_extras
    from fivefold.checkpoint.reshard import reshard as write_shards
    from fivefold.checkpoint.storage import new_output_at
    from fivefold.checkpoint.store import Store
    from fivefold.job.toml_writer import to_toml
    from fivefold.layout.layout import Layout

    checkpoint, target = find(run, step), place_of(output)
    wanted = Layout.parse(layout)
    job = job_of(checkpoint, layout=wanted, run=target if isinstance(target, Path) else None)
    if problems := job.layout.problems(job.model, seq=job.data.seq, batch=job.train.batch):
        raise UserError(problems)
    if damage := checkpoint.damage():
        raise UserError(damage, "checkpoint.damaged")
    making = whole_or_nothing(target) if isinstance(target, Path) else new_output_at(target)
    with making, bytes_bar("writing", checkpoint.bytes) as advance:
        if isinstance(target, Path):
            target.mkdir(parents=True, exist_ok=True)
        path = write_shards(checkpoint, job.model, wanted, job.data.seq, Store(target / "checkpoints"), advance)
        if isinstance(target, Path):
            (target / "job.toml").write_text(to_toml(job))
            copy_extras(run_of(checkpoint), target)
    arguments = f"JOB checkpoint.url={target.parent} run.name={target.name}"
    if isinstance(target, Path):
        arguments = f"{target / 'job.toml'}{options(job.plugins)}"
    resume = f"fivefold train {arguments} --nproc {wanted.world}"
    figures = {"checkpoint": str(path), "resume": resume}
    typer.echo(json.dumps(figures) if as_json else f"{path}; resume with: {resume}")
