"""A trace as Chrome's JSON, for ui.perfetto.dev: a process for each rank, and in it a lane for each kind of thing.

    steps       the loop's steps
    compute     F, B, I, W with stage and microbatch, and the optimizer
    simulated   the same actions of the same schedule, with the medians of the measured durations
    waits       what the rank stood still for: messages between stages, collectives
    dp, tp ...  what was under way along each axis, with kind and bytes; more than one lane where it overlaps

An arrow leads from a message's send to the action that consumes it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, SEND_ACTIVATION, SEND_GRADIENT
from fivefold.schedule.clock import Span
from fivefold.schedule.simulate import Simulation
from fivefold.trace.records import Flight, RankTrace, Window
from fivefold.trace.summary import Summary

Event = dict[str, Any]
T = TypeVar("T", Window, Flight)
STEPS, COMPUTE, SIMULATED, WAITS, AXES = 1, 2, 3, 100, 200  # thread numbers: the order of the lanes
_PER_AXIS = 100  # lanes an axis may have


def write(summary: Summary, path: Path) -> None:
    """One file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document(summary), separators=(",", ":")) + "\n")
    part.replace(path)


def document(summary: Summary) -> dict[str, Any]:
    trace = summary.trace
    origin = min(rank.steps[0].start for rank in trace.ranks)
    painter = _Painter(summary, origin)
    events = [event for rank in trace.ranks for event in painter.rank(rank)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "layout": trace.layout,
            "schedule": trace.schedule.name,
            "clock_error_us": round(1e6 * max(rank.clock_error for rank in trace.ranks), 3),
        },
        "traceEvents": events,
    }


class _Painter:
    def __init__(self, summary: Summary, origin: float):
        self.summary, self.origin = summary, origin
        self.trace = summary.trace

    def rank(self, rank: RankTrace) -> Iterator[Event]:
        yield _named(rank.rank, 0, "process_name", f"rank {rank.rank}" + (f"  {rank.name}" if rank.name else ""))
        yield {**_named(rank.rank, 0, "process_sort_index", ""), "args": {"sort_index": rank.rank}}
        for number, name in {STEPS: "steps", COMPUTE: "compute", WAITS: "waits"}.items():
            yield from _lane(rank.rank, number, name)
        for window in rank.steps:
            yield self.slice(rank.rank, STEPS, f"step {window.step}", window.start, window.end)
        for span in rank.actions:
            yield self.action(rank.rank, COMPUTE, span, "compute")
            yield from self.arrival(rank, span)
        for update in rank.updates:
            yield self.slice(rank.rank, COMPUTE, update.name, update.start, update.end, "optimizer")
        yield from self.simulated(rank)
        for wait in rank.waits:
            kind = "message" if wait.message else wait.axis
            name = f"{wait.during} waits: {wait.axis} {wait.what}" if wait.during else f"{wait.axis} {wait.what}"
            yield self.slice(rank.rank, WAITS, name, wait.start, wait.end, kind)
        yield from self.flights(rank)

    def simulated(self, rank: RankTrace) -> Iterator[Event]:
        """Every run of the schedule, from where the measured one began; it may end later, in the next one's time."""
        number = self.summary.line_of[rank.rank]
        simulation, line = self.summary.simulations[number], self.trace.lines[number]
        timeline = _one_by_one(simulation, rank.place)
        starts = [self.trace.run(line, step)[0] for step in range(self.trace.steps)]
        for lane, runs in enumerate(
            _apart([Window(step, start, start + simulation.makespan) for step, start in enumerate(starts)])
        ):
            yield from _lane(rank.rank, SIMULATED + lane, "simulated")
            for run in runs:
                for span in timeline:
                    moved = span._replace(start=run.start + span.start, end=run.start + span.end)
                    yield self.action(rank.rank, SIMULATED + lane, moved, "simulated")

    def flights(self, rank: RankTrace) -> Iterator[Event]:
        for place, axis in enumerate(self.summary.axes):
            mine = sorted((flight for flight in rank.flights if flight.axis == axis), key=lambda flight: flight.start)
            for lane, flights in enumerate(_apart(mine)):
                thread = AXES + place * _PER_AXIS + lane
                yield from _lane(rank.rank, thread, axis)
                for flight in flights:
                    args: dict[str, Any] = {"axis": axis, "kind": flight.kind, "bytes": flight.payload}
                    if flight.during is not None:
                        args["during"] = str(flight.during)
                    name = f"{axis} {flight.kind}"
                    yield {**self.slice(rank.rank, thread, name, flight.start, flight.end, axis), "args": args}
                    yield from self.departure(rank, thread, flight)

    # ---- arrows --------------------------------------------------------------------------------------------------

    def departure(self, rank: RankTrace, thread: int, flight: Flight) -> Iterator[Event]:
        if flight.during is not None and flight.during.kind in (SEND_ACTIVATION, SEND_GRADIENT):
            target = flight.during.stage + (1 if flight.during.kind is SEND_ACTIVATION else -1)
            way = self.way(rank, flight.start, flight.during.kind is SEND_GRADIENT, target, flight.during.microbatch)
            yield self.arrow(rank.rank, thread, "s", flight.start, way)

    def arrival(self, rank: RankTrace, span: Span) -> Iterator[Event]:
        gradients = span.action.kind in (BACKWARD, INPUT_GRAD)
        if not gradients and span.action.kind is not FORWARD:
            return
        owner, stage = self.trace.schedule.placement.owner, span.action.stage
        source = stage + (1 if gradients else -1)
        if 0 <= source < len(owner) and owner[source] != owner[stage]:
            way = self.way(rank, span.start, gradients, stage, span.action.microbatch)
            yield {**self.arrow(rank.rank, COMPUTE, "f", span.start, way), "bp": "e"}

    def way(self, rank: RankTrace, time: float, gradients: bool, stage: int, microbatch: int) -> str:
        """The name of a message, the same at both ends."""
        step = next((window.step for window in rank.steps if window.start <= time < window.end), 0)
        return f"{rank.line}/{step}/{'g' if gradients else 'a'}{stage}.{microbatch}"

    def arrow(self, rank: int, thread: int, phase: str, time: float, way: str) -> Event:
        return {"name": "message", "cat": "message", "ph": phase, "id": way, **self.place(rank, thread, time)}

    # ---- slices --------------------------------------------------------------------------------------------------

    def action(self, rank: int, thread: int, span: Span, category: str) -> Event:
        args = {"kind": str(span.action.kind), "stage": span.action.stage, "microbatch": span.action.microbatch}
        return {**self.slice(rank, thread, str(span.action), span.start, span.end, category), "args": args}

    def slice(self, rank: int, thread: int, name: str, start: float, end: float, category: str = "step") -> Event:
        duration = round(1e6 * (end - self.origin), 3) - round(1e6 * (start - self.origin), 3)
        place = self.place(rank, thread, start)
        return {"name": name, "cat": category, "ph": "X", **place, "dur": max(0.0, round(duration, 3))}

    def place(self, rank: int, thread: int, time: float) -> Event:
        return {"ts": round(1e6 * (time - self.origin), 3), "pid": rank, "tid": thread}


def _named(rank: int, thread: int, what: str, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": {"name": name}}


def _lane(rank: int, thread: int, name: str) -> Iterator[Event]:
    yield _named(rank, thread, "thread_name", name)
    yield {**_named(rank, thread, "thread_sort_index", ""), "args": {"sort_index": thread}}


def _apart(spans: Sequence[T]) -> list[list[T]]:
    """Spans in the order of their starts, in as few lanes as it takes for none of a lane to overlap."""
    lanes: list[list[T]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _one_by_one(simulation: Simulation, place: int) -> list[Span]:
    """A rank's spans. A joined pair covers one time twice; here its F ends where its B starts, as they ran."""
    found: list[Span] = []
    for span in simulation.timeline[place]:
        if found and found[-1].action.joined:
            middle = span.start + simulation.costs.f[found[-1].action.stage]
            found[-1], span = found[-1]._replace(end=middle), span._replace(start=middle)
        found.append(span)
    return found
