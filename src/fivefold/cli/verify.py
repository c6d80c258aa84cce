"""`fivefold verify`: a layout, held against one process."""

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.job.config import Job
    from fivefold.verify.layouts import Case
    from fivefold.verify.verdict import Verdict
    from fivefold.verify.verify import Judge

SHORT = "Prove a layout against one process.  [dim]fivefold verify --layout dp=2,tp=2,zero=3[/]"
# Models of its own size, so that a layout takes a second: the families of the presets, narrow.
_NARROW = ("model.hidden=64", "model.ffn=96")
_LAYERS = 2  # more where a layout has more stages
_DEFAULT = "dp=2"
_SHOWN = 10  # failing layouts of a sweep that are told in full
_STACK = 8  # lines of the stack of a rank that failed


def verify(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the job, as for train.", show_default=False),
    ] = None,
    layout: Annotated[str, typer.Option(help="The layout to prove.")] = _DEFAULT,
    model: Annotated[str, typer.Option(help="A preset; tiny ones are made narrower still.")] = "tiny",
    dtype: Annotated[Literal["float64", "float32", "bfloat16"], typer.Option(help="Of compute.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 32,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a global batch; default: 8, or with --all twice --world.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="On cuda, ranks may share a GPU.")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Every legal layout of --world ranks.")] = False,
    world: Annotated[int | None, typer.Option(help="With --all: how many ranks; default: 4.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="With --all: this many, chosen to meet every pair of settings.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one layout.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Prove that a layout computes what one process computes, and sends what it should.

    Starts the ranks on this machine and trains both from the same weights on
    the same data, which has unequal loss masks, a rank without any, and packed
    documents. Every step's loss, gradient norm and gradients are compared, and
    the parameters at the end; collectives are counted and held against closed
    forms. Exit code 0 if all hold, 1 if not.

    [dim]Examples:[/]

      fivefold verify --layout dp=2,tp=2,zero=3

      fivefold verify --layout cp=4,cp_kind=ulysses --model tiny-qwen3

      fivefold verify --layout tp=2,sp model.kv_heads=1 --dtype float32

      fivefold verify --layout dp=2,tp=2,pp=2,microbatches=4,schedule=zb-h1

      fivefold verify --all --world 4

      fivefold verify --all --world 8 --sample 30 --json
    """
    from fivefold.verify.layouts import Case, all_cases, covered, pairwise
    from fivefold.verify.verify import Judge

    _check(layout, everything, world, sample, timeout)
    world = 4 if world is None else world
    deepen = model.startswith("tiny") and not any(one.startswith("model.layers=") for one in changes or [])
    if batch is None:
        batch = max(8, 2 * world) if everything else 8
    narrow = list(_NARROW) if model.startswith("tiny") else []
    if deepen:
        narrow.append(f"model.layers={_layers('dp=1' if everything else layout)}")
    job = _job(
        layout if not everything else "dp=1", model, dtype, steps, seq, batch, device, [*narrow, *(changes or [])]
    )
    total = all_cases(job, world, deepen) if everything else [Case(job, "")]
    chosen = total if sample is None else pairwise(total, sample)
    try:
        with Judge(timeout) as judge:
            judged = _sweep(judge, chosen)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; nothing is proven")
        raise typer.Exit(130) from None
    if everything:
        _show_all(judged, total, covered(chosen, total), as_json)
    else:
        _show_one(judged[0][1], as_json)
    raise typer.Exit(0 if all(verdict.passed for _, verdict in judged) else 1)


def _check(layout: str, everything: bool, world: int | None, sample: int | None, timeout: float) -> None:
    """Options that make no sense, alone or together."""
    if sample is not None and sample < 1:
        raise UserError(f"--sample {sample} takes no layout; nearest: --sample 1")
    if world is not None and world < 1:
        raise UserError(f"--world {world} has no ranks; nearest: --world 1")
    if timeout <= 0:
        raise UserError(f"--timeout {timeout:g} leaves no time; nearest: --timeout 120")
    if everything and layout != _DEFAULT:
        raise UserError(f"--all takes every layout of --world ranks, and --layout {layout} names one; leave one out")
    if not everything and (world is not None or sample is not None):
        raise UserError("--world and --sample belong to --all; one layout says its own number of ranks")


def _layers(text: str) -> int:
    """As many as a layout says, or as it needs to fill its stages; the ends may have none but embedding and head."""
    from fivefold.layout.layout import Layout

    layout = Layout.parse(text)
    return sum(layout.split) or max(_LAYERS, layout.stages - 2)


def _job(
    layout: str, model: str, dtype: str, steps: int, seq: int, batch: int, device: str, changes: list[str]
) -> "Job":
    from fivefold.job.config import read_job
    from fivefold.plan.memory_check import proof_problems
    from fivefold.verify.compare import OPTIMIZER

    settings = {
        "model.preset": model,
        "layout": layout,
        "data.seq": seq,
        "data.document_mask": "true",
        "train.batch": batch,
        "train.steps": steps,
        "train.dtype": dtype,
        "train.device": device,
    }
    settings |= {f"optimizer.{key}": value for key, value in OPTIMIZER.items()}
    job = read_job(None, [*(f"{key}={value}" for key, value in settings.items()), *changes])
    rounding = "train.fp8=true rounds by what a rank sees, so layouts agree as far as 8 bits do; prove train.fp8=false"
    if problems := job.problems() or ([rounding] if job.train.fp8 else proof_problems(job)):
        raise UserError(problems)
    return job


def _sweep(judge: "Judge", cases: list["Case"]) -> list[tuple["Case", "Verdict"]]:
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    judged = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.job.layout} {case.variant}")
            judged.append((case, judge(case.job)))
            progress.advance(task)
    return judged


def _show_one(verdict: "Verdict", as_json: bool) -> None:
    from fivefold.verify.tables import numbers, row

    if as_json:
        typer.echo(json.dumps(row(verdict)))
        return
    console = Console(highlight=False)
    console.print(numbers(verdict))
    for problem in verdict.problems:
        console.print(Text.assemble(("fails: ", "bold red"), problem))
    if verdict.passed:
        console.print(f"[bold green]holds[/]  in {verdict.seconds:.1f} s on {verdict.job.layout.world} ranks")


def _show_all(judged: list[tuple["Case", "Verdict"]], total: list["Case"], share: float, as_json: bool) -> None:
    from fivefold.verify.tables import row, summary

    failing = [(case, verdict) for case, verdict in judged if not verdict.passed]
    if as_json:
        rows = [row(verdict, case.variant) for case, verdict in judged]
        counts = {"sampled": len(judged), "total": len(total), "pairs_met": round(share, 4)}
        typer.echo(json.dumps({"passed": not failing, **counts, "failed": len(failing), "layouts": rows}))
        return
    console = Console(highlight=False)
    console.print(summary(judged))
    for case, verdict in failing[:_SHOWN]:
        console.print(Text.assemble(("fails: ", "bold red"), f"{verdict.job.layout} {case.variant}".strip()))
        for line in (*verdict.problems, *verdict.details.splitlines()[-_STACK:]):
            console.print(f"  {line}", markup=False)
    if (more := len(failing) - _SHOWN) > 0:
        console.print(f"{more} more fail; --json has them all")
    sampled = f"{len(judged)}/{len(total)} layouts"
    pairs = "" if len(judged) == len(total) else f", {share:.0%} of all pairs of settings"
    mark = "[bold red]fail[/]" if failing else "[bold green]all hold[/]"
    console.print(f"{sampled}{pairs}: {f'{len(failing)} ' if failing else ''}{mark}")
