"""`fivefold checkpoint`: look at a run's checkpoints, verify them, cut them anew."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fivefold.cli.progress import bytes_bar
from fivefold.support.errors import UserError
from fivefold.support.files import whole_or_nothing
from fivefold.support.formatting import bytes_text

SHORT = "List, show, verify and reshard checkpoints.  [dim]fivefold checkpoint ls runs/demo[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="A run's checkpoints.")

Run = Annotated[Path, typer.Argument(help="A run's directory, or one of its checkpoints.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]
Step = Annotated[int | None, typer.Option(help="Which one; without it the newest complete one.")]


@app.command("ls", short_help="What a run has.  [dim]fivefold checkpoint ls runs/demo[/]")
def ls(run: Run, as_json: Json = False) -> None:
    """List a run's checkpoints: step, layout, size, and whether they are complete.

    Files are looked at, not read; `fivefold checkpoint verify` reads them.

    [dim]Examples:[/]

      fivefold checkpoint ls runs/demo

      fivefold checkpoint ls runs/demo --json
    """
    from fivefold.checkpoint.find import store_of
    from fivefold.layout.layout import Layout

    store = store_of(run)
    rows: list[dict[str, Any]] = []
    for one in reversed(store.complete()):
        misfits = one.misfits()
        row: dict[str, Any] = {"name": one.path.name, "step": one.step, "complete": not misfits, "problems": misfits}
        if not misfits:
            layout = str(Layout.from_dict(one.manifest.job["layout"]))
            row |= {"layout": layout, "files": len(one.manifest.files), "bytes": one.bytes}
        rows.append(row)
    unfinished = [path.name for path in store.incomplete()]
    aside = [path.name for path in store.aside()]
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows, "incomplete": unfinished, "aside": aside}))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (("checkpoint", "left"), ("step", "right"), ("layout", "left"), ("files", "right"),
                          ("size", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        cells = [
            str(row.get("layout", "")),
            str(row.get("files", "")),
            bytes_text(row["bytes"]) if "bytes" in row else "",
        ]
        table.add_row(str(row["name"]), str(row["step"]), *cells, "" if row["complete"] else "[red]damaged[/]")
    for name in unfinished:
        table.add_row(name, "", "", "", "", "[yellow]never finished[/]")
    for name in aside:
        table.add_row(name, "", "", "", "", "[dim]set aside[/]")
    console = Console(highlight=False)
    console.print(table if rows or unfinished or aside else f"{run} has no checkpoints yet")
    for row in rows:
        for problem in row["problems"]:
            console.print(f"[red]{row['name']}[/]: {problem}", soft_wrap=True)


@app.command("show", short_help="What one holds.  [dim]fivefold checkpoint show runs/demo[/]")
def show(run: Run, step: Step = None, as_json: Json = False) -> None:
    """Show a checkpoint: the run's position, its job, its files and its tensors.

    [dim]Examples:[/]

      fivefold checkpoint show runs/demo

      fivefold checkpoint show runs/demo --step 100 --json
    """
    from fivefold.checkpoint.find import find
    from fivefold.layout.layout import Layout

    one = find(run, step)
    manifest = one.manifest
    if misfits := one.misfits():
        raise UserError(misfits)
    tensors = _tensors(one.path)
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(manifest) | {"path": str(one.path), "tensors": tensors}))
        return
    console = Console(highlight=False)
    model = manifest.job["model"]["name"]
    console.print(f"[bold]{one.path}[/]  {model} after step {manifest.step}", soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    grid.add_row("samples", f"{manifest.samples} of the data order are done, in {manifest.updates} updates")
    grid.add_row("layout", f"written under {Layout.from_dict(manifest.job['layout'])}; any other reads it")
    grid.add_row("holds", "weights and AdamW's moments" if manifest.optimizer else "weights")
    grid.add_row("made by", f"fivefold {manifest.fivefold}, torch {manifest.torch}")
    console.print(grid)
    files = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("file", "size", "sha256"):
        files.add_column(name, justify="right" if name == "size" else "left")
    for file in manifest.files:
        files.add_row(file.name, bytes_text(file.bytes), f"{file.sha256[:16]}...")
    console.print(files)
    console.print(f"{len(tensors)} tensors, {sum(row['pieces'] for row in tensors)} pieces; --json lists them")


def _tensors(path: Path) -> list[dict[str, Any]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return [
        {"name": name, "shape": list(one.size), "dtype": str(one.properties.dtype), "pieces": len(one.chunks)}
        for name, one in sorted(stored.items())
        if isinstance(one, TensorStorageMetadata)
    ]


@app.command("verify", short_help="Read every byte of them.  [dim]fivefold checkpoint verify runs/demo[/]")
def verify(run: Run, step: Step = None, as_json: Json = False) -> None:
    """Hash every file of every complete checkpoint, and hold it against the manifest.

    Nothing is changed. Exit code 1 where something is damaged.

    [dim]Examples:[/]

      fivefold checkpoint verify runs/demo

      fivefold checkpoint verify runs/demo --step 100 --json
    """
    from fivefold.checkpoint.find import find, store_of
    from fivefold.checkpoint.store import MANIFEST

    alone = step is not None or (run / MANIFEST).is_file()
    every = [find(run, step)] if alone else store_of(run).complete()
    if not every:
        raise UserError(f"{run} has no complete checkpoint")
    found: dict[str, list[str]] = {}
    with bytes_bar("reading", sum(one.bytes for one in every if not one.misfits())) as advance:
        for one in every:
            found[one.path.name] = one.misfits() or one.damage(progress=advance)
    damaged = [problem for problems in found.values() for problem in problems]
    if as_json:
        typer.echo(json.dumps({"sound": not damaged, "checkpoints": found}))
    else:
        console = Console(highlight=False)
        for name, problems in found.items():
            console.print(f"{name}  {'[red]damaged[/]' if problems else '[green]sound[/]'}")
            for problem in problems:
                console.print(f"  {problem}", soft_wrap=True)
    raise typer.Exit(1 if damaged else 0)


@app.command("reshard", short_help="Cut one anew.  [dim]fivefold checkpoint reshard runs/demo --layout tp=8 -o big[/]")
def reshard(
    run: Run,
    layout: Annotated[str, typer.Option(help="The layout whose ranks are to read it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A run directory to make.")],
    step: Step = None,
) -> None:
    """Write a checkpoint again, in the pieces of another layout.

    No layout needs this: any reads any. It makes one file for each rank, with
    what that rank holds. One process does it, with no more than one rank's
    share in memory.

    [dim]Examples:[/]

      fivefold checkpoint reshard runs/demo --layout tp=2,pp=2 -o runs/demo-4

      fivefold checkpoint reshard runs/demo --step 100 --layout dp=8,zero=3 -o runs/eight
    """
    from fivefold.checkpoint.find import find, run_of
    from fivefold.checkpoint.job import job_of
    from fivefold.checkpoint.reshard import reshard as cut
    from fivefold.checkpoint.store import Store
    from fivefold.job.config import to_toml
    from fivefold.layout.layout import Layout
    from fivefold.spec.hf_config import HF_CONFIG

    one = find(run, step)
    wanted = Layout.parse(layout)
    job = job_of(one, layout=wanted, run=output)
    if problems := job.layout.problems(job.model, seq=job.data.seq, batch=job.train.batch):
        raise UserError(problems)
    if damage := one.damage():
        raise UserError(damage)
    with whole_or_nothing(output), bytes_bar("writing", one.bytes) as advance:
        path = cut(one, job.model, wanted, job.data.seq, Store(output / "checkpoints"), advance)
        (output / "job.toml").write_text(to_toml(job))
        for name in ("tokenizer.json", HF_CONFIG):
            if (run_of(one) / name).is_file():
                shutil.copyfile(run_of(one) / name, output / name)
    typer.echo(f"{path}; go on with: fivefold train {output / 'job.toml'} --nproc {wanted.world}")
