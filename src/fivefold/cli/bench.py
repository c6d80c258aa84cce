"""`fivefold bench`: benchmarks, each of which keeps the command that repeats it."""

import csv as table
import io
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fivefold.cli.options import JobWords, Json, command, command_line, options_given, refuse, split
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import Result, console_of, show
from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from fivefold.bench.harness import OnProgress

SHORT = "Run benchmarks.  [dim]fivefold bench train llama3-8b[/]"
WRITES = (".json", ".csv")
app = typer.Typer(cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="Run benchmarks.")

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the model and the batch, as for train.", show_default=False
    ),
]
Rounds = Annotated[int, typer.Option(help="Timed steps of each system; medians are shown.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the figures: .json has all, .csv the rows of a table.")
]
Figures = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures: .json.")]


_Words = Annotated[
    list[str],
    typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train; with --cases MODEL[,KEY=VALUE]..."),
]
_Against = Annotated[
    str,
    typer.Option(
        help="Some of hf (Hugging Face transformers, compiled), fp8 (with 8-bit matmuls), fp8_experts (those of "
        "experts), deterministic (the same bits every time), eager (not compiled), with commas."
    ),
]
_Steps = Annotated[
    int | None, typer.Option(help="Timed steps per turn (default: 10) or case (default: 7); medians are shown.")
]
_Checkpoint = Annotated[
    bool, typer.Option("--checkpoint", help="Also save a checkpoint while training, and report the slowdown.")
]
_Profile = Annotated[bool, typer.Option("--profile", help="Show where a step's time goes, by kind of kernel.")]
_Cases = Annotated[
    bool, typer.Option("--cases", help="Time cases on one device, each compared with the planner's estimate.")
]
_Warm = Annotated[
    float, typer.Option(help="With --cases: warm-up seconds before timing, so that power throttling has set in.")
]
_Accelerator = Annotated[
    str | None,
    typer.Option(help="With --cases: plan for this, a name or a file of fivefold calibrate; else the device's."),
]
_Dtype = Annotated[
    str, typer.Option(help="With --cases: compute dtype, float32, bfloat16 or float64; auto: bfloat16 on a GPU.")
]


@command(app, "train", "Step time, MFU and memory of a job.  [dim]fivefold bench train llama3-8b[/]", WRITES)
def train(
    context: typer.Context,
    words: _Words,
    against: _Against = "none",
    steps: _Steps = None,
    rounds: Annotated[
        int | None, typer.Option(help="Turns of each system; default: 2, or 1 if there is only one.")
    ] = None,
    checkpoint: _Checkpoint = False,
    profile: _Profile = False,
    floor: Annotated[
        bool, typer.Option("--floor", help="Time each component alone: the lower bound of a step.")
    ] = False,
    cases: _Cases = False,
    warm: _Warm = 2.0,
    accelerator: _Accelerator = None,
    device: Annotated[str, typer.Option(help="With --cases: auto, cpu or cuda.")] = "auto",
    dtype: _Dtype = "auto",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the trainer's own steps on this device: tokens/s, MFU, peak memory.

    MFU counts attention full, and of experts those that a token visits.

    Tokens are random; everything else is `fivefold train`, with its data and metrics.
    Systems take turns, each turn in a process of its own, from the same weights:
    the table shows their first losses.
    train.deterministic=false unless you ask for it.

    With --cases, each word is a case: a model with KEY=VALUE changes after commas,
    alternatives between slashes, of layers, seq, samples (of a microbatch),
    microbatches, recompute and compile. Each is compared with the planner's estimate.
    The table names cases that do not fit into memory.

    [dim]Examples:[/]

      fivefold bench train llama3-8b model.layers=12 train.batch=2 data.seq=8192 --against hf,fp8

      fivefold bench train qwen3-30b-a3b model.layers=6 train.batch=4 data.seq=4096 --against hf --floor

      fivefold bench train llama3.2-3b train.batch=4 data.seq=8192 --checkpoint --profile

      fivefold bench train job.toml --json

      fivefold bench train --cases tiny,seq=128,samples=1/4

      fivefold bench train --cases llama3.2-1b,seq=2048/4096,recompute=none/full -o steps.csv

      fivefold bench train --cases llama3-8b,layers=4/8,seq=8192 --accelerator mine.toml
    """
    from fivefold.bench.steps import measure as measure_cases
    from fivefold.bench.train import Extras, measure

    if cases:
        refuse(options_given(context, _OF_JOBS), "is of a job, and --cases times cases; leave one of them out")
        arguments = (words, _or(steps, 7), warm, accelerator, device, dtype_of(dtype))
        measure_and_show(lambda progress: measure_cases(*arguments, progress), as_json, output)
        return
    refuse(options_given(context, _OF_CASES), "is of --cases; add it, or leave this out")
    if output is not None and output.suffix == ".csv":
        raise UserError(f"-o {output} is for the rows of --cases; the figures of a job are .json", "output.kind")
    extras = Extras(checkpoint, profile, floor)
    measure_and_show(
        lambda progress: [measure(words, against, _or(steps, 10), rounds, extras, progress)], as_json, output
    )


_Rounds = Annotated[
    int | None, typer.Option(help="Timed steps of each system; default: 5, with --overhead 7, with --scaling 3.")
]
_Only = Annotated[
    str | None,
    typer.Option(help="Comma-separated subset of dp,tp,pp,cp,zero; with --scaling of dp,tp,pp,cp,3d, or ep (experts)."),
]
_Overhead = Annotated[
    bool, typer.Option("--overhead", help="Compare one process with a bare PyTorch loop and with Hugging Face.")
]
_Batch = Annotated[
    int | None, typer.Option(help="With --scaling: sequences per step; default: 16 for all.", show_default=False)
]
_Predict = Annotated[
    bool, typer.Option("--predict", help="With --scaling: measure the cores, too, and show the prediction.")
]


# {parameter: option}: the options that belong to --cases alone, and those that belong to a job alone.
_OF_CASES = {name: f"--{name}" for name in ("warm", "accelerator", "device", "dtype")}
_OF_JOBS = {name: f"--{name}" for name in ("against", "rounds", "checkpoint", "profile", "floor")}


@command(app, "peers", "Against torch's own parallelisms.  [dim]fivefold bench peers --ranks 2[/]", WRITES)
def peers(
    context: typer.Context,
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the multi-rank systems; with --scaling the maximum.")] = 2,
    rounds: _Rounds = None,
    only: _Only = None,
    overhead: _Overhead = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Scale Fivefold alone from one rank to many.")] = False,
    least: Annotated[int, typer.Option(help="With --scaling: the minimum of ranks.")] = 2,
    batch: _Batch = None,
    predict: _Predict = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """The same training step on CPU ranks: Fivefold, DDP, DTensor, FSDP2 and torch.distributed.pipelining, in turns.

    Every system is compared with its own step in one process, and its first loss
    with the others'. One rank has one thread.

    With --overhead, Fivefold in one process is compared with a bare PyTorch loop
    around the same model, and with Hugging Face's. With --scaling, tp, dp, pp, cp and
    3D layouts of the same batch go from one rank to many; a rank's share of the batch is one
    microbatch, and stages take it a sequence at a time. --predict adds the simulator's
    prediction, from what a core and its links reach while as many of them are at work.
    Experts are shown as a fraction of one process, next to the limit without any
    communication, and with the real load of the most loaded rank.

    [dim]Examples:[/]

      fivefold bench peers

      fivefold bench peers --only tp,pp model.layers=4

      fivefold bench peers --overhead model.layers=2 model.hidden=256 --rounds 11

      fivefold bench peers --scaling --ranks 16 --predict

      fivefold bench peers --scaling --ranks 4 --only ep --predict
    """
    from fivefold.bench import comparison

    if overhead and scaling:
        raise UserError("--overhead is of one process, and --scaling of many; give one of them", "option.conflict")
    if not scaling:
        of_scaling = {name: f"--{name}" for name in ("least", "batch", "predict")}
        refuse(options_given(context, of_scaling), "is of --scaling; add it, or leave this out")
    if overhead:
        refuse(
            options_given(context, {"ranks": "--ranks", "only": "--only"}), "is of several ranks, and --overhead of one"
        )
        measure_and_show(
            lambda progress: [comparison.overhead(changes or [], _or(rounds, 7), progress)], as_json, output
        )
    elif scaling:
        from fivefold.bench.scaling import scaling as measure_scaling

        axes = "dp,tp,pp,cp,3d" if only is None else only
        measure_and_show(
            lambda progress: measure_scaling(
                changes or [], ranks, least, _or(rounds, 3), batch, axes, predict, progress
            ),
            as_json,
            output,
        )
    else:
        axes = "dp,tp,pp,cp,zero" if only is None else only
        measure_and_show(
            lambda progress: [comparison.peers(changes or [], ranks, _or(rounds, 5), axes, progress)],
            as_json,
            output,
        )


_Optimizers = Annotated[
    str,
    typer.Option(help="Comma-separated names, built-in or package.module:Name; all are compared with the first."),
]


@command(app, "optimizer", "The update alone, by optimizer.  [dim]fivefold bench optimizer small[/]", (".json",))
def optimizer(
    words: Annotated[
        list[str], typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train, with any layout.")
    ],
    optimizers: _Optimizers = "adamw,muon",
    rounds: Annotated[int, typer.Option(help="Timed updates of each optimizer; medians are shown.")] = 9,
    output: Figures = None,
    as_json: Json = False,
) -> None:
    """Time the optimizer's update alone: no forward or backward pass, no gradient norm, no gather of weights.

    The layout's ranks run on this machine. The optimizers take turns on the same
    weights and random gradients, and a round takes as long as its slowest rank.

    The table shows the bytes and FLOPs that the planner counts, and which share of the
    measured time they would take at the bandwidth and FLOP/s measured on these ranks.
    The job's optimizer uses the job's settings; the others use their defaults.

    [dim]Examples:[/]

      fivefold bench optimizer small layout=dp=2,zero=1 train.dtype=float32

      fivefold bench optimizer llama3-8b model.layers=3

      fivefold bench optimizer tiny --optimizers adamw,fivefold_lion:Lion --json
    """
    from fivefold.bench.optimizer import measure

    measure_and_show(lambda progress: [measure(words, optimizers, rounds, progress)], as_json, output)


_Recovery = Annotated[
    bool, typer.Option("--recovery", help="Time how restarted ranks recover their state, instead of saves.")
]
_CheckpointSteps = Annotated[
    int | None, typer.Option(help="Steps before each save, and while it is written; default: 6, with --recovery 4.")
]
_Directory = Annotated[
    Path | None, typer.Option(help="Directory on the disk to measure; default: the system's temporary directory.")
]
_Timeout = Annotated[
    float | None, typer.Option(help="Seconds for the whole run, 1200; with --recovery for each start, 600.")
]


@command(app, "checkpoint", "What checkpoints cost.  [dim]fivefold bench checkpoint model=small[/]", (".json",))
def checkpoint(
    job: JobWords = None,
    recovery: _Recovery = False,
    rounds: Annotated[int, typer.Option(help="Saves and loads, or starts, of each kind, in turns.")] = 5,
    steps: _CheckpointSteps = None,
    directory: _Directory = None,
    timeout: _Timeout = None,
    output: Figures = None,
    as_json: Json = False,
) -> None:
    """Time what steps lose to an asynchronous save, and how fast files are written and read.

    The job's ranks are started on this machine. Save and load of the same state
    take turns with DCP alone and with plain torch.save. No file is left behind.

    With --recovery, ranks are restarted, and recover their state from memory, and from
    disk. Each restart is of new processes. Before one from disk, its files are dropped from
    the page cache. Loading ends when weights and moments are in place, hashed. How much
    a snapshot slows the steps down is measured, too.

    [dim]Examples:[/]

      fivefold bench checkpoint model=small data.seq=64

      fivefold bench checkpoint model=small layout=dp=2,zero=1 --rounds 7 --json

      fivefold bench checkpoint --recovery model=small data.seq=64 train.batch=2 layout=dp=2,zero=1

      fivefold bench checkpoint --recovery model=small checkpoint.memory_every=5 --rounds 9 --json
    """
    from fivefold.bench.checkpoint import BenchOptions, measure, measure_recovery

    function, default_steps, default_timeout = (measure_recovery, 4, 600.0) if recovery else (measure, 6, 1200.0)
    limit = default_timeout if timeout is None else timeout
    options = BenchOptions(rounds, _or(steps, default_steps), directory, limit)
    measure_and_show(lambda progress: [function(*split(job), options, progress)], as_json, output)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def measure_and_show(
    measure: "Callable[[OnProgress], Iterable[Result]]", as_json: bool, output: Path | None = None
) -> None:
    """Measure, and show the last result. Each result is written to `output`, so that nothing is lost if the user stops
    the command.

    The status line says what is measured now; each measurement leaves a line with its seconds.
    """
    console = console_of(stderr=True)
    current: tuple[str, float] | None = None  # what is measured, and since when

    def on_progress(what: str) -> None:
        nonlocal current
        if current:
            last, start = current
            console.print(f"{last}: {time.monotonic() - start:.0f} s", style="dim", markup=False)
        current = what, time.monotonic()
        status.update(what)

    with console.status("") as status:
        for result in measure(on_progress):
            written = output is None or _write(result, output)
        on_progress("")
    show(result, as_json)
    if not written:
        raise typer.Exit(1)


def _write(result: Result, output: Path) -> bool:
    """Write the figures; returns False, after a sentence, if the file cannot be written."""
    try:
        if output.suffix == ".csv":
            rows: Any = getattr(result, "rows", None)
            output.write_text(_csv(command_line(), rows() if callable(rows) else rows))
        else:
            rows = result.to_dict()
            figures = rows if isinstance(rows, dict) else {"rows": rows}
            output.write_text(json.dumps({"command": command_line()} | figures, indent=1) + "\n")
    except OSError as error:
        Console(stderr=True, soft_wrap=True).print(f"--output {output} was not written: {error.strerror}", markup=False)
        return False
    return True


def _csv(command: str, rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    text.write(f"# {command}\n")
    writer = table.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
