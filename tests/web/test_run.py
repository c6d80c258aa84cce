"""The Run view: figures are those of the run's own files, it reads on where it stopped, and opens nothing else."""

import errno
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.store import Store
from fivefold.support.errors import UserError
from fivefold.tracing.chrome import LaneNumber
from fivefold.tracing.lanes import read_lanes
from fivefold.tracing.result import TraceResult
from fivefold.tracing.summary import TraceSummary
from fivefold.trainer.records import METRICS_FILE, to_line, trim
from fivefold.trainer.result import TrainResult
from fivefold.web import run as api_run
from fivefold.web import run_files
from fivefold.web.question import Ask
from fivefold.web.report import answered_view
from fivefold.web.run import CURVE_BUCKETS, is_claimed, payload, tail, thin, trace
from fivefold.web.run_files import metrics, runs_in
from tests.tracing.test_summary import by_hand
from tests.web.a_run import ENVIRONMENT, a_run, log, step
from tests.web.serving import serving


def asked(*roots: Path, **words: str | int) -> Ask:
    return Ask({name: str(word) for name, word in words.items()}, roots)


def test_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo", experts=True)
    with (folder / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"step"}\n')
    page = payload(asked(tmp_path))
    (run,) = page["shown"]
    whole = TrainResult.read(folder).to_dict()
    for name in api_run.COLUMNS:
        assert run["columns"][name] == [one[name] for one in whole["steps"]], name
    for name in api_run.LOAD_COLUMNS:
        assert run["columns"][name] == [one["load"][name] for one in whole["steps"]], name
    assert run["damaged"] == whole["damaged"] == 1
    assert run["evaluations"] == [[10, 0.6], [20, 0.3]]
    assert [one["step"] for one in run["loads"]] == [5, 10, 15, 20]
    assert run["loads"][-1]["tokens"] == whole["steps"][-1]["load"]["tokens"]
    assert run["environment"] == ENVIRONMENT
    assert (run["job"]["train"]["steps"], run["layout"]) == (40, "pp=2,microbatches=4")
    assert page["runs"][0]["name"] == "demo"
    json.dumps(page)


def test_the_tail_is_read_from_its_offset(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo", 4)
    (run,) = payload(asked(tmp_path))["shown"]
    at = {"run": "demo", "file": run["file"], "offset": run["offset"], "life": run["life"]}
    nothing = tail(asked(tmp_path, **at))
    assert (nothing["columns"]["step"], nothing["anew"], "events" in nothing) == ([], False, False)
    five, six = to_line(step(5)), to_line(step(6))
    with (folder / METRICS_FILE).open("ab", buffering=0) as file:
        file.write(five + b"damaged\n" + six[:20])
        first = tail(asked(tmp_path, **at))
        assert (first["columns"]["step"], first["damaged"]) == ([5], 1)  # half a line is not damaged: it may go on
        at |= {"file": first["file"], "offset": first["offset"]}
        assert tail(asked(tmp_path, **at))["columns"]["step"] == []
        file.write(six[20:])
    last = tail(asked(tmp_path, **at))
    assert (last["columns"]["step"], last["damaged"], last["anew"]) == ([6], 0, False)


def test_a_run_that_resumes_writes_its_metrics_anew(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo", 8)
    (run,) = payload(asked(tmp_path))["shown"]
    trim(folder / METRICS_FILE, 3)  # as a start after step 3 does; then it goes beyond where the other was
    with (folder / METRICS_FILE).open("ab") as file:
        file.writelines(to_line(step(number)) for number in range(4, 30))
    found = tail(asked(tmp_path, run="demo", file=run["file"], offset=run["offset"], life=run["life"]))
    assert found["anew"]
    assert found["columns"]["step"] == [*range(1, 30)]
    os.truncate(folder / METRICS_FILE, 0)
    cut = tail(asked(tmp_path, run="demo", file=found["file"], offset=found["offset"], life=""))
    assert (cut["anew"], cut["columns"]["step"], cut["offset"]) == (True, [], 0)


def test_long_metrics_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.web.run_files.MAX_PIECE_BYTES", 700)
    monkeypatch.setattr("fivefold.web.run_files.MAX_PIECES", 100)
    a_run(tmp_path / "demo", 30)
    (run,) = payload(asked(tmp_path))["shown"]
    assert run["columns"]["step"] == [*range(1, 31)]
    assert run["offset"] == run["size"]


def test_a_long_run_is_thinned_and_keeps_its_spikes() -> None:
    steps = [step(number) for number in range(1, 20 * CURVE_BUCKETS)]
    spike, kick = 777, 5_432
    steps[spike], steps[kick] = structs.replace(steps[spike], loss=99.0), structs.replace(steps[kick], grad_norm=99.0)
    kept = thin(steps)
    assert len(kept) <= 4 * CURVE_BUCKETS + 2
    assert {steps[0], steps[spike], steps[kick], steps[-1]} <= set(kept)
    assert [one.step for one in kept] == sorted({one.step for one in kept})
    assert thin(steps[:100]) == steps[:100]
    gap = 4_321
    steps[gap] = structs.replace(steps[gap], loss=None)
    assert steps[gap] in thin(steps), "a step without a loss stays a gap"
    assert len(thin([structs.replace(one, loss=None) for one in steps])) <= 4 * CURVE_BUCKETS + 2


def test_the_events_of_its_life_in_their_order(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo")
    fault = "error: step 13: rank 0 (pp 0): waited for rank 1: the connection is closed"
    resumed = "resumes from x/checkpoints/step-00000010, after step 10"
    stopped = "stopped by SIGTERM after step 20; its checkpoint is saved"
    log(folder, [["step  12/40  loss 2.1", fault], [resumed, "note  a checkpoint waits", stopped]])
    log(folder, [["Traceback (most recent call last):", '  File "x.py", line 1, in f', "ValueError: boom"]], rank=1)
    (folder / "checkpoints/step-00000030.damaged").mkdir()
    now = time.time()
    for number, age in ((10, 60), (20, 30)):
        os.utime(folder / f"checkpoints/step-{number:08d}" / MANIFEST, (now - age, now - age))
    (run,) = payload(asked(tmp_path))["shown"]
    kinds = [(one["kind"], one["step"]) for one in run["events"]]
    assert kinds[:2] == [("checkpoint", 10), ("checkpoint", 20)]
    others = [kind for kind in kinds[2:] if kind not in (("aside", 30), ("fault", None))]  # of other files
    assert others == [("start", 0), ("fault", 13), ("restart", 10), ("note", None), ("stop", 20)]
    assert len(kinds) == 9
    said = {one["text"] for one in run["events"]}
    assert "rank 1: ValueError: boom" in said
    assert "stopped by SIGTERM" in said
    assert any(text.startswith("resumes after step 10; 2 ranks") for text in said)


def test_the_trace_is_the_one_that_was_written(tmp_path: Path) -> None:
    a_run(tmp_path / "demo", traced=True)
    page = payload(asked(tmp_path))
    assert page["asks"] == {"trace": {"run": "demo"}}
    found = trace(asked(tmp_path, **page["asks"]["trace"]))
    assert found["summary"] == TraceResult(TraceSummary(by_hand()), Path()).figures()
    assert (found["steps"], found["microseconds"], found["layout"]) == ([1], 14e6, "pp=2")
    first = {lane["name"]: lane for lane in found["ranks"][0]["lanes"]}
    assert first["compute"]["slices"] == [
        [1e6, 1e6, "F0.0", "F"],
        [9e6, 2e6, "B0.0", "B"],
        [12e6, 1.5e6, "STEP", "optimizer"],
    ]
    simulated = TraceSummary(by_hand()).simulations[0].timeline[0]
    spans = [(1 + span.start, span.end - span.start, span.action) for span in simulated]  # from the first F on
    assert first["simulated"]["slices"] == [
        [1e6 * start, 1e6 * long, str(one), str(one.kind)] for start, long, one in spans
    ]
    assert {lane["kind"] for lane in first.values()} == {"measured", "simulated", "waits", "communication"}
    with pytest.raises(UserError, match="step 3 is not traced; those that are: 1"):
        trace(asked(tmp_path, run="demo", step=3))
    assert set(answered_view("run", asked(tmp_path))["parts"]) == {"trace"}


def test_a_file_that_is_no_trace_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("[]", '{"traceEvents": [{"name": 1}]}', "\x80\x04K\x01."):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a trace"):
            read_lanes(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UserError, match="has no traced step"):
        read_lanes(path)


# ---- what is read --------------------------------------------------------------------------------------------------


def test_a_directory_that_is_no_run_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = payload(asked(tmp_path / "empty"))
    assert (page["runs"], page["shown"]) == ([], [])
    assert page["notes"] == [
        f"{tmp_path / 'empty'} is not a run and contains none: a run has metrics.jsonl or job.toml"
    ]
    assert payload(asked())["given"] == 0
    a_run(tmp_path / "demo", 1)
    page = payload(asked(tmp_path / "gone", tmp_path))
    assert [run["name"] for run in page["runs"]] == ["demo"]
    assert page["notes"] == [
        f"{tmp_path / 'gone'} cannot be read: No such file or directory",
        f"1 folder of {tmp_path} without metrics.jsonl: empty",
    ]


def test_runs_are_names_and_no_paths(tmp_path: Path) -> None:
    a_run(tmp_path / "given/demo", 1)
    a_run(tmp_path / "other/secret", 1)
    roots = (tmp_path / "given",)
    for name in ("../other/secret", str(tmp_path / "other/secret"), "secret", ".", "demo/../demo"):
        for question in (payload, tail, trace):
            word = {"runs": name} if question is payload else {"run": name}
            with pytest.raises(UserError, match="there is no run"):
                question(Ask(word, roots))
    with pytest.raises(UserError, match="at most 6"):
        payload(Ask({"runs": "a,b,c,d,e,f,g"}, roots))


def test_links_that_lead_out_are_left_alone(tmp_path: Path) -> None:
    outside = a_run(tmp_path / "outside/secret", 10, traced=True)
    given = tmp_path / "given"
    inner = a_run(given / "demo", 1)
    (given / "away").symlink_to(outside)
    for name in (METRICS_FILE, "job.toml", "environment.json", "trace.json", "checkpoints", "logs"):
        (inner / name).unlink(missing_ok=True)
        (inner / name).symlink_to(outside / name)
    (inner / METRICS_FILE).unlink()
    (inner / METRICS_FILE).write_bytes(to_line(step(1)))
    page = payload(asked(given))
    assert [run["name"] for run in page["runs"]] == ["demo"]
    assert page["notes"] == [
        f"away of {given} lead out of it and are not read; `fivefold ui --runs DIRECTORY` reads another directory"
    ]
    (run,) = page["shown"]
    assert (run["job"], run["environment"], run["events"], run["traced"]) == ({}, {}, [], False)
    with pytest.raises(UserError, match="leads out of the directory"):
        trace(asked(given, run="demo"))
    (inner / METRICS_FILE).unlink()
    (inner / METRICS_FILE).symlink_to(outside / METRICS_FILE)
    (inner / "job.toml").unlink()
    (inner / "job.toml").write_text("")
    assert payload(asked(given))["shown"][0]["columns"]["step"] == []


def test_pipes_and_nonsense_are_survived(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    os.mkfifo(run / METRICS_FILE)
    (run / "job.toml").write_bytes(b"\xff\xfe not toml [")
    (run / "environment.json").write_text("[1]")
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "checkpoints/step-00000001" / MANIFEST).write_text("{}")
    (run / "logs").mkdir()
    os.mkfifo(run / "logs/rank-0.log")
    page = payload(asked(tmp_path))
    (shown,) = page["shown"]
    assert (shown["job"], shown["environment"], shown["columns"]["step"]) == ({}, {}, [])
    (event,) = shown["events"]
    assert "is damaged" in event["text"]


def test_a_link_to_itself_hides_no_run(tmp_path: Path) -> None:
    a_run(tmp_path / "demo", 10)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    (tmp_path / "demo/logs").symlink_to("logs")
    (tmp_path / "demo/checkpoints/loop").symlink_to("loop")
    page = payload(asked(tmp_path))
    assert [run["name"] for run in page["runs"]] == ["demo"]
    assert page["shown"][0]["columns"]["step"] == [*range(1, 11)]
    (note,) = page["notes"]
    assert note.startswith(f"back, loop, there of {tmp_path} lead out of it")


def test_a_log_of_many_starts_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is held against each pattern a few times, and not once for every start."""
    folder = a_run(tmp_path / "demo", 2)
    many = 5_000
    log(folder, [[f"resumes from step-{number}, after step {number}"] for number in range(many)])
    looked = 0

    class Counting:
        def __init__(self, pattern: re.Pattern[str]):
            self.pattern = pattern

        def match(self, line: str) -> re.Match[str] | None:
            nonlocal looked
            looked += 1
            return self.pattern.match(line)

    for name in ("_START", "_RESUMES"):
        monkeypatch.setattr(run_files, name, Counting(getattr(run_files, name)))
    found = run_files.events(runs_in((tmp_path,))[0]["demo"], left := [])
    assert looked < 5 * 2 * many
    assert [one["step"] for one in found[-3:]] == [many - 3, many - 2, many - 1]
    assert left == [f"{many - run_files.MAX_EVENTS:,} earlier events are not shown"]


@pytest.mark.parametrize("digits", ["9" * 5_000, "9" * 200, "\u0661" * 5_000])
def test_a_number_without_end_in_a_log_is_no_step(tmp_path: Path, digits: str) -> None:
    folder = a_run(tmp_path / "demo", 2)
    header = f"{'=' * 20} 2026-01-01T00:00:00+00:00 rank {digits} of {digits} on a, pid 1, start {digits}"
    far = f"{'=' * 20} 0001-01-01T00:00:00 rank 0 of 2 on a, pid 1"
    lines = [
        header, far, f"resumes from x, after step {digits}", f"step {digits}/9", f"stopped by me after step {digits}",
        f"error: in step {digits}", f"note: step {digits}: odd", "Traceback (most recent call last)", digits,
    ]  # fmt: skip
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").write_text("\n".join(lines))
    (folder / METRICS_FILE).write_bytes(b'{"kind":"judged","samples":' + digits.encode() + b"}\n" + to_line(step(1)))
    (folder / "environment.json").write_text(f'{{"a": {digits}}}')
    (folder / "job.toml").write_text(f"a = {digits}")
    (shown,) = payload(asked(tmp_path))["shown"]
    assert (shown["columns"]["step"], shown["damaged"]) == ([1], 1)
    assert [one["kind"] for one in shown["events"]] == ["start", "note", "fault", "fault"]
    assert [one.partition(" cannot")[0] for one in shown["left_out"]] == ["job.toml", "environment.json"]
    msgspec.json.encode(shown)


def test_of_a_long_file_of_metrics_parts_are_read_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "demo", 400)
    size = (tmp_path / "demo" / METRICS_FILE).stat().st_size
    monkeypatch.setattr("fivefold.web.run_files.MAX_PIECE_BYTES", size // 10)
    monkeypatch.setattr("fivefold.web.run_files.MAX_LINE_BYTES", size // 40)
    (run,) = payload(asked(tmp_path))["shown"]
    steps = run["columns"]["step"]
    assert (steps[0], steps[-1], run["offset"], run["damaged"]) == (1, 400, size, 0)
    assert 16 * 8 <= len(steps) <= 16 * 10
    assert steps == sorted(set(steps))
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) < 40  # from all of it
    (said,) = run["left_out"]
    assert said.startswith("metrics.jsonl has ")
    assert said.endswith("were read, spread evenly, and the rest was not")
    for name in ("second", "third", "fourth"):
        shutil.copytree(tmp_path / "demo", tmp_path / name)
    several = payload(asked(tmp_path, runs="demo,second,third,fourth"))["shown"]
    assert [len(each["columns"]["step"]) < len(steps) / 2 for each in several] == [True] * 4
    assert all(each["left_out"][0].startswith("metrics.jsonl has ") for each in several)
    with (tmp_path / "demo" / METRICS_FILE).open("ab") as file:
        file.write(to_line(step(401)))
    more = tail(asked(tmp_path, run="demo", file=run["file"], offset=run["offset"]))
    assert (more["columns"]["step"], more["anew"]) == ([401], False)


def test_lines_without_end_are_counted_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "demo", 2)
    (folder / METRICS_FILE).write_bytes(b"\n" * 1000)
    monkeypatch.setattr("fivefold.web.run_files.MAX_PIECE_LINES", 100)
    (run,) = payload(asked(tmp_path))["shown"]
    assert (run["damaged"], run["offset"]) == (800, 800)
    assert run["left_out"] == [
        "metrics.jsonl has 1000 B: its first 800 B were read, with 800 lines at most, and the rest was not"
    ]
    rest = tail(asked(tmp_path, run="demo", file=run["file"], offset=800))
    assert (rest["damaged"], rest["offset"]) == (100, 900)


def test_directories_and_jobs_without_end_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        a_run(tmp_path / f"run-{number}", 1)
    monkeypatch.setattr("fivefold.web.run_files.MAX_FOLDERS", 4)
    monkeypatch.setattr("fivefold.web.run.MAX_LISTED_JOB_BYTES", 2 * (tmp_path / "run-0/job.toml").stat().st_size)
    page = payload(asked(tmp_path))
    assert [bool(run["model"]) for run in page["runs"]] == [True, True, False, False]
    assert page["notes"] == [f"{tmp_path} has 2 more names than the 4 that are looked at"]
    (tmp_path / "run-3/job.toml").write_text("#" * 70_000)
    (run,) = payload(asked(tmp_path, runs="run-3"))["shown"]
    assert run["left_out"] == ["job.toml cannot be read: it has 68.36 KiB, and at most 64.00 KiB are read"]


def test_long_logs_and_manifests_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "demo", 20)
    for rank in range(18):
        log(folder, [["x" * 300]], rank)
    monkeypatch.setattr(run_files, "MAX_LOG_BYTES", 300)
    monkeypatch.setattr(run_files, "MAX_MANIFEST_BYTES", 10)
    (run,) = payload(asked(tmp_path))["shown"]
    assert run["left_out"][0] == "logs of 2 more ranks are not read"
    assert run["left_out"][1].startswith("logs/rank-0.log has ")
    assert len(run["left_out"]) == 17
    assert [one["text"] for one in run["events"]] == ["its manifest is too long to read here"] * 2


def test_a_folder_that_is_not_for_this_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path / "demo", 10)

    def refuse(self: Store) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self.directory))

    monkeypatch.setattr(Store, "complete", refuse)
    (run,) = payload(asked(tmp_path))["shown"]
    assert run["left_out"] == [f"{tmp_path / 'demo' / 'checkpoints'} cannot be read: Permission denied"]


def test_a_trace_of_many_ranks_is_walked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = "9" * 5_000
    slices = [{"name": "f", "ph": "X", "pid": at % 50, "tid": 10, "ts": at, "dur": 1.0} for at in range(1000)]
    steps = [
        {"name": f"step {name}", "ph": "X", "tid": LaneNumber.STEPS, "ts": 0.0, "dur": 1e4} for name in (1, digits)
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*steps, *slices]}))
    monkeypatch.setattr("fivefold.tracing.lanes._MAX_SLICES", 100)
    found = read_lanes(tmp_path / "trace.json")
    assert (found["steps"], found["left_out"], found["slices_left_out"]) == ([1], 18, 640 - 100)
    assert sum(len(lane["slices"]) for rank in found["ranks"] for lane in rank["lanes"]) == 100
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"name": "a", "ph": "X", "pid": ' + digits + "}]}")
    with pytest.raises(UserError, match="is not a trace"):
        read_lanes(tmp_path / "trace.json")


@pytest.mark.parametrize(
    "job",
    ["[layout]\nschedule = 5", "[layout]\nschedule = [1]\ndp = {}", "layout = 3\nmodel = 1", "[train]\nsteps = 'x'"],
)
def test_a_damaged_job_breaks_no_other_run(tmp_path: Path, job: str) -> None:
    a_run(tmp_path / "demo", 2)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/job.toml").write_text(job)
    page = payload(asked(tmp_path, runs="demo,bad"))
    assert {run["name"] for run in page["runs"]} == {run["name"] for run in page["shown"]} == {"demo", "bad"}


def test_two_runs_of_one_name_have_two(tmp_path: Path) -> None:
    a_run(tmp_path / "a/demo", 1)
    a_run(tmp_path / "b/demo", 2)
    found, _ = runs_in((tmp_path / "a", tmp_path / "b/demo"))
    assert sorted(found) == ["demo", "demo~2"]
    lengths = {len(metrics(run).records) for run in found.values()}
    assert lengths == {1, 2}


def test_a_claim_that_is_held_is_seen_and_not_touched(tmp_path: Path) -> None:
    claim, locks = tmp_path / "claim", tmp_path / "locks"
    claim.touch()
    known = os.stat(claim)
    place = f"{os.major(known.st_dev):02x}:{os.minor(known.st_dev):02x}:{known.st_ino}"
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 {place} 0 EOF\n")
    assert is_claimed(claim, locks)
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 {place}9 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 8 {place} 0 EOF\n")
    assert not is_claimed(claim, locks)
    assert not is_claimed(claim, tmp_path / "absent")


def test_a_run_trains_as_long_as_records_come(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo", 2)
    assert payload(asked(tmp_path))["shown"][0]["training"]
    os.utime(folder / METRICS_FILE, (1e9, 1e9))
    assert not payload(asked(tmp_path))["shown"][0]["training"]


def test_the_server_answers_for_the_directories_that_it_was_given(tmp_path: Path) -> None:
    a_run(tmp_path / "given/demo", 3, traced=True)
    a_run(tmp_path / "other", 3)
    with serving((tmp_path / "given",)) as server:
        page = server.ask("run").json
        assert page["shown"][0]["columns"]["loss"] == [5.0, 2.5, 5.0 / 3]
        assert server.ask("run", {"runs": "other"}).status == 400
        after = server.ask("run/tail", {"run": "demo", "file": str(page["shown"][0]["file"]), "offset": "0"})
        assert after.json["columns"] == page["shown"][0]["columns"]
        assert server.ask("run/trace", {"run": "demo"}).json["summary"]["schedule"] == "1f1b"
        assert server.ask("run/tail", {"run": "demo", "path": "/etc/passwd"}).status == 400


def test_checkpoints_are_those_that_the_store_finds_with_their_bytes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "demo", 20)
    found = [one for one in payload(asked(tmp_path))["shown"][0]["events"] if one["kind"] == "checkpoint"]
    saved = sorted(Store(folder / "checkpoints").complete(), key=lambda one: one.step)
    told = sorted((one["step"], one["bytes"], one["text"]) for one in found)
    assert told == [(one.step, one.bytes, f"{len(one.manifest.files)} files") for one in saved]
    assert told


def test_a_name_that_is_no_text_is_shown_as_one(tmp_path: Path) -> None:
    """A name on a disk is any bytes; what is sent is text."""
    for name in (b"x\xff", b"x\xfe"):
        a_run(tmp_path / os.fsdecode(name), 10)
    (tmp_path / os.fsdecode(b"other\xff")).mkdir()
    (tmp_path / os.fsdecode(b"x\xff") / "checkpoints" / os.fsdecode(b"step-00000007.damaged\xff")).mkdir()
    page = payload(asked(tmp_path))
    assert {run["name"] for run in page["runs"]} == {"x\ufffd", "x\ufffd~2"}
    assert msgspec.json.encode(payload(asked(tmp_path, runs="x\ufffd,x\ufffd~2")))
    assert "without metrics.jsonl: other\ufffd" in page["notes"][0]
    with serving((tmp_path,)) as server:
        assert server.ask("run/tail", {"run": "x\ufffd~2"}).json["columns"]["step"] == [*range(1, 11)]
