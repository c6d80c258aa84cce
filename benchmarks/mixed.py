"""`python -m benchmarks.mixed`: what a plan for ranks of unequal speed gains, predicted and measured."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli import main, program
from fivefold.cli.bench import Changes, Rounds, measured
from fivefold.cli.options import Json


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
    as_json: Json = False,
) -> None:
    """What a plan for unequal ranks gains over 1F1B with an even split: predicted, and measured.

    For each factor, ranks are slowed and their speeds measured while all of them
    run, as by calibrate --ranks. From these the planner divides the layers for
    1f1b, zb-h1, zb-v and auto, and predicts each step. Then the steps are timed, in
    turns. All of them train the same model on the same batches, and their losses
    must be the same.

    [dim]Examples:[/]

      python -m benchmarks.mixed

      python -m benchmarks.mixed --ranks 4 --slow 1.5,2 --rounds 7 -o mixed.csv

      python -m benchmarks.mixed model.layers=8 --microbatches 4 --json
    """
    from fivefold.bench.mixed import mixed

    measured(lambda told: mixed(changes or [], ranks, slow, microbatches, rounds, quick, told), as_json, output)


app = program(mixed, (".csv", ".json"))

if __name__ == "__main__":
    main(app)
