"""`fivefold context`: the kinds of context parallelism, compared for one layer."""

from typing import Annotated

import typer

SHORT = "Compare ring, all-gather and Ulysses.  [dim]fivefold context --seq 131072 --cp 16[/]"


def context(
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    cp: Annotated[int, typer.Option(help="Ranks that share a sequence.")],
    model: Annotated[
        str | None, typer.Option(help="The model whose heads are used; default: llama3-405b.", show_default=False)
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, instead of a model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; default: as many as heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: 128.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share the heads; default: a node's GPUs, if heads and cluster allow.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="Nodes x GPUs per node x accelerator.")] = "16x8xH100",
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
    """
    from fivefold.plan.context import compare
    from fivefold.report import show

    found = compare.context(
        seq, cp, model=model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp, cluster=cluster,
        software=software,
    )  # fmt: skip
    show(found, as_json)
