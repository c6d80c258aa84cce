"""`python -m benchmarks.schedules`: how long building, checking and simulating pipeline schedules takes."""

from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show


def schedules(output: Output = None, as_json: Json = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    [dim]Example:[/]

      python -m benchmarks.schedules
    """
    from fivefold.bench.planner import measure_all

    show(measure_all(), as_json, output)


app = program(schedules)

if __name__ == "__main__":
    main(app)
