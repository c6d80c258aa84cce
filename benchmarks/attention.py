"""`python -m benchmarks.attention`: tensor-parallel attention against one process."""

from typing import Annotated

import typer

from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show
from fivefold.support.dtypes import dtype_of


def attention(
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width of the block.")] = 512,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads; 0: as many as heads.")] = 0,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Timed passes of each kind, in turns; medians are shown.")] = 15,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run one attention block over real ranks and in one process, and compare.

    The same weights and input go through both: outputs and all gradients must
    agree, and forward and backward passes are timed in turns. One rank has one
    thread. Ranks beyond the machine's cores share them, and the table says so.

    [dim]Examples:[/]

      python -m benchmarks.attention --tp 2

      python -m benchmarks.attention --tp 4 --hidden 1024 --heads 16 --kv-heads 4

      python -m benchmarks.attention --dtype float64 --json
    """
    from fivefold.bench.attention import AttentionShape, measure

    show(
        measure(AttentionShape(tp, hidden, heads, kv_heads or heads, seq, batch, dtype_of(dtype), rounds)),
        as_json,
        output,
    )


app = program(attention)

if __name__ == "__main__":
    main(app)
