"""The bubble rates that the zero-bubble paper publishes, and ours for the same durations (Qi et al. 2023).

Durations are milliseconds of one rank; the rate is the bubble of the span.
"""

from typing import NamedTuple

from fivefold.schedule.catalogue import build
from fivefold.schedule.costs import Costs, Link
from fivefold.schedule.simulate import simulate


class Published(NamedTuple):
    """One model of the paper: its pipeline, its measured durations, and the bubble rate of each schedule."""

    model: str
    p: int
    m: int
    f: float
    i: float
    w: float
    comm: float
    rates: dict[str, float]


PUBLISHED = (
    Published("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    Published("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698}),
    Published("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672}),
    Published("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}),
)


def reproduce(row: Published) -> dict[str, float]:
    """The bubble rates that our schedules have on the paper's durations."""
    rates = {}
    for name in row.rates:
        schedule = build(name, row.p, row.m)
        costs = Costs.even(schedule.placement, row.f, row.i, row.w, link=Link(latency=row.comm))
        rates[name] = simulate(schedule, costs).bubble_span
    return rates
