"""`python -m benchmarks.pipeline`: pipeline schedules against their ideal and torch's."""

from typing import Annotated

import typer

from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show


def pipeline(
    pp: Annotated[int, typer.Option(help="Ranks that share the layers.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed steps of each system, in turns.")] = 7,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time a step under 1f1b, zb-h1 and zb-v on real ranks.

    Each is compared with its ideal: one process's time, shared by the ranks, plus
    the schedule's own bubble, simulated from the durations of this machine. Each is
    also compared with torch.distributed.pipelining on the same stages. All take
    turns, one step each, and their gradients must agree. One rank has one thread.

    [dim]Examples:[/]

      python -m benchmarks.pipeline

      python -m benchmarks.pipeline --microbatches 4 --hidden 512 --rounds 15

      python -m benchmarks.pipeline --pp 4 --layers 16 --json
    """
    from fivefold.bench.pipeline import PipelineShape, measure

    show(measure(PipelineShape(pp, microbatches, hidden, layers, seq, batch, rounds)), as_json, output)


app = program(pipeline)

if __name__ == "__main__":
    main(app)
