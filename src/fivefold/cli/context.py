"""`fivefold context`: the kinds of context parallelism, compared for one layer."""

from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.support.errors import UserError
from fivefold.support.text import whole_number

if TYPE_CHECKING:
    from fivefold.planner.context import LengthsResult

SHORT = "Compare ring, all-gather and Ulysses.  [dim]fivefold context --seq 131072 --cp 16[/]"


def context(
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks that share a sequence.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model whose heads are used; default: llama3-405b, of --lengths: llama3-8b."),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, instead of a model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; default: as many as heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: 128.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share the heads; default: a node's GPUs, if heads and cluster allow.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Nodes x GPUs per node x accelerator; default: 16x8xH100, of --lengths: 8x8xH100."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Plan whole steps with every cp, for sequences of these tokens: 8192,131072,1048576.")
    ] = "",
    kernels: Annotated[
        str, typer.Option(help="With --lengths: attention kernels to compare: flash2,flash3,peak.")
    ] = "",
    software: Annotated[str, typer.Option(help="Whose kernels: fivefold, nemo, torchtitan, megatron.")] = "fivefold",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the ways to divide a sequence over cp ranks, for one layer and one sequence.

    First how tokens are divided: contiguous, in a zigzag, in stripes. Then how keys
    are exchanged: ring, all-gather, Ulysses. Bytes are those of the code that runs;
    seconds and crossovers come from the planner's model of kernels and links. The
    kernels matter: torch's fastest returns no log-sum-exp, which ring and
    all-gather need to merge partial results, so they run on a slower one.

    [dim]Examples:[/]

      fivefold context --seq 131072 --cp 16

      fivefold context --seq 131072 --cp 16 --software nemo

      fivefold context --seq 32768 --cp 4 --model llama3-8b --tp 1 --cluster 2x4xA100-80

      fivefold context --seq 1048576 --cp 8 --heads 32 --kv-heads 32 --head-dim 64 --tp 1 --json

    With --lengths, whole steps: how much is lost with each cp, by the length of a
    sequence, each number the fastest of all layouts with that cp.

      fivefold context --lengths 8192,131072,1048576 --model llama3-8b --cluster 8x8xH100

      fivefold context --lengths 131072 --kernels flash2,flash3,peak
    """
    from fivefold.planner import context as compare
    from fivefold.render.blocks import show

    if lengths:
        given = {"--seq": seq, "--cp": cp, "--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--tp": tp}
        if wrong := [option for option, value in given.items() if value is not None]:
            raise UserError(f"{', '.join(wrong)}: one layer's, and --lengths plans whole steps; leave one of them out")
        show(_whole_steps(lengths, model or "llama3-8b", cluster or "8x8xH100", kernels, software), as_json)
        return
    if seq is None or cp is None:
        raise UserError("--seq and --cp say which layer to compare, as in --seq 131072 --cp 16; or give --lengths")
    if kernels:
        raise UserError(f"--kernels {kernels} belongs to --lengths; give both")
    found = compare.context(
        seq, cp, model=model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp,
        cluster=cluster or "16x8xH100",
        software=software,
    )  # fmt: skip
    show(found, as_json)


def _whole_steps(lengths: str, model: str, cluster: str, kernels: str, software: str) -> "LengthsResult":
    from fivefold.planner.context import lengths as whole_steps

    numbers = [whole_number(word) or 0 for word in lengths.split(",")]
    names = [name for word in kernels.split(",") if (name := word.strip())]
    return whole_steps(numbers, model, cluster, kernels=names, software=software)
