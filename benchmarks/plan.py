"""`python -m benchmarks.plan`: how long planning takes."""

from typing import Annotated

import typer

from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show


def plan(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Searches of each kind; medians are shown.")] = 3,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the planner's whole search, in this process, on one core.

    [dim]Example:[/]

      python -m benchmarks.plan
    """
    from fivefold.bench.planner import measure

    show(measure(rounds), as_json, output)


app = program(plan)

if __name__ == "__main__":
    main(app)
