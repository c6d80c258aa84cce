"""What the schedule would have taken: the same Schedule on the simulator's clock, with durations that were measured."""

from collections import defaultdict
from statistics import median

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Kind
from fivefold.schedule.costs import Costs
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.trace.records import RankTrace, Trace


def measured_costs(trace: Trace, line: list[RankTrace]) -> Costs:
    """Medians by stage and kind over all microbatches and traced steps; messages take no time."""
    seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in line:
        for span in rank.actions:
            seen[span.action.kind, span.action.stage].append(span.end - span.start)
    stages = range(trace.schedule.placement.stages)

    def of(kind: Kind) -> tuple[float, ...]:
        return tuple(median(seen.get((kind, stage), [0.0])) for stage in stages)

    ones = (1.0,) * len(stages)
    return Costs(f=of(FORWARD), i=of(INPUT_GRAD), w=of(WEIGHT_GRAD), b=of(BACKWARD), activation=ones)


def predict(trace: Trace, line: list[RankTrace]) -> Simulation:
    return simulate(trace.schedule, measured_costs(trace, line))
