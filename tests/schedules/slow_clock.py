"""A second opinion on time: every rank's list is walked with guesses of when messages arrive, then the arrivals are
worked out again, over and over until nothing changes; slow and plain. It shares no code with the engine.

It knows what the engine knows: buffers, latency and bandwidth, blocking sends, and receives that are posted late."""

from collections import defaultdict

from fivefold.schedules.actions import Action
from fivefold.schedules.costs import Costs
from fivefold.schedules.schedule import Schedule

Wire = tuple[str, int]  # "A" or "G", and the boundary it crosses
Times = dict[Wire, dict[int, float]]  # by the place of a message in its queue


def ends(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """When every compute action ends, by its text."""
    arrived: Times = defaultdict(dict)
    for _ in range(10_000):
        walks = [_walk(schedule, costs, rank, arrived) for rank in range(schedule.p)]
        sent = {wire: times for _, out, _ in walks for wire, times in out.items()}
        posted = {wire: times for _, _, into in walks for wire, times in into.items()}
        before, arrived = arrived, _arrivals(costs, sent, posted)
        if arrived == before:
            return {name: end for finish, _, _ in walks for name, end in finish.items()}
    raise AssertionError("the lists contain a circle")


def _arrivals(costs: Costs, sent: Times, posted: Times) -> Times:
    arrived: Times = defaultdict(dict)
    for wire, times in sent.items():
        free = 0.0
        for number in sorted(times):
            free = max(free, times[number], posted[wire][number]) + costs.link.message / costs.link.bandwidth
            arrived[wire][number] = free + costs.link.latency
    return arrived


def _walk(schedule: Schedule, costs: Costs, rank: int, arrived: Times) -> tuple[dict[str, float], Times, Times]:
    """One rank from its first action to its last: ends of compute, and when it sent and posted each message."""
    finish: dict[str, float] = {}
    sent: Times = defaultdict(dict)
    posted: Times = defaultdict(dict)
    numbers: dict[tuple[Wire, int], int] = {}
    now = 0.0
    order = list(schedule.ranks[rank])
    while order:
        group = [order.pop(0)]
        wire = _wire(group[0])
        if group[0].kind.startswith("RECV"):
            number = numbers[wire, group[0].microbatch] = len([1 for other, _ in numbers if other == wire])
            posted[wire][number] = now  # with late receives, to be overwritten by the consumer
        elif group[0].kind.startswith("SEND"):
            number = len(sent[wire])
            if costs.link.sends == "blocking":
                sent[wire][number] = now
                now = max(now, arrived[wire].get(number, 0.0))
            else:
                now = max(now, arrived[wire].get(number - schedule.buffers, 0.0))
                sent[wire][number] = now
        else:
            if group[0].joined:
                group.append(order.pop(0))
            inputs = [(_input(action), action.microbatch) for action in group]
            held = [(wire, numbers[wire, k]) for wire, k in inputs if wire is not None and (wire, k) in numbers]
            if not costs.link.overlap:
                for wire, number in held:
                    posted[wire][number] = now
            now = max([now, *(arrived[wire].get(number, 0.0) for wire, number in held)]) + _duration(costs, group)
            finish |= {str(action): now for action in group}
    return finish, sent, posted


def _duration(costs: Costs, group: list[Action]) -> float:
    if len(group) == 1:
        return {"F": costs.f, "B": costs.b, "I": costs.i, "W": costs.w}[group[0].kind.value][group[0].stage]
    forward, backward = group
    return costs.f[forward.stage] + costs.b[backward.stage] if costs.pair is None else costs.pair[forward.stage]


def _wire(action: Action) -> Wire:
    kind, stage = action.kind.value, action.stage
    return kind[-1], stage if kind in ("SEND_A", "RECV_G") else stage - 1


def _input(action: Action) -> Wire | None:
    kind, stage = action.kind.value, action.stage
    return {"F": ("A", stage - 1), "B": ("G", stage), "I": ("G", stage)}.get(kind)
