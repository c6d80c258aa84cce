"""A second opinion on time: the longest path through compute orders and data edges, by repeated sweeps; slow and plain.
It knows no buffers and no channels; a message takes `hop` from the end of its producer."""

from fivefold.schedule import Costs, Schedule


def ends(schedule: Schedule, costs: Costs, hop: float) -> dict[tuple[str, int, int], float]:
    """When every action ends, keyed by (kind, stage, microbatch); "G" is the gradient that B or I hands on."""
    owner, last = schedule.placement.owner, schedule.placement.stages - 1
    finish: dict[tuple[str, int, int], float] = {}
    for _ in range(10_000):
        changed = False
        for rank in range(schedule.p):
            free = 0.0
            order = list(schedule.compute(rank))
            while order:
                group = [order.pop(0)]
                if group[0].joined:
                    group.append(order.pop(0))
                start = free
                for kind, stage, k, _ in group:
                    inputs = []
                    if kind == "F" and stage > 0:
                        inputs.append(("F", stage - 1, k))
                    if kind in "BI" and stage < last:
                        inputs.append(("G", stage + 1, k))
                    for source in inputs:
                        start = max(start, finish.get(source, 0.0) + (hop if owner[source[1]] != rank else 0.0))
                if len(group) == 2:
                    forward, backward = sorted(group, key=lambda action: action.kind != "F")
                    free = start + costs.joined(forward.stage, backward.stage)
                else:
                    free = start + costs.of(group[0].kind)[group[0].stage]
                for kind, stage, k, _ in group:
                    for key in [(kind.value, stage, k)] + [("G", stage, k)] * (kind in "BI"):
                        changed |= finish.get(key) != free
                        finish[key] = free
        if not changed:
            return finish
    raise AssertionError("the orders contain a circle")
