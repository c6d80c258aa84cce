"""A trace as Chrome's JSON, for ui.perfetto.dev: one process per rank, with one lane per kind of event.

    steps       the loop's steps
    compute     F, B, I, W with stage and microbatch, in them dispatch and combine of experts, and the optimizer
    beside      the second actions of joined pairs, where the two actions of a pair run alternately
    simulated   the same schedule on the simulator, with the medians of the measured durations
    waits       the rank's waits for messages between stages and for collectives
    dp, tp ...  the communication along each axis, with kind and bytes; overlapping calls have more than one lane

An arrow leads from a message's send to the action that consumes it. `lanes.py` reads such a file.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from fivefold.schedules.actions import SEND_KINDS, Action
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.simulate import Simulation
from fivefold.tracing.records import Flight, NamedSpan, RankTrace, StepWindow, Wait, joined_pairs
from fivefold.tracing.summary import TraceSummary

Event = dict[str, Any]
SpanT = TypeVar("SpanT", StepWindow, Flight)
_MAX_LANES_PER_AXIS = 100
_COLOURS = {"dispatch": "good", "combine": "bad"}  # Chrome's names of green and orange; others have a colour by name


class LaneNumber(IntEnum):
    """Thread numbers, by which the viewer sorts. SIMULATED and AXES are the first of several lanes."""

    STEPS = 1
    COMPUTE = 2
    BESIDE = 3
    SIMULATED = 4
    WAITS = 100
    AXES = 200


def write_trace(summary: TraceSummary, path: Path, figures: dict[str, Any] | None = None) -> None:
    """Writes the file atomically, with the `figures` of the summary, if they are given."""
    trace, builder = summary.trace, _EventBuilder(summary)
    facts: dict[str, Any] = {
        "layout": trace.layout,
        "schedule": trace.schedule.name,
        "clock_error_us": round(1e6 * max(rank.clock_error for rank in trace.ranks), 3),
    }
    facts |= {"summary": figures} if figures else {}
    events = [event for rank in trace.ranks for event in builder.rank_events(rank)]
    document = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    temporary.replace(path)


class _EventBuilder:
    """Makes the events of each rank. Times count from the first start of any rank."""

    def __init__(self, summary: TraceSummary):
        self.summary, self.trace = summary, summary.trace
        self.origin = min(rank.steps[0].start for rank in self.trace.ranks)

    def rank_events(self, rank: RankTrace) -> Iterator[Event]:
        yield _metadata(rank, 0, "process_name", name=f"rank {rank.rank}" + (f"  {rank.name}" if rank.name else ""))
        yield _metadata(rank, 0, "process_sort_index", sort_index=rank.rank)
        beside = self.actions_beside(rank)
        with_arrow = set[tuple[int, Action]]()  # (step, action): the arrow ends at the first span of its action
        fixed_lanes = (LaneNumber.STEPS, LaneNumber.COMPUTE, LaneNumber.BESIDE, LaneNumber.WAITS)
        for lane in fixed_lanes:
            if lane != LaneNumber.BESIDE or beside:
                yield from _lane(rank, lane, lane.name.lower())
        for window in rank.steps:
            yield self.slice(rank, LaneNumber.STEPS, f"step {window.step}", window, "step")
        for span in rank.actions:
            lane = LaneNumber.BESIDE if span.action in beside else LaneNumber.COMPUTE
            yield self.action(rank, lane, span, "compute")
            if (key := (self.step_at(rank, span.start), span.action)) not in with_arrow:
                with_arrow.add(key)
                yield from self.arrow_end(rank, lane, span)
        for update in rank.updates:
            yield self.slice(rank, LaneNumber.COMPUTE, update.name, update, "optimizer")
        starts = [span.start for span in rank.actions]
        for part in rank.action_parts:  # in the lanes of their actions
            index = bisect_right(starts, part.start) - 1
            lane = LaneNumber.BESIDE if index >= 0 and rank.actions[index].action in beside else LaneNumber.COMPUTE
            yield self.slice(rank, lane, part.name, part, part.name) | {"cname": _COLOURS[part.name]}
        yield from self.simulated_events(rank)
        for wait in rank.waits:
            name = f"{wait.during} waits: {wait.axis} {wait.what}" if wait.during else f"{wait.axis} {wait.what}"
            yield self.slice(rank, LaneNumber.WAITS, name, wait, "message" if wait.is_message else wait.axis)
        yield from self.flight_events(rank)

    def actions_beside(self, rank: RankTrace) -> set[Action]:
        """The second actions of joined pairs, if pairs run alternately: then an action has several spans."""
        span_counts = Counter((self.step_at(rank, span.start), span.action) for span in rank.actions)
        return set(joined_pairs(self.trace.schedule).values()) if any(n > 1 for n in span_counts.values()) else set()

    def step_at(self, rank: RankTrace, time: float) -> int:
        """The number of the step at a time; 0 between steps."""
        return next((window.step for window in rank.steps if window.start <= time < window.end), 0)

    def simulated_events(self, rank: RankTrace) -> Iterator[Event]:
        """Each simulated run begins with the measured one; it may end later, and overlap with the next one."""
        number = self.summary.pipeline_of[rank.rank]
        simulation, pipeline = self.summary.simulations[number], self.trace.pipelines[number]
        timeline = _sequential_spans(simulation, rank.pp_rank)
        measured = [self.trace.schedule_run(pipeline, step) for step in range(self.trace.step_count)]
        windows = [run._replace(end=run.start + simulation.makespan) for run in measured]
        for thread, runs in enumerate(_without_overlaps(windows), start=LaneNumber.SIMULATED):
            yield from _lane(rank, thread, "simulated")
            for run in runs:
                for span in timeline:
                    moved = span._replace(start=run.start + span.start, end=run.start + span.end)
                    yield self.action(rank, thread, moved, "simulated")

    def flight_events(self, rank: RankTrace) -> Iterator[Event]:
        for index, axis in enumerate(self.summary.axes):
            on_axis = [flight for flight in rank.flights if flight.axis == axis]
            ordered = sorted(on_axis, key=lambda flight: flight.start)
            first_lane = LaneNumber.AXES + index * _MAX_LANES_PER_AXIS
            for thread, flights in enumerate(_without_overlaps(ordered), start=first_lane):
                yield from _lane(rank, thread, axis)
                for flight in flights:
                    args: dict[str, Any] = {"axis": axis, "kind": flight.kind, "bytes": flight.payload}
                    if flight.during is not None:
                        args["during"] = str(flight.during)
                    yield self.slice(rank, thread, f"{axis} {flight.kind}", flight, axis) | {"args": args}
                    yield from self.arrow_start(rank, thread, flight)

    # ---- arrows --------------------------------------------------------------------------------------------------

    def arrow_start(self, rank: RankTrace, thread: int, flight: Flight) -> Iterator[Event]:
        if flight.during is not None and flight.during.kind in SEND_KINDS:
            yield self.arrow(rank, thread, "s", flight.start, flight.during)

    def arrow_end(self, rank: RankTrace, lane: int, span: BusySpan) -> Iterator[Event]:
        if span.action[:2] in self.trace.schedule.placement.channel_of:
            yield self.arrow(rank, lane, "f", span.start, span.action) | {"bp": "e"}

    def arrow(self, rank: RankTrace, thread: int, phase: str, time: float, action: Action) -> Event:
        """One end of the arrow of a message, which the action sends or uses; its id is the same at both ends."""
        channel = self.trace.schedule.placement.channel_of[action[:2]]
        kind, step = "g" if channel.gradients else "a", self.step_at(rank, time)
        message_id = f"{rank.pipeline}/{step}/{kind}{channel.target}.{action.microbatch}"
        position = {"ts": self.microseconds(time), "pid": rank.rank, "tid": thread}
        return {"name": "message", "cat": "message", "ph": phase, "id": message_id, **position}

    # ---- slices --------------------------------------------------------------------------------------------------

    def action(self, rank: RankTrace, thread: int, span: BusySpan, category: str) -> Event:
        args = {"kind": str(span.action.kind), "stage": span.action.stage, "microbatch": span.action.microbatch}
        return self.slice(rank, thread, str(span.action), span, category) | {"args": args}

    def slice(
        self,
        rank: RankTrace,
        thread: int,
        name: str,
        time: StepWindow | BusySpan | NamedSpan | Wait | Flight,
        category: str,
    ) -> Event:
        start = self.microseconds(time.start)
        position = {"ts": start, "pid": rank.rank, "tid": thread}
        duration = max(0.0, round(self.microseconds(time.end) - start, 3))
        return {"name": name, "cat": category, "ph": "X", **position, "dur": duration}

    def microseconds(self, time: float) -> float:
        return round(1e6 * (time - self.origin), 3)


def _metadata(rank: RankTrace, thread: int, name: str, /, **args: Any) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": rank.rank, "tid": thread, "args": args}


def _lane(rank: RankTrace, thread: int, name: str) -> Iterator[Event]:
    yield _metadata(rank, thread, "thread_name", name=name)
    yield _metadata(rank, thread, "thread_sort_index", sort_index=thread)


def _without_overlaps(spans: Sequence[SpanT]) -> list[list[SpanT]]:
    """Divides spans, which are in the order of their starts, into as few lanes without overlaps as possible."""
    lanes: list[list[SpanT]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _sequential_spans(simulation: Simulation, pp_rank: int) -> list[BusySpan]:
    """A rank's simulated spans without overlaps: the two actions of a joined pair, which have the same time, divide it
    by their durations."""
    spans: list[BusySpan] = []
    for span in simulation.timeline[pp_rank]:
        if spans and spans[-1].action.joined:
            forward, backward = simulation.costs.f[spans[-1].action.stage], simulation.costs.b[span.action.stage]
            middle = span.start + (span.end - span.start) * forward / ((forward + backward) or 1.0)
            spans[-1], span = spans[-1]._replace(end=middle), span._replace(start=middle)
        spans.append(span)
    return spans
