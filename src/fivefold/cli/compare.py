"""`fivefold compare`: two runs; ZeRO stages, kinds of cp, and schedules, also on heterogeneous clusters."""

from typing import Annotated

import typer

from fivefold.cli.completion import models
from fivefold.cli.draw import Chunks, Group, Memory, Overlap, Sends, Slow, TimesText
from fivefold.cli.options import (
    DRAWABLE_SUFFIXES,
    Batch,
    Json,
    ModelWords,
    Output,
    Picture,
    Seq,
    Software,
    command,
    options_given,
    refuse,
)
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import TEXT_SUFFIXES, show
from fivefold.support.errors import UserError
from fivefold.support.text import whole_number

SHORT = "Compare runs, ZeRO stages, cp, schedules.  [dim]fivefold compare runs runs/before runs/after[/]"
app = typer.Typer(
    cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="Compare alternatives side by side."
)


@command(app, "zero", "Memory by ZeRO stage.  [dim]fivefold compare zero 7.5e9 --ranks 64[/]", TEXT_SUFFIXES)
def zero(
    model: Annotated[
        str, typer.Argument(help="A model's name, or a number of parameters: 7.5e9.", autocompletion=models)
    ],
    ranks: Annotated[int, typer.Option(help="Ranks to shard over (dp x cp).")] = 64,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Model-state bytes per rank between steps, by ZeRO stage.

    The paper (arXiv 1910.02054) assumes 2-byte gradients; Fivefold accumulates them
    in float32, so its memory is higher.

    [dim]Examples:[/]

      fivefold compare zero 7.5e9 --ranks 64

      fivefold compare zero llama3-8b --ranks 8
    """
    from fivefold.planner import textbook_formulas as textbook

    show(textbook.zero(model, ranks), as_json=as_json, output=output)


_Model = Annotated[
    str | None,
    typer.Option(help="The model whose heads are used; default: llama3-405b, or llama3-8b with --lengths."),
]
_Tp = Annotated[
    int | None, typer.Option(help="Ranks that share the heads; default: a node's GPUs, if heads and cluster allow.")
]
_Cluster = Annotated[
    str | None,
    typer.Option(help="Nodes x GPUs per node x accelerator; default: 16x8xH100, or 8x8xH100 with --lengths."),
]
_Lengths = Annotated[
    str,
    typer.Option(help="Plan whole steps for every cp degree, for these sequence lengths: 8192,131072,1048576."),
]
_SINGLE_LAYER_OPTIONS = {  # {parameter: option}
    "seq": "--seq", "ranks": "--cp", "tp": "--tp", "heads": "--heads", "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
}  # fmt: skip
_Kernels = Annotated[str, typer.Option(help="With --lengths: attention kernels to compare: flash2,flash3,peak.")]


@command(app, "cp", "Ring, all-gather and Ulysses.  [dim]fivefold compare cp --seq 131072 --cp 16[/]", TEXT_SUFFIXES)
def cp(
    context: typer.Context,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    ranks: Annotated[int | None, typer.Option("--cp", help="Ranks that share a sequence.")] = None,
    model: _Model = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, instead of a model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; default: as many as heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: 128.")] = None,
    tp: _Tp = None,
    cluster: _Cluster = None,
    lengths: _Lengths = "",
    kernels: _Kernels = "",
    software: Software = "fivefold",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare the ways to split a sequence over cp ranks, for one layer and one sequence.

    The first table compares how tokens are split (contiguous, zigzag, striped), the
    second how keys and values are exchanged (ring, all-gather, Ulysses). Bytes come from
    the collectives Fivefold executes; seconds and crossovers come from the planner's
    model of kernels and links. Ring and all-gather merge partial results, which needs the
    log-sum-exp; torch's fastest kernel does not return it, so they use a slower one.

    [dim]Examples:[/]

      fivefold compare cp --seq 131072 --cp 16

      fivefold compare cp --seq 131072 --cp 16 --software nemo

      fivefold compare cp --seq 32768 --cp 4 --model llama3-8b --tp 1 --cluster 2x4xA100-80

      fivefold compare cp --seq 1048576 --cp 8 --heads 32 --kv-heads 32 --head-dim 64 --tp 1 --json

    With --lengths, whole steps: the time lost with each cp degree, by sequence length,
    each with the fastest of all layouts of that degree.

      fivefold compare cp --lengths 8192,131072,1048576 --model llama3-8b --cluster 8x8xH100

      fivefold compare cp --lengths 131072 --kernels flash2,flash3,peak
    """
    from fivefold.planner.compare_cp import compare_cp
    from fivefold.planner.cp_by_length import cp_by_length

    if lengths:
        given = options_given(context, _SINGLE_LAYER_OPTIONS)
        describe, them = ("describes", "it") if len(given) == 1 else ("describe", "them")
        refuse(given, f"{describe} one layer, but --lengths plans whole steps; remove {them}")
        names = [name for word in kernels.split(",") if (name := word.strip())]
        by_length = cp_by_length(
            _whole_numbers(lengths), model or "llama3-8b", cluster or "8x8xH100", kernels=names, software=software
        )
        show(by_length, as_json=as_json, output=output)
        return
    if seq is None or ranks is None:
        raise UserError(
            "--seq and --cp say which layer to compare, as in --seq 131072 --cp 16; or give --lengths", "option.missing"
        )
    if kernels:
        raise UserError("--kernels needs --lengths", "option.conflict")
    result = compare_cp(
        seq, ranks, model=model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp,
        cluster=cluster or "16x8xH100", software=software,
    )  # fmt: skip
    show(result, as_json=as_json, output=output)


def _whole_numbers(lengths: str) -> list[int]:
    """The numbers of --lengths."""
    numbers = []
    for word in lengths.split(","):
        if (number := whole_number(word)) is None:
            raise UserError(
                f"--lengths {lengths}: {word!r} is not a whole number; write for example 8192,131072", "option.numbers"
            )
        numbers.append(number)
    return numbers


_HeterogeneousCluster = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="Heterogeneous cluster, such as 2x8xH100+2x8xA100; or a homogeneous one with --slower."
    ),
]
_Layout = Annotated[
    str | None, typer.Option(help="Degrees, microbatches and recompute for all schedules; default: the planner's.")
]
_Schedules = Annotated[str, typer.Option(help="Comma-separated schedules; default: 1f1b,interleaved,zb-h1,zb-v,auto.")]
_Slower = Annotated[str, typer.Option(help="Make half of a homogeneous cluster slower by these factors: 1.5,2.")]


@command(app, "mixed", "Schedules on heterogeneous GPUs.  [dim]fivefold compare mixed llama3-70b[/]", TEXT_SUFFIXES)
def mixed(
    words: ModelWords,
    cluster: _HeterogeneousCluster = "2x8xH100+2x8xA100",
    layout: _Layout = None,
    schedules: _Schedules = "",
    slower: Annotated[
        str, typer.Option(help="Make half of a homogeneous cluster slower by these factors: 1.5,2.")
    ] = "",
    batch: Batch = None,
    seq: Seq = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict a step of every schedule on a heterogeneous cluster, with layers divided evenly and by speed.

    Schedules are simulated, each stage with the times of its own device; the auto
    schedule is generated for these times. Nothing is executed; `python -m
    benchmarks.mixed` does that on CPU ranks. An accelerator may be a file written by
    `fivefold calibrate`.

    [dim]Examples:[/]

      fivefold compare mixed llama3-70b --cluster 2x8xH100+2x8xA100 --batch 128

      fivefold compare mixed llama3-8b --cluster 4x8xH100 --slower 1.5,2 --batch 128

      fivefold compare mixed small --cluster 2xCPU --slower 2 --layout pp=2,microbatches=8 --batch 16 --seq 128
    """
    from fivefold.planner.mixed_compare import SCHEDULES, compare
    from fivefold.support.parsing import numbers

    names = [name.strip() for name in schedules.split(",") if name.strip()] or SCHEDULES
    factors = numbers(slower, "--slower")
    model, *changes = words
    result = compare(
        model, cluster, layout=layout, schedules=names, slower=factors, changes=changes, batch=batch, seq=seq
    )
    show(result, as_json=as_json, output=output)


_Microbatches = Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches per step (m).")]
_SINGLE_CASE_OPTIONS = {
    name: f"--{name}"
    for name in ("pp", "microbatches", "chunks", "group", "memory", "times", "slow", "sends", "overlap")
}


_Published = Annotated[
    bool, typer.Option("--published", help="Show the zero-bubble paper's published bubble rates next to ours.")
]


@command(app, "schedules", "All schedules.  [dim]fivefold compare schedules --pp 8 --microbatches 32[/]", TEXT_SUFFIXES)
def schedules(
    context: typer.Context,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks (p).")] = 4,
    microbatches: _Microbatches = 8,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    published: _Published = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare all schedules: bubble, memory, communication, and what each one needs.

    [dim]Examples:[/]

      fivefold compare schedules --pp 8 --microbatches 32 --times f=1,i=1,w=1,comm=0.1

      fivefold compare schedules --pp 8 --microbatches 32 --slow 3=1.5 --json

      fivefold compare schedules --published
    """
    from fivefold.schedules.result import PublishedResult, compare

    if published:
        given = options_given(context, _SINGLE_CASE_OPTIONS)
        refuse(given, "cannot be combined with --published, which prints the paper's own cases")
        show(PublishedResult(), as_json=as_json, output=output)
        return
    result = compare(
        pp,
        microbatches,
        chunks=chunks,
        group=group,
        memory=memory,
        times=times,
        slow=slow,
        sends=sends,
        overlap=overlap,
    )
    show(result, as_json=as_json, output=output)


_Run = Annotated[str, typer.Argument(help="A run's directory.", show_default=False)]


@command(app, "runs", "Where two runs part.  [dim]fivefold compare runs runs/before runs/after[/]", DRAWABLE_SUFFIXES)
def runs(first: _Run, second: _Run, output: Picture = None, as_json: Json = False) -> None:
    """Where two runs part: the first step whose loss, gradient norm or parameters differ, and by how much.

    Runs of one layout, of the same settings and versions, compute the same bits, so any
    difference is real. Runs of two layouts round otherwise: a difference is real if it is
    larger than rounding makes it at once, and 30 times as large as any before. Parameters are
    compared if both runs had train.digest=true. Settings and versions that differ are listed,
    with what they can change. Exit code 1: the two part.

    [dim]Examples:[/]

      fivefold compare runs runs/before runs/after

      fivefold compare runs runs/demo runs/demo-2 -o parting.svg

      fivefold compare runs runs/one runs/tp2 --json
    """
    from fivefold.trainer.compare_runs import compare_runs

    show(compare_runs(first, second), as_json=as_json, output=output)
