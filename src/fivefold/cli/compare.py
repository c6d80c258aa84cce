"""`fivefold compare`: tables of ZeRO stages, kinds of context parallelism, and schedules, also on mixed clusters."""

from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.completion import models
from fivefold.cli.draw import Chunks, Group, Memory, Overlap, Sends, Slow, TimesText
from fivefold.cli.options import Batch, Json, ModelWords, Output, Seq, Software, command
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import TEXTS, show
from fivefold.support.errors import UserError
from fivefold.support.text import whole_number

if TYPE_CHECKING:
    from fivefold.planner.cp_by_length import LengthsResult

SHORT = "Compare ZeRO stages, kinds of cp, schedules.  [dim]fivefold compare schedules --pp 8 --microbatches 32[/]"
app = typer.Typer(
    cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="Compare alternatives side by side."
)


@command(app, "zero", "Bytes by ZeRO stage.  [dim]fivefold compare zero 7.5e9 --ranks 64[/]", TEXTS)
def zero(
    model: Annotated[
        str, typer.Argument(help="A model's name, or a number of parameters: 7.5e9.", autocompletion=models)
    ],
    ranks: Annotated[int, typer.Option(help="Ranks to shard over (dp x cp).")] = 64,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Bytes of a rank between steps, by ZeRO stage.

    The paper (arXiv 1910.02054) keeps gradients in two bytes; this code adds them
    up in float32, so that the paper's figures are too low for it.

    [dim]Examples:[/]

      fivefold compare zero 7.5e9 --ranks 64

      fivefold compare zero llama3-8b --ranks 8
    """
    from fivefold.planner.textbook_formulas import zero

    show(zero(model, ranks), as_json, output)


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
    str, typer.Option(help="Plan whole steps with every cp, for sequences of these tokens: 8192,131072,1048576.")
]
_Kernels = Annotated[str, typer.Option(help="With --lengths: attention kernels to compare: flash2,flash3,peak.")]


@command(app, "cp", "Ring, all-gather and Ulysses.  [dim]fivefold compare cp --seq 131072 --cp 16[/]", TEXTS)
def cp(
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
    """Compare the ways to divide a sequence over cp ranks, for one layer and one sequence.

    The first table compares how tokens are divided (contiguous, zigzag, striped), the
    second how keys and values are exchanged (ring, all-gather, Ulysses). The bytes are
    counted in the code that runs; seconds and crossovers come from the planner's model of
    kernels and links. Ring and all-gather merge partial results, which needs the
    log-sum-exp; torch's fastest kernel does not return it, so they use a slower one.

    [dim]Examples:[/]

      fivefold compare cp --seq 131072 --cp 16

      fivefold compare cp --seq 131072 --cp 16 --software nemo

      fivefold compare cp --seq 32768 --cp 4 --model llama3-8b --tp 1 --cluster 2x4xA100-80

      fivefold compare cp --seq 1048576 --cp 8 --heads 32 --kv-heads 32 --head-dim 64 --tp 1 --json

    With --lengths, whole steps: how much is lost with each cp, by the length of a
    sequence, each number the fastest of all layouts with that cp.

      fivefold compare cp --lengths 8192,131072,1048576 --model llama3-8b --cluster 8x8xH100

      fivefold compare cp --lengths 131072 --kernels flash2,flash3,peak
    """
    from fivefold.planner.compare_cp import compare_cp

    if lengths:
        of_one_layer = {"--seq": seq, "--cp": ranks, "--tp": tp, "--heads": heads, "--kv-heads": kv_heads}
        of_one_layer["--head-dim"] = head_dim
        if given := [option for option, value in of_one_layer.items() if value is not None]:
            raise UserError(
                f"{', '.join(given)}: one layer's, and --lengths plans whole steps; leave one of them out",
                "option.conflict",
            )
        show(_whole_steps(lengths, model or "llama3-8b", cluster or "8x8xH100", kernels, software), as_json, output)
        return
    if seq is None or ranks is None:
        raise UserError(
            "--seq and --cp say which layer to compare, as in --seq 131072 --cp 16; or give --lengths", "option.missing"
        )
    if kernels:
        raise UserError(f"--kernels {kernels} belongs to --lengths; give both", "option.conflict")
    result = compare_cp(
        seq, ranks, model=model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp,
        cluster=cluster or "16x8xH100", software=software,
    )  # fmt: skip
    show(result, as_json, output)


def _whole_steps(lengths: str, model: str, cluster: str, kernels: str, software: str) -> "LengthsResult":
    """The result of --lengths."""
    from fivefold.planner.cp_by_length import cp_by_length

    numbers = [whole_number(word) or 0 for word in lengths.split(",")]
    names = [name for word in kernels.split(",") if (name := word.strip())]
    return cp_by_length(numbers, model, cluster, kernels=names, software=software)


_MixedCluster = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="Heterogeneous cluster, such as 2x8xH100+2x8xA100; or a homogeneous one with --slower."
    ),
]
_Layout = Annotated[
    str | None, typer.Option(help="Degrees, microbatches and recompute of all schedules; default: the planner's.")
]
_Schedules = Annotated[
    str, typer.Option(help="Schedules to compare, with commas; default: 1f1b,interleaved,zb-h1,zb-v,auto.")
]


@command(app, "mixed", "Schedules on heterogeneous GPUs.  [dim]fivefold compare mixed llama3-70b[/]", TEXTS)
def mixed(
    words: ModelWords,
    cluster: _MixedCluster = "2x8xH100+2x8xA100",
    layout: _Layout = None,
    schedules: _Schedules = "",
    slower: Annotated[str, typer.Option(help="Slow half of a homogeneous cluster by these factors: 1.5,2.")] = "",
    batch: Batch = None,
    seq: Seq = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict a step of every schedule on devices of unequal speed, with layers divided evenly and by speed.

    Schedules run on the planner's clock, each stage with the times of its own
    device, and auto is made for these times. Nothing is executed; `python -m
    benchmarks.mixed` does that on CPU ranks. An accelerator may be a file of
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
    result = compare(
        words[0], cluster, layout=layout, schedules=names, slower=factors, changes=words[1:], batch=batch, seq=seq
    )
    show(result, as_json, output)


_Microbatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="Microbatches per step (m); default: 8.")
]


@command(app, "schedules", "All schedules.  [dim]fivefold compare schedules --pp 8 --microbatches 32[/]", TEXTS)
def schedules(
    pp: Annotated[int | None, typer.Option("--pp", help="Pipeline ranks (p); default: 4.")] = None,
    microbatches: _Microbatches = None,
    chunks: Chunks = None,
    group: Group = None,
    memory: Memory = None,
    times: TimesText = "",
    slow: Slow = "",
    sends: Sends = "eager",
    overlap: Overlap = True,
    published: Annotated[bool, typer.Option("--published", help="The zero-bubble paper's rates, and ours.")] = False,
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
        numbers = (pp, microbatches, chunks, group, memory)
        if any(number is not None for number in numbers) or times or slow or sends != "eager" or not overlap:
            raise UserError(
                "--published prints the paper's own cases; leave out the options that describe another one",
                "option.conflict",
            )
        show(PublishedResult(), as_json, output)
        return
    p, m = 4 if pp is None else pp, 8 if microbatches is None else microbatches
    show(compare(p, m, chunks=chunks, group=group, memory=memory, times=times, slow=slow, sends=sends,
                 overlap=overlap), as_json, output)  # fmt: skip
