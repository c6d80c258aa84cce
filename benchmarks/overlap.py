"""`python -m benchmarks.overlap`: experts' messages behind the other half of a pair."""

from typing import Annotated

import typer

from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show


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
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time joined pairs (F&B) of a tiny mixture of experts over a limited link.

    One half after the other is compared with both in turns, as the trainer runs
    them: one computes while the other's tokens travel. The schedule is dualpipe-v;
    with --pp 1, each forward pass joined with the backward pass before it. As root
    the ranks of ep live in two network namespaces, and tc limits their wire;
    otherwise the delay is injected, and the output says so. Gradients must be equal
    to the bit. Beside it stands what the simulator says.

    [dim]Examples:[/]

      python -m benchmarks.overlap

      python -m benchmarks.overlap --pp 1 --layers 4 --rounds 15

      python -m benchmarks.overlap --microbatches 12 --batch 24 --link 100 --json
    """
    from fivefold.bench.overlap import OverlapShape, measure

    show(measure(OverlapShape(pp, microbatches, hidden, layers, seq, batch, link, rounds, injected)), as_json, output)


app = program(overlap)

if __name__ == "__main__":
    main(app)
