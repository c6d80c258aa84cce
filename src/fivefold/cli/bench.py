"""`fivefold bench`: benchmarks, each of which keeps the command that repeats it."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.measuring import Changes, measure_and_show
from fivefold.cli.options import JobWords, Json, command, options_given, refuse, split_job_and_changes
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import UserError

SHORT = "Run benchmarks.  [dim]fivefold bench train llama3-8b[/]"
OUTPUT_SUFFIXES = (".json", ".csv")
app = typer.Typer(cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="Run benchmarks.")

JsonOrCsvOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the figures: .json has all, .csv the rows of a table.")
]
JsonOutput = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures: .json.")]
# {parameter: option}
_CASES_ONLY_OPTIONS = {name: f"--{name}" for name in ("warm", "accelerator", "device", "dtype")}
_JOB_ONLY_OPTIONS = {name: f"--{name}" for name in ("against", "rounds", "checkpoint", "profile", "floor")}
_SCALING_ONLY_OPTIONS = {"min_ranks": "--min-ranks", "batch": "--batch", "predict": "--predict"}
_MULTI_RANK_OPTIONS = {"ranks": "--ranks", "only": "--only"}


_Words = Annotated[
    list[str],
    typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train; with --cases MODEL[,KEY=VALUE]..."),
]
_Against = Annotated[
    str,
    typer.Option(
        help="Comma-separated: hf (Hugging Face transformers, compiled), torchtitan (0.2: float32 weights under "
        "autocast, its default on one GPU), torchtitan_bf16, fp8 (8-bit matmuls), fp8_experts (8-bit expert "
        "matmuls only), deterministic (the same bits every time), eager (not compiled)."
    ),
]
_Steps = Annotated[
    int | None, typer.Option(help="Timed steps per turn (default: 10) or case (default: 7); shows medians.")
]
_Checkpoint = Annotated[
    bool, typer.Option("--checkpoint", help="Also save a checkpoint while training, and report the slowdown.")
]
_Profile = Annotated[bool, typer.Option("--profile", help="Show where a step's time goes, by kind of kernel.")]
_Cases = Annotated[
    bool, typer.Option("--cases", help="Time cases on one device, each compared with the planner's estimate.")
]
_WarmUp = Annotated[
    float, typer.Option("--warm", help="With --cases: seconds to warm up, until power throttling has set in.")
]
_Accelerator = Annotated[
    str | None,
    typer.Option(help="With --cases: plan for this, a name or a file of fivefold calibrate; default: the device."),
]
_Dtype = Annotated[
    str, typer.Option(help="With --cases: compute dtype, float32, bfloat16 or float64; auto: bfloat16 on a GPU.")
]


@command(app, "train", "Step time, MFU and memory of a job.  [dim]fivefold bench train llama3-8b[/]", OUTPUT_SUFFIXES)
def train(
    context: typer.Context,
    words: _Words,
    against: _Against = "none",
    steps: _Steps = None,
    rounds: Annotated[
        int | None, typer.Option(help="Turns of each system; default: 2, or 1 for a single system.")
    ] = None,
    checkpoint: _Checkpoint = False,
    profile: _Profile = False,
    floor: Annotated[
        bool, typer.Option("--floor", help="Time each component alone: the lower bound of a step.")
    ] = False,
    cases: _Cases = False,
    warm: _WarmUp = 2.0,
    accelerator: _Accelerator = None,
    device: Annotated[str, typer.Option(help="With --cases: auto, cpu or cuda.")] = "auto",
    dtype: _Dtype = "auto",
    output: JsonOrCsvOutput = None,
    as_json: Json = False,
) -> None:
    """Time the trainer's own steps on this device: tokens/s, MFU, peak memory.

    MFU counts full (non-causal) attention and only the activated experts.

    Tokens are random; everything else runs as in `fivefold train`, including the
    data loader and metrics. Systems take turns, each turn in a process of its own.
    They start from the same weights, so their first losses, shown in the table,
    should agree. Determinism is off unless the job sets train.deterministic=true.

    With --cases, each word is a case: a model, then KEY=VALUE changes after commas.
    KEY=A/B tries alternatives. Keys: layers, seq, samples (per microbatch),
    microbatches, recompute, compile. Each case is compared with the planner's
    estimate; the table names cases that do not fit into memory.

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
        refuse(
            options_given(context, _JOB_ONLY_OPTIONS),
            "cannot be combined with --cases, which times cases and not a job",
        )
        timed, dtype = _default(steps, 7), dtype_of(dtype)
        measure_and_show(
            lambda progress: measure_cases(
                words, timed, progress, warm_up=warm, accelerator=accelerator, device=device, dtype=dtype
            ),
            as_json=as_json,
            output=output,
        )
        return
    refuse(options_given(context, _CASES_ONLY_OPTIONS), "needs --cases")
    if output is not None and output.suffix == ".csv":
        raise UserError(f"-o {output} needs --cases; the figures of a job are written as .json", "output.kind")
    extras = Extras(checkpoint=checkpoint, profile=profile, floor=floor)
    measure_and_show(
        lambda progress: [measure(words, against, _default(steps, 10), rounds, extras, progress)],
        as_json=as_json,
        output=output,
    )


_Rounds = Annotated[
    int | None, typer.Option(help="Timed steps of each system; default: 5 (7 with --overhead, 3 with --scaling).")
]
_Only = Annotated[
    str | None,
    typer.Option(help="Comma-separated subset of dp,tp,pp,cp,zero; with --scaling: dp,tp,pp,cp,3d, or ep (experts)."),
]
_Overhead = Annotated[
    bool, typer.Option("--overhead", help="Compare one process with a bare PyTorch loop and with Hugging Face.")
]
_Batch = Annotated[
    int | None, typer.Option(help="With --scaling: sequences per step; default: 16.", show_default=False)
]
_Predict = Annotated[
    bool, typer.Option("--predict", help="With --scaling: also calibrate the CPU cores and show the predicted time.")
]


@command(app, "peers", "Against torch's own parallelisms.  [dim]fivefold bench peers --ranks 2[/]", OUTPUT_SUFFIXES)
def peers(
    context: typer.Context,
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the multi-rank systems; with --scaling: the maximum.")] = 2,
    rounds: _Rounds = None,
    only: _Only = None,
    overhead: _Overhead = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Scale Fivefold alone from one rank to many.")] = False,
    min_ranks: Annotated[int, typer.Option(help="With --scaling: minimum number of ranks.")] = 2,
    batch: _Batch = None,
    predict: _Predict = False,
    output: JsonOrCsvOutput = None,
    as_json: Json = False,
) -> None:
    """The same training step on CPU ranks: Fivefold, DDP, DTensor, FSDP2 and torch.distributed.pipelining, in turns.

    Every system is compared with its own step in one process, and its first loss
    with the others'. Each rank has one thread.

    With --overhead, Fivefold in one process is compared with a bare PyTorch loop
    around the same model, and with Hugging Face's model.

    With --scaling, tp, dp, pp, cp and 3D layouts of the same batch go from one rank
    to many. A rank's share of the batch is one microbatch; pipeline stages process it
    one sequence at a time. --predict adds the simulator's prediction, from what a core
    and its links reach while as many of them are at work. Experts are shown as a
    fraction of one process, next to the limit without any communication, with the real
    load of the most loaded rank.

    [dim]Examples:[/]

      fivefold bench peers

      fivefold bench peers --only tp,pp model.layers=4

      fivefold bench peers --overhead model.layers=2 model.hidden=256 --rounds 11

      fivefold bench peers --scaling --ranks 16 --predict

      fivefold bench peers --scaling --ranks 4 --only ep --predict
    """
    from fivefold.bench import comparison

    if overhead and scaling:
        raise UserError("--overhead uses one process and --scaling many; give one of them", "option.conflict")
    if not scaling:
        refuse(options_given(context, _SCALING_ONLY_OPTIONS), "needs --scaling")
    if overhead:
        refuse(options_given(context, _MULTI_RANK_OPTIONS), "cannot be combined with --overhead, which uses one rank")
        measure_and_show(
            lambda progress: [comparison.overhead(changes or [], _default(rounds, 7), progress)],
            as_json=as_json,
            output=output,
        )
    elif scaling:
        from fivefold.bench.scaling import scaling as measure_scaling

        measure_and_show(
            lambda progress: measure_scaling(
                changes or [],
                progress,
                ranks=ranks,
                min_ranks=min_ranks,
                rounds=_default(rounds, 3),
                batch=batch,
                only="dp,tp,pp,cp,3d" if only is None else only,
                predict=predict,
            ),
            as_json=as_json,
            output=output,
        )
    else:
        axes = "dp,tp,pp,cp,zero" if only is None else only
        measure_and_show(
            lambda progress: [comparison.peers(changes or [], ranks, _default(rounds, 5), axes, progress)],
            as_json=as_json,
            output=output,
        )


_Optimizers = Annotated[
    str,
    typer.Option(help="Comma-separated, built-in or package.module:Name; all are compared with the first."),
]


@command(app, "optimizer", "The update alone, by optimizer.  [dim]fivefold bench optimizer small[/]", (".json",))
def optimizer(
    words: Annotated[
        list[str], typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train, with any layout.")
    ],
    optimizers: _Optimizers = "adamw,muon",
    rounds: Annotated[int, typer.Option(help="Timed updates of each optimizer; shows medians.")] = 9,
    output: JsonOutput = None,
    as_json: Json = False,
) -> None:
    """Time the optimizer's update alone: no forward or backward pass, no gradient norm, no gather of weights.

    The layout's ranks run on this machine. The optimizers take turns on the same
    weights and random gradients, and a round takes as long as its slowest rank.

    The table shows the bytes and FLOPs that the planner counts, and the share of the
    measured time that they would take at the bandwidth and FLOP/s of these ranks.
    The job's optimizer uses the job's settings; the others use their defaults.

    [dim]Examples:[/]

      fivefold bench optimizer small layout=dp=2,zero=1 train.dtype=float32

      fivefold bench optimizer llama3-8b model.layers=3

      fivefold bench optimizer tiny --optimizers adamw,fivefold_lion:Lion --json
    """
    from fivefold.bench.optimizer import measure

    measure_and_show(lambda progress: [measure(words, optimizers, rounds, progress)], as_json=as_json, output=output)


_Recovery = Annotated[
    bool, typer.Option("--recovery", help="Time how restarted ranks recover their state, instead of saves.")
]
_CheckpointSteps = Annotated[
    int | None, typer.Option(help="Steps before each save, and while it is written; default: 6 (4 with --recovery).")
]
_Directory = Annotated[
    Path | None, typer.Option(help="Directory on the disk to measure; default: the system's temporary directory.")
]
_Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds for the whole run (default: 1200), or with --recovery for each start (600)."),
]


@command(app, "checkpoint", "What checkpoints cost.  [dim]fivefold bench checkpoint model=small[/]", (".json",))
def checkpoint(
    job: JobWords = None,
    recovery: _Recovery = False,
    rounds: Annotated[int, typer.Option(help="Saves and loads, or starts, of each kind, in turns.")] = 5,
    steps: _CheckpointSteps = None,
    directory: _Directory = None,
    timeout: _Timeout = None,
    output: JsonOutput = None,
    as_json: Json = False,
) -> None:
    """Time the slowdown of steps during an asynchronous save, and how fast files are written and read.

    The job's ranks run on this machine. Save and load of the same state take turns
    with DCP alone and with plain torch.save. No file is left behind.

    With --recovery, ranks are restarted and recover their state from memory or from
    disk. Each restart starts new processes; before a restart from disk, its files are
    evicted from the page cache. Loading ends when weights and moments are loaded and
    hash-verified. The slowdown of steps by a snapshot is measured as well.

    [dim]Examples:[/]

      fivefold bench checkpoint model=small data.seq=64

      fivefold bench checkpoint model=small layout=dp=2,zero=1 --rounds 7 --json

      fivefold bench checkpoint --recovery model=small data.seq=64 train.batch=2 layout=dp=2,zero=1

      fivefold bench checkpoint --recovery model=small checkpoint.memory_every=5 --rounds 9 --json
    """
    from fivefold.bench.checkpoint import BenchOptions, measure, measure_recovery

    default_steps, default_timeout = (4, 600.0) if recovery else (6, 1200.0)
    options = BenchOptions(
        rounds, _default(steps, default_steps), directory, default_timeout if timeout is None else timeout
    )
    path, changes = split_job_and_changes(job)
    run = measure_recovery if recovery else measure
    measure_and_show(lambda progress: [run(path, changes, options, progress)], as_json=as_json, output=output)


def _default(value: int | None, default: int) -> int:
    return default if value is None else value
