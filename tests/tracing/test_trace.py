"""Real ranks train and are traced: the file is one that viewers read, and says what schedule and counter say."""

import json
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.cost.collective_time import Traffic
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.tracing.chrome import LaneNumber, write_trace
from fivefold.tracing.clock_offset import clock_offset
from fivefold.tracing.records import Trace
from fivefold.tracing.summary import TraceSummary
from fivefold.trainer.loop import Trainer
from tests.ranks import run_ranks

SMALL = ["model.layers=4", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=8", "train.steps=4",
         "train.device=cpu", "train.eval_samples=0", "trace.after=2", "trace.steps=2"]  # fmt: skip
LAYOUTS = [
    "dp=2,pp=2,microbatches=4,schedule=zb-h1,zero=1",
    "tp=2,pp=2,sp,microbatches=2,schedule=zb-v",
    pytest.param("dp=4,zero=3,microbatches=2", marks=pytest.mark.slow),
    pytest.param("cp=2,pp=2,microbatches=2,schedule=interleaved", marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2,zero=2,microbatches=2", marks=pytest.mark.slow),
]


def traced(rank: int, world: int, job: Job) -> tuple[list[Traffic], Trace | None]:
    """What a plain counter sees of step 2, and the trace of steps 3 and 4."""
    trainer = Trainer(job, preflight(job, world), Mesh.of(job.layout, torch.device("cpu")))
    counter, trace = TrafficCounter(trainer.mesh), None
    for step, read in enumerate(trainer.reads(), start=1):
        with trainer.tracer.step(step), counter if step == 2 else nullcontext():
            trainer.step(step, read())
        trace = trainer.tracer.gather(step, trainer.engine.schedule)
    return counter.rows(), trace


@pytest.fixture(scope="module", params=LAYOUTS)
def ran(request: Any, tokens: Path, tmp_path_factory: Any) -> tuple[TraceSummary, list[list[Traffic]], dict[str, Any]]:
    job = read_job(None, [*SMALL, f"data.path={tokens}", f"layout={request.param}"])
    found = run_ranks(4, traced, job)
    summary = TraceSummary(found[0][1])
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(summary, path)
    return summary, [rows for rows, _ in found], json.loads(path.read_text())


def slices(document: dict[str, Any], rank: int, thread: int | None = None) -> list[dict[str, Any]]:
    mine = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
    return sorted((e for e in mine if thread in (None, e["tid"])), key=lambda event: event["ts"])


def test_the_file_is_a_chrome_trace_with_named_lanes(ran: Any) -> None:
    _, _, document = ran
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M", "s", "f"}
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in names
    assert {"steps", "compute", "simulated", "waits"} < set(names.values())


def test_no_two_slices_of_a_lane_overlap(ran: Any) -> None:
    _, _, document = ran
    for rank in range(4):
        for thread in {event["tid"] for event in slices(document, rank)}:
            for one, next_ in pairwise(slices(document, rank, thread)):
                assert one["ts"] + one["dur"] <= next_["ts"] + 2e-3, (one, next_)  # us; two roundings


def test_ranks_computed_in_the_order_of_the_schedule_and_so_does_the_simulation(ran: Any) -> None:
    summary, _, document = ran
    for rank in summary.trace.ranks:
        wanted = [str(action) for action in summary.trace.schedule.compute(rank.pp_rank)]
        done = [e["name"] for e in slices(document, rank.rank, LaneNumber.COMPUTE) if e["cat"] == "compute"]
        assert done == wanted * 2
        simulated = [e for e in document["traceEvents"] if e["pid"] == rank.rank and e.get("cat") == "simulated"]
        assert [e["name"] for e in simulated] == wanted * 2
        updates = [e["name"] for e in slices(document, rank.rank, LaneNumber.COMPUTE) if e["cat"] == "optimizer"]
        assert updates == ["norm", "STEP"] * 2


def test_bytes_and_calls_by_axis_are_those_of_the_counter(ran: Any) -> None:
    summary, counted, document = ran
    for rank, rows in zip(summary.trace.ranks, counted, strict=True):
        sent: dict[tuple[str, str], list[int]] = {}
        for event in slices(document, rank.rank):
            if "bytes" in event.get("args", {}):
                sent.setdefault((event["args"]["axis"], event["args"]["kind"]), []).append(event["args"]["bytes"])
        found = {key: (len(sizes), sum(sizes)) for key, sizes in sent.items()}
        assert found == {(row.axis, row.kind): (2 * row.calls, 2 * row.payload) for row in rows}
        assert found


def test_the_parts_of_a_step_add_up_and_none_is_negative(ran: Any) -> None:
    summary, _, _ = ran
    for rank, mean in zip(summary.trace.ranks, summary.by_rank, strict=True):
        measured = sum(window.end - window.start for window in rank.steps) / 2
        parts = [mean.compute, mean.bubble, mean.optimizer, mean.other, *mean.exposed.values()]
        assert sum(parts) == pytest.approx(measured)
        assert all(part > -1e-9 for part in (*parts, mean.wait, *mean.hidden.values()))
        assert mean.compute > 0
        assert mean.optimizer > 0
        assert mean.wait <= mean.bubble + 1e-9


def test_every_message_has_an_arrow_from_its_send_to_its_consumer(ran: Any) -> None:
    summary, _, document = ran
    ends: dict[str, dict[str, float]] = {}
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event["ts"]
    schedule, lines = summary.trace.schedule, len(summary.trace.pipelines)
    channels = [action for order in schedule.ranks for action in order if str(action).startswith("SEND")]
    assert len(ends) == 2 * lines * len(channels)
    assert all(arrow["s"] <= arrow["f"] for arrow in ends.values())


def test_waits_say_what_they_are_for(ran: Any) -> None:
    summary, _, document = ran
    names = {event["name"] for rank in range(4) for event in slices(document, rank, LaneNumber.WAITS)}
    piped = summary.trace.schedule.p > 1
    assert any(name.startswith("F") and name.endswith("waits: pp receive") for name in names) == piped
    assert any(name.endswith("all-reduce") for name in names)  # of the gradient norm, on any layout


# ---- clocks ----------------------------------------------------------------------------------------------------------


def skewed(rank: int, world: int) -> tuple[float, float]:
    """Ranks 2 and 3 are on a machine of their own, whose clock is 1,000 s ahead."""
    mesh = Mesh.of(Layout(dp=4), torch.device("cpu"))
    ahead = 1000.0 if rank > 1 else 0.0
    return clock_offset(mesh, lambda: time.perf_counter() + ahead, host=f"machine {rank // 2}")


def test_another_machines_clock_is_found_within_its_stated_error() -> None:
    found = run_ranks(4, skewed)
    assert found[:2] == [(0.0, 0.0)] * 2
    assert found[2] == found[3]
    offset, error = found[2]
    assert 0 < error < 0.1
    assert abs(offset + 1000.0) <= error


# ---- off -------------------------------------------------------------------------------------------------------------


def test_without_trace_steps_nothing_watches() -> None:
    job = read_job(None, [change for change in SMALL if not change.startswith("trace.")])
    trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cpu")))
    seen: list[Trace] = []
    trainer.run([], seen.append)
    assert seen == []
    assert trainer.tracer.watch is None
