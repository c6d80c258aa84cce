"""`fivefold bench`: measurements, each with the command that repeats them."""

import csv as table
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli.job_args import JobWords, split
from fivefold.render.blocks import Result, check_writable, console_of, show
from fivefold.support.dtypes import dtype_of

if TYPE_CHECKING:
    from fivefold.bench.harness import Told

SHORT = "Measure how fast things are.  [dim]fivefold bench attention --tp 2[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Benchmarks.")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the model and the batch, as for train.", show_default=False
    ),
]
Rounds = Annotated[int, typer.Option(help="Timed steps of each system; medians are shown.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures here, as JSON.")]


@app.command(short_help="Build, check and simulate pipeline schedules.  [dim]fivefold bench schedules[/]")
def schedules(as_json: AsJson = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    [dim]Example:[/]

      fivefold bench schedules
    """
    from fivefold.bench.planner import measure_all

    show(measure_all(), as_json)


@app.command(short_help="How long planning takes.  [dim]fivefold bench plan[/]")
def plan(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Searches of each kind; medians are shown.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Time the planner's whole search, in this process, on one core.

    [dim]Example:[/]

      fivefold bench plan
    """
    from fivefold.bench.planner import measure

    show(measure(rounds), as_json)


@app.command(short_help="Tensor-parallel attention against one process.  [dim]fivefold bench attention --tp 2[/]")
def attention(
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width of the block.")] = 512,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads; 0: as many as heads.")] = 0,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Timed passes of each kind, in turns; medians are shown.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Run one attention block over real ranks and in one process, and compare.

    The same weights and input go through both: outputs and all gradients must
    agree, and forward and backward passes are timed in turns. One rank has one
    thread. Ranks beyond the machine's cores share them, and the table says so.

    [dim]Examples:[/]

      fivefold bench attention --tp 2

      fivefold bench attention --tp 4 --hidden 1024 --heads 16 --kv-heads 4

      fivefold bench attention --dtype float64 --json
    """
    from fivefold.bench.attention import AttentionShape, measure

    show(measure(AttentionShape(tp, hidden, heads, kv_heads or heads, seq, batch, dtype_of(dtype), rounds)), as_json)


@app.command(short_help="Pipeline schedules against their ideal and torch's.  [dim]fivefold bench pipeline[/]")
def pipeline(
    pp: Annotated[int, typer.Option(help="Ranks that share the layers.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed steps of each system, in turns.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time a step under 1f1b, zb-h1 and zb-v on real ranks.

    Each is compared with its ideal: one process's time, shared by the ranks, plus
    the schedule's own bubble, simulated from the durations of this machine. Each is
    also compared with torch.distributed.pipelining on the same stages. All take
    turns, one step each, and their gradients must agree. One rank has one thread.

    [dim]Examples:[/]

      fivefold bench pipeline

      fivefold bench pipeline --microbatches 4 --hidden 512 --rounds 15

      fivefold bench pipeline --pp 4 --layers 16 --json
    """
    from fivefold.bench.pipeline import PipelineShape, measure

    show(measure(PipelineShape(pp, microbatches, hidden, layers, seq, batch, rounds)), as_json)


@app.command(short_help="Experts' messages behind the other half of a pair.  [dim]fivefold bench overlap[/]")
def overlap(
    pp: Annotated[int, typer.Option(help="Pipeline ranks, each with two ranks of ep.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of a rank's batch.")] = 6,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 12,
    link: Annotated[float, typer.Option(help="Mbit/s each way between the two ranks of ep.")] = 50.0,
    rounds: Annotated[int, typer.Option(help="Timed steps of each way, in turns; medians are shown.")] = 7,
    injected: Annotated[bool, typer.Option("--injected", help="Inject the delay, also where tc could limit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time joined pairs (F&B) of a tiny mixture of experts over a limited link.

    One half after the other is compared with both in turns, as the trainer runs
    them: one computes while the other's tokens travel. The schedule is dualpipe-v;
    with --pp 1, each forward pass joined with the backward pass before it. As root
    the ranks of ep live in two network namespaces, and tc limits their wire;
    otherwise the delay is injected, and the output says so. Gradients must be equal
    to the bit. Beside it stands what the simulator says.

    [dim]Examples:[/]

      fivefold bench overlap

      fivefold bench overlap --pp 1 --layers 4 --rounds 15

      fivefold bench overlap --microbatches 12 --batch 24 --link 100 --json
    """
    from fivefold.bench.overlap import OverlapShape, measure

    show(measure(OverlapShape(pp, microbatches, hidden, layers, seq, batch, link, rounds, injected)), as_json)


@app.command(short_help="What a checkpoint costs.  [dim]fivefold bench checkpoint model=small[/]")
def checkpoint(
    job: JobWords = None,
    rounds: Annotated[int, typer.Option(help="Saves and loads of each kind, in turns; medians are shown.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps before each save, and beside its writing.")] = 6,
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to be measured; without it the system's for temporary files.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 1200.0,
    as_json: AsJson = False,
) -> None:
    """Time what steps lose to an asynchronous save, and how fast files are written and read.

    The job's ranks are started on this machine. Save and load of the same state
    take turns with DCP alone and with plain torch.save. No file is left behind.

    [dim]Examples:[/]

      fivefold bench checkpoint model=small data.seq=64

      fivefold bench checkpoint model=small layout=dp=2,zero=1 --rounds 7 --json
    """
    from fivefold.bench.checkpoint import measure

    _show(lambda told: [measure(*split(job), rounds, steps, directory, timeout, told)], as_json)


@app.command(short_help="Going on from memory against from disk.  [dim]fivefold bench recovery model=small[/]")
def recovery(
    job: JobWords = None,
    rounds: Annotated[int, typer.Option(help="Starts from each of the two, in turns; medians are shown.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps before each snapshot, and beside it.")] = 4,
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to be measured; without it the system's for temporary files.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each start.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Time how ranks that are started anew get their state: from memory, and from disk.

    Each start is of new processes. Before one from disk, its files are dropped from
    the page cache. Loading ends when weights and moments are in place, hashed.
    What a snapshot costs the steps beside it is measured, too. Nothing is left behind.

    [dim]Examples:[/]

      fivefold bench recovery model=small data.seq=64 train.batch=2 layout=dp=2,zero=1

      fivefold bench recovery model=small checkpoint.memory_every=5 --rounds 9 --json
    """
    from fivefold.bench.checkpoint import measure_recovery

    _show(lambda told: [measure_recovery(*split(job), rounds, steps, directory, timeout, told)], as_json)


@app.command(short_help="Training steps, measured and planned.  [dim]fivefold bench steps tiny,seq=128[/]")
def steps(
    words: Annotated[
        list[str], typer.Argument(metavar="MODEL[,KEY=VALUE]...", help="Cases; alternatives between slashes.")
    ],
    count: Annotated[int, typer.Option("--steps", help="Timed steps of each case; medians are shown.")] = 7,
    warm: Annotated[float, typer.Option(help="Seconds of steps before the timed ones: power limits show late.")] = 2.0,
    csv: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Plan for this one: a name, or a file of fivefold calibrate; else the device's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16; auto: bfloat16 on a GPU.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Time whole training steps on one device, and show the planner's estimate beside them.

    These are the trainer's own steps, with made-up tokens, float32 masters and
    kernels in any order of addition (train.deterministic=false). A case is a model
    with KEY=VALUE changes: layers, seq, samples (of a microbatch), microbatches,
    recompute and compile. The table names cases that do not fit into memory.

    [dim]Examples:[/]

      fivefold bench steps tiny,seq=128,samples=1/4

      fivefold bench steps llama3.2-1b,seq=2048/4096,recompute=none/full --csv steps.csv

      fivefold bench steps llama3-8b,layers=4/8,seq=8192 --accelerator mine.toml
    """
    from fivefold.bench.steps import measure

    _show(lambda told: [measure(words, count, warm, csv, accelerator, device, dtype_of(dtype), told)], as_json)


@app.command(short_help="What Fivefold adds to a bare loop.  [dim]fivefold bench overhead[/]")
def overhead(changes: Changes = None, rounds: Rounds = 7, output: Output = None, as_json: AsJson = False) -> None:
    """Compare Fivefold in one process with a bare PyTorch loop around the same model, and with Hugging Face's.

    [dim]Examples:[/]

      fivefold bench overhead

      fivefold bench overhead model.layers=2 model.hidden=256 --rounds 11
    """
    from fivefold.bench import comparison

    _show(lambda told: [comparison.overhead(changes or [], rounds, told)], as_json, output)


@app.command(short_help="Against torch's own parallelisms.  [dim]fivefold bench peers --ranks 2[/]")
def peers(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Ranks of every system that has several.")] = 2,
    rounds: Rounds = 5,
    only: Annotated[str, typer.Option(help="Some of dp,tp,pp,cp,zero, with commas.")] = "dp,tp,pp,cp,zero",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """The same training step on CPU ranks: Fivefold, DDP, DTensor, FSDP2 and torch.distributed.pipelining, in turns.

    Every system is compared with its own step in one process, and its first loss
    with the others'. One rank has one thread.

    [dim]Examples:[/]

      fivefold bench peers

      fivefold bench peers --only tp,pp model.layers=4
    """
    from fivefold.bench import comparison

    _show(lambda told: [comparison.peers(changes or [], ranks, rounds, only, told)], as_json, output)


@app.command(short_help="One rank to many.  [dim]fivefold bench scaling --ranks 4[/]")
def scaling(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Most ranks; smaller powers of two are measured, too.")] = 2,
    least: Annotated[int, typer.Option(help="Fewest ranks.")] = 2,
    rounds: Rounds = 3,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step, whatever the number of ranks; 16.", show_default=False)
    ] = None,
    only: Annotated[
        str, typer.Option(help="Some of dp,tp,pp,cp,3d, with commas; or ep, with a small mixture of experts.")
    ] = "dp,tp,pp,cp,3d",
    predict: Annotated[
        bool, typer.Option("--predict", help="Measure this machine's cores, too, and show the simulator's prediction.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Speed-up and efficiency of tp, dp, pp, cp and 3D layouts from one rank to many; the same batch for all.

    A rank's share of the batch is one microbatch; stages take it a sequence at a time.
    With --predict each row has the simulator's prediction, from what a core and its
    links reach while as many of them are at work. Experts are shown as a fraction of
    one process, beside the limit if nothing had to be sent, with the fullest rank's
    real load.

    [dim]Examples:[/]

      fivefold bench scaling --ranks 2

      fivefold bench scaling --ranks 16 --predict

      fivefold bench scaling --ranks 4 --only ep --predict
    """
    from fivefold.bench.scaling import scaling

    _show(lambda told: scaling(changes or [], ranks, least, rounds, batch, only, predict, told), as_json, output)


@app.command(short_help="Ranks of unequal speed.  [dim]fivefold bench mixed --ranks 4[/]")
def mixed(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Pipeline ranks; the second half of them is slowed.")] = 2,
    slow: Annotated[str, typer.Option(help="How many times slower, with commas.")] = "1.5,2",
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch, a sequence each.")] = 8,
    rounds: Rounds = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Measure speeds in fewer rounds, less sure.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures here: .csv has the table, .json all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a plan for unequal ranks gains over 1F1B with an even split: predicted, and measured.

    For each factor, ranks are slowed and their speeds measured while all of them
    run, as by calibrate --ranks. From these the planner divides the layers for
    1f1b, zb-h1, zb-v and auto, and predicts each step. Then the steps are timed, in
    turns. All of them train the same model on the same batches, and their losses
    must be the same.

    [dim]Examples:[/]

      fivefold bench mixed

      fivefold bench mixed --ranks 4 --slow 1.5,2 --rounds 7 -o mixed.csv

      fivefold bench mixed model.layers=8 --microbatches 4 --json
    """
    from fivefold.bench.mixed import mixed

    check_writable(output, ".csv", ".json")
    _show(lambda told: mixed(changes or [], ranks, slow, microbatches, rounds, quick, told), as_json, output)


@app.command(short_help="Step time, MFU and memory of a job.  [dim]fivefold bench train llama3-8b[/]")
def train(
    words: Annotated[list[str], typer.Argument(metavar="MODEL|JOB [KEY=VALUE]...", help="As for train.")],
    against: Annotated[
        str,
        typer.Option(
            help="Some of hf (Hugging Face transformers, compiled), fp8 (with 8-bit matmuls), fp8_experts (those of "
            "experts), deterministic (the same bits every time), eager (not compiled), with commas."
        ),
    ] = "none",
    steps: Annotated[int, typer.Option(help="Timed steps of a turn; medians are shown.")] = 10,
    rounds: Annotated[int | None, typer.Option(help="Turns of each system; 2, or 1 if there is one only.")] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save one beside the steps, too, and show what they lose to it.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where a step's time goes, by kind of kernel.")
    ] = False,
    floor: Annotated[bool, typer.Option("--floor", help="Measure what a step must do, each part alone.")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time the trainer's own steps on this device: tokens/s, MFU, peak memory.

    MFU counts attention full, and of experts those that a token visits.

    Tokens are made up; the rest is `fivefold train`, with its data and metrics.
    Systems take turns, each turn in a process of its own, from the same weights:
    the table shows their first losses.
    train.deterministic=false unless you ask for it.

    [dim]Examples:[/]

      fivefold bench train llama3-8b model.layers=12 train.batch=2 data.seq=8192 --against hf,fp8

      fivefold bench train qwen3-30b-a3b model.layers=6 train.batch=4 data.seq=4096 --against hf --floor

      fivefold bench train llama3.2-3b train.batch=4 data.seq=8192 --checkpoint --profile

      fivefold bench train job.toml --json
    """
    from fivefold.bench.train import Extras, measure

    extras = Extras(checkpoint, profile, floor)
    _show(lambda told: [measure(words, against, steps, rounds, extras, told)], as_json, output)


def _show(measure: "Callable[[Told], Iterable[Result]]", as_json: bool, output: Path | None = None) -> None:
    """Measure, and show the last result. Each of them is kept: a run that is stopped has left what it measured.

    The status line says what is measured now, and each measurement leaves a line with its seconds.
    """
    check_writable(output)
    console = console_of(stderr=True)
    begun: list[tuple[str, float]] = []

    def told(what: str) -> None:
        for last, start in begun[-1:]:
            console.print(f"{last}: {time.monotonic() - start:.0f} s", style="dim", markup=False)
        begun.append((what, time.monotonic()))
        status.update(what)

    with console.status("") as status:
        for result in measure(told):
            kept = output is None or _keep(result, output)
        told("")
    show(result, as_json)
    if not kept:
        raise typer.Exit(1)


def _keep(result: Result, output: Path) -> bool:
    """Write the figures; where that fails, say so, and they are still shown."""
    command = shlex.join(["fivefold", *sys.argv[1:]])
    try:
        if output.suffix == ".csv" and hasattr(result, "rows"):
            output.write_text(_csv(command, result.rows()))
        else:
            output.write_text(json.dumps({"command": command} | result.to_dict(), indent=1) + "\n")
    except OSError as error:
        console_of(stderr=True).print(f"--output {output} was not written: {error.strerror}", markup=False)
        return False
    return True


def _csv(command: str, rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    text.write(f"# {command}\n")
    writer = table.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
