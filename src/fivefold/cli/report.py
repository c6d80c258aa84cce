"""`fivefold report`: a plan, a schedule, a run or a proof as one HTML file."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.job_args import whole_layout
from fivefold.cli.plan import Batch, ClusterText, Imbalance, Json, Precision, Seq, Software, Words
from fivefold.cli.schedules import Chunks, Group, Memory, Microbatches, Overlap, Ranks, Sends, Slow, TimesText
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.render.blocks import Result

SHORT = "Write one HTML file to send.  [dim]fivefold report plan llama3-70b --cluster 8x8xH100[/]"
app = typer.Typer(
    help="Write what a command finds as one HTML file: the page of `fivefold ui`, with its figures inside. "
    "It needs no server and no network.",
    no_args_is_help=True,
)
TOP = 12  # layouts of the ranking


Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]


def write_report(found: "Result | Path", output: Path, as_json: bool = False) -> None:
    """Write the file, and say where it is."""
    from fivefold.render.blocks import show
    from fivefold.web.report import report

    show(report(found, output, shlex.join(["fivefold", *sys.argv[1:]])), as_json)


def _check(output: Path) -> None:
    from fivefold.render.blocks import check_writable

    check_writable(output, ".html", ".htm")


@app.command("plan", short_help="A plan.  [dim]fivefold report plan llama3-70b --cluster 8x8xH100[/]")
def plan(
    words: Words,
    cluster: ClusterText = None,
    batch: Batch = None,
    seq: Seq = None,
    layout: Annotated[str | None, typer.Option(help="Show this layout, beside the planner's choice.")] = None,
    fix: Annotated[str, typer.Option(help="Choices to keep: tp=8,zero=1,recompute=none.")] = "",
    precision: Precision = "",
    software: Software = "fivefold",
    imbalance: Imbalance = None,
    output: Output = Path("plan.html"),
    as_json: Json = False,
) -> None:
    """Write a plan: memory, time and traffic of the layout, the layouts one change away, and the ranking.

    [dim]Examples:[/]

      fivefold report plan llama3-70b --cluster 8x8xH100

      fivefold report plan job.toml --cluster 2x8xH100 --layout dp=2,tp=8,zero=1,sp,microbatches=16 -o ours.html
    """
    from fivefold.planner import plan as planning

    whole_layout(layout or fix, words, "--layout" if layout else "--fix")
    _check(output)
    found = planning.plan(
        words[0], cluster, changes=words[1:], batch=batch, seq=seq, layout=layout, fix=fix, top=TOP,
        precision=precision, software=software, imbalance=imbalance,
    )  # fmt: skip
    write_report(found, output, as_json)


@app.command("schedule", short_help="A schedule.  [dim]fivefold report schedule zb-v --pp 4 --microbatches 8[/]")
def schedule(
    schedules: Annotated[list[str], typer.Argument(help="Names of schedules, or files; each gets a tab.")],
    pp: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    output: Output = Path("schedule.html"),
    as_json: Json = False,
) -> None:
    """Write a schedule: who computes what when, what waits for what, memory, and the other schedules beside it.

    [dim]Examples:[/]

      fivefold report schedule zb-v --pp 4 --microbatches 8

      fivefold report schedule 1f1b zb-h1 mine.txt --pp 4 --microbatches 8 --slow 1=1.5 -o compared.html
    """
    from fivefold.schedules.result import draw

    _check(output)
    found = draw(*schedules, pp=pp, microbatches=microbatches, chunks=chunks, group=group, memory=memory, times=times,
                 slow=slow, sends=sends, overlap=overlap)  # fmt: skip
    write_report(found, output, as_json)


@app.command("run", short_help="A run.  [dim]fivefold report run runs/demo[/]")
def run(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or one with runs in it.")],
    output: Output = Path("run.html"),
    as_json: Json = False,
) -> None:
    """Write a run: its curves, its events, its load of experts, its trace, its job and environment.

    It is made to be sent: of a path the last part is left, and the names of hosts are left out.

    [dim]Examples:[/]

      fivefold report run runs/demo

      fivefold report run runs -o all.html
    """
    _check(output)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give a run's, or one that has runs in it")
    write_report(directory, output, as_json)


@app.command("verify", short_help="A proof.  [dim]fivefold report verify --layout dp=2,tp=2[/]")
def verify(
    file: Annotated[
        Path | None, typer.Argument(help="What `fivefold verify --json` printed; without one, --layout is proven now.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout to prove.")] = None,
    model: Annotated[str, typer.Option(help="With --layout: a preset.")] = "tiny",
    steps: Annotated[int, typer.Option(help="With --layout: optimizer steps.")] = 3,
    output: Output = Path("verify.html"),
    as_json: Json = False,
) -> None:
    """Write a proof: a layout's losses, gradients, parameters, traffic and memory against one process.

    Exit code 1 if it was proven now, and does not hold.

    [dim]Examples:[/]

      fivefold report verify --layout dp=2,tp=2,zero=3

      fivefold verify --all --world 4 --json > sweep.json; fivefold report verify sweep.json -o sweep.html
    """
    from fivefold.verifier.verify import verify as prove

    _check(output)
    if (file is None) == (layout is None):
        raise UserError("give either a file that `fivefold verify --json` wrote, or --layout to prove one now")
    if file is not None:
        if file.is_dir():
            raise UserError(f"{file} is a directory; give what `fivefold verify --json` wrote, or `report run {file}`")
        write_report(file, output, as_json)
        return
    found = prove(layout, model=model, steps=steps)
    write_report(found, output, as_json)
    if not found.ok:
        raise typer.Exit(1)
