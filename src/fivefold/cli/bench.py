"""`fivefold bench`: measurements, each with the command that repeats them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli.job_args import JobWords, split
from fivefold.support.errors import UserError

SHORT = "Measure how fast things are.  [dim]fivefold bench attention --tp 2[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Benchmarks.")


@app.command(short_help="Build, check and simulate pipeline schedules.  [dim]fivefold bench schedules[/]")
def schedules(as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    [dim]Example:[/]

      fivefold bench schedules
    """
    from fivefold.bench.schedules import CASES, best
    from fivefold.schedule.tables import benchmark_rows, benchmark_table

    timings = [best(case) for case in CASES]
    if as_json:
        typer.echo(json.dumps(benchmark_rows(timings)))
        return
    head = "seconds to build, check and simulate, best of 3; microseconds per action\n"
    Console(highlight=False).print(head, benchmark_table(timings))


@app.command(short_help="How long planning takes.  [dim]fivefold bench plan[/]")
def plan(
    rounds: Annotated[int, typer.Option(min=1, help="Searches of each kind; medians are shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Time the planner's whole search, in this process, on one core.

    [dim]Example:[/]

      fivefold bench plan
    """
    from rich.table import Table

    from fivefold.bench.plan import QUESTIONS, measure

    timings = [measure(question, rounds) for question in QUESTIONS]
    if as_json:
        rows = [one.question._asdict() | {"seconds": one.seconds, "weighed": one.weighed} for one in timings]
        typer.echo(json.dumps(rows))
        return
    table = Table(caption=f"median of {rounds} cold searches")
    for name in ("model", "cluster", "sequence", "batch", "layouts weighed", "seconds", "at most"):
        table.add_column(name, justify="left" if name in ("model", "cluster") else "right")
    for one in timings:
        asked = one.question
        cells = (asked.model, asked.cluster, f"{asked.seq:,}", f"{asked.batch:,}", f"{one.weighed:,}")
        table.add_row(*cells, f"{one.seconds:.2f}", f"{asked.most:g}")
    Console(highlight=False).print(table)


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
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
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
    from fivefold.bench.attention import Shape, measure, report, rows

    shape = Shape(tp, hidden, heads, kv_heads or heads, seq, batch, dtype, rounds)
    result = measure(shape)
    if as_json:
        typer.echo(json.dumps(rows(shape, result)))
    else:
        report(Console(highlight=False), shape, result)
    raise typer.Exit(0 if result.close else 1)


@app.command(short_help="Pipeline schedules against their ideal and torch's.  [dim]fivefold bench pipeline[/]")
def pipeline(
    pp: Annotated[int, typer.Option(help="Ranks that share the layers.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed steps of each contender, in turns.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Time a step under 1f1b, zb-h1 and zb-v on real ranks.

    Each is held against its ideal: one process's time, shared by the ranks, plus
    the schedule's own bubble, simulated from the durations of this machine. And
    against torch.distributed.pipelining with the same stages. All take turns, one
    step each, and their gradients must agree. One rank has one thread.

    [dim]Examples:[/]

      fivefold bench pipeline

      fivefold bench pipeline --microbatches 4 --hidden 512 --rounds 15

      fivefold bench pipeline --pp 4 --layers 16 --json
    """
    from fivefold.bench import pipeline as bench_pipeline

    shape = bench_pipeline.Shape(pp, microbatches, hidden, layers, seq, batch, rounds)
    result = bench_pipeline.measure(shape)
    if as_json:
        typer.echo(json.dumps(bench_pipeline.as_json(shape, result)))
    else:
        bench_pipeline.report(Console(highlight=False), shape, result)
    raise typer.Exit(0 if bench_pipeline.agree(result) else 1)


@app.command(short_help="What a checkpoint costs.  [dim]fivefold bench checkpoint model=small[/]")
def checkpoint(
    job: JobWords = None,
    rounds: Annotated[int, typer.Option(help="Saves and loads of each kind, in turns; medians are shown.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps before each save, and beside its writing.")] = 6,
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to be measured; without it the system's for temporary files.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 1200.0,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Time what steps lose to an asynchronous save, and how fast files are written and read.

    The job's ranks are started on this machine. Save and load of the same state
    take turns with DCP alone and with plain torch.save. Nothing is kept.

    [dim]Examples:[/]

      fivefold bench checkpoint model=small data.seq=64

      fivefold bench checkpoint model=small layout=dp=2,zero=1 --rounds 7 --json
    """
    import tempfile

    import msgspec

    from fivefold.bench import checkpoint as bench_checkpoint
    from fivefold.job.config import read_job
    from fivefold.job.preflight import preflight

    if min(rounds, steps) < 1:
        raise UserError(f"--rounds {rounds} and --steps {steps} must be at least 1")
    if directory is not None and not directory.is_dir():
        raise UserError(f"--directory {directory} is no directory")
    path, changes = split(job)
    read = read_job(path, changes)
    replace = msgspec.structs.replace
    resolved = replace(read, train=replace(read.train, steps=2 + 2 * rounds * steps, eval_samples=0))
    preflight(resolved, resolved.layout.world)
    with (
        Console(stderr=True, highlight=False).status(f"{rounds} rounds on {resolved.layout.world} ranks"),
        tempfile.TemporaryDirectory(prefix="fivefold-", dir=directory) as scratch,
    ):
        times = bench_checkpoint.measure(resolved, scratch, rounds, steps, timeout)
    if as_json:
        typer.echo(json.dumps(bench_checkpoint.as_json(resolved, times)))
    else:
        bench_checkpoint.report(Console(highlight=False), resolved, times)


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
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Time whole training steps on one device, and say what the planner says of them.

    The trainer's own steps, with made-up tokens, float32 masters and kernels in
    any order of addition (train.deterministic=false). A case is a model with
    KEY=VALUE changes: layers, seq, samples (of a microbatch), microbatches,
    recompute and compile. One that does not fit into memory is said to be so.

    [dim]Examples:[/]

      fivefold bench steps tiny,seq=128,samples=1/4

      fivefold bench steps llama3.2-1b,seq=2048/4096,recompute=none/full --csv steps.csv

      fivefold bench steps llama3-8b,layers=4/8,seq=8192 --accelerator mine.toml
    """
    import sys

    from fivefold.bench import steps as bench_steps
    from fivefold.hardware.accelerators import find_accelerator
    from fivefold.hardware.cluster import Cluster

    problems: list[str] = [f"--steps {count} must be at least 1"] if count < 1 else []
    if dtype not in ("auto", "float32", "float64", "bfloat16"):
        problems.append(f"--dtype {dtype} is not a choice; known: auto, float32, float64, bfloat16")
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {device} is not a choice; known: auto, cpu, cuda")
    if csv is not None and not csv.parent.is_dir():
        problems.append(f"--csv {csv}: there is no directory {csv.parent}")
    if problems:
        raise UserError(problems)
    cases = [case for word in words for case in bench_steps.cases(word)]
    planned = Cluster.parse(accelerator).groups[0].accelerator if accelerator else None
    timed = []
    with Console(stderr=True, highlight=False).status("") as status:
        for number, case in enumerate(cases, start=1):
            status.update(f"{number}/{len(cases)}: {case.model}, {case.layers} layers, {case.batch} x {case.seq}")
            timed.append(bench_steps.measure(case, device, dtype, count, warm))
            if csv is not None:  # after each, so that what was measured is not lost
                bench_steps.write(csv, timed, " ".join(["fivefold", *sys.argv[1:]]))
    if as_json:
        typer.echo(json.dumps([one.row for one in timed]))
        return
    if planned is None:
        with suppress(UserError):
            planned = find_accelerator(timed[0].device)
    Console(highlight=False).print(bench_steps.table(timed, planned))
