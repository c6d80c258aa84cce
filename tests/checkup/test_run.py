"""The course of a checkup, with commands that pretend: what is told, what is written, and what a failure leaves."""

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from fivefold.accuracy.cases import read_rows
from fivefold.accuracy.result import planner_accuracy
from fivefold.checkup.anonymous import anonymous
from fivefold.checkup.command import CommandEnd
from fivefold.checkup.devices import chosen_model
from fivefold.checkup.page import to_page
from fivefold.checkup.parts import Budget
from fivefold.checkup.report import CheckupReport
from fivefold.checkup.result import CheckupResult, report_table
from fivefold.checkup.tasks import Task
from fivefold.hardware.cluster import Cluster
from fivefold.launch.exits import INTERRUPTED
from fivefold.render.blocks import to_text
from fivefold.support.errors import UserError
from tests.checkup.made import H200, HOST, Pretending, checked, proof, write_run


def statuses(report: CheckupReport) -> dict[str, str]:
    return {part.name: part.status for part in report.parts}


def test_a_checkup_that_finds_nothing(tmp_path: Path) -> None:
    team = Pretending(tmp_path / "runs")
    report, cluster, code = checked(team)
    assert set(statuses(report).values()) == {"passed"}
    assert report.ok
    assert code == 0
    assert [task.kind for task in team.tasks] == ["doctor", "verify", "lose", "lose", "calibrate", *["train"] * 3]
    assert [task.lost for task in team.tasks[2:4]] == [-1, 1]
    lost = report.part("lost-rank")
    assert lost
    assert "who was named: rank 1 (dp 1) was ended by SIGKILL in step 5" in lost.says
    assert "the losses of all 8 steps are those of the undisturbed run, to the bit" in lost.says
    assert len({run.layout for run in report.runs}) == 3
    assert report.runs[0].role == "the planner's best"
    assert all(run.measured and run.measured.seconds == 0.5 for run in report.runs)
    assert team.closed
    assert not (tmp_path / "runs").exists()
    assert cluster
    assert Cluster.from_dict(report.clusters["calibrated"]) == cluster


def test_what_is_wrong_is_found_and_the_next_part_begins(tmp_path: Path) -> None:
    def instead(task: Task) -> CommandEnd | None:
        if task.kind == "calibrate":
            return CommandEnd(1, 2.0, "", "error: the device is busy\n")
        if task.kind == "lose" and task.lost >= 0:  # the run goes on, on another curve, and nobody was named
            write_run(team.base.folder(task.token) / task.name, [5.0, 4.0, 3.0, 2.0, 1.5, 1.25, 1.0, 0.9])
            return CommandEnd(0, 1.0)
        return None

    team = Pretending(tmp_path / "runs", instead=instead)
    team.findings, team.proofs = [f"node {HOST}: its matmuls are slow"], [proof("dp=2"), proof("tp=2", passed=False)]
    report, _, _ = checked(team)
    expected = {"machines": "found", "proofs": "found", "lost-rank": "found", "calibration": "failed"}
    assert statuses(report) == expected | {"layouts": "passed"}
    assert not report.ok
    text = to_text(CheckupResult(report).blocks())
    assert "node 1: its matmuls are slow" in text
    assert HOST not in text
    assert "tp=2 does not compute what one process computes: the gradient of norm.weight" in text
    assert "rank 1 was killed, and nobody named it" in text
    assert "the losses differ from step 2 on, by 3.40e+00 at most" in text
    assert "the device is busy" in text
    assert all(run.calibrated is None and run.catalogue for run in report.runs)  # planned by the catalogue alone


def test_a_part_that_runs_out_of_time_says_so(tmp_path: Path) -> None:
    late = CommandEnd(None, 60.0, "", "compiling\n")
    team = Pretending(tmp_path / "runs", instead=lambda task: late if task.kind in ("verify", "train") else None)
    report, _, _ = checked(team)
    assert statuses(report)["proofs"] == "out of time"
    assert report.part("proofs").says == ["verify had not ended after 60 s; its last words: compiling"]  # type: ignore[union-attr]
    assert statuses(report)["layouts"] == "found"
    assert all(run.failed and run.out_of_time for run in report.runs)
    assert "proofs: give it more time, --minutes 20" in report.corrections


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    ticks = iter(range(0, 10_000, 40))
    team = Pretending(tmp_path / "runs")
    report, _, _ = checked(team, budget=Budget(0.5, clock=lambda: float(next(ticks))))
    assert set(statuses(report).values()) == {"out of time"}
    assert not team.tasks


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    def instead(task: Task) -> CommandEnd | None:
        if task.kind == "lose":
            os.kill(os.getpid(), signal.SIGINT)
        return None

    before = signal.getsignal(signal.SIGINT)
    team = Pretending(tmp_path / "runs", instead=instead)
    report, _, code = checked(team)
    assert code == INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    assert statuses(report) == {
        "machines": "passed", "proofs": "passed", "lost-rank": "interrupted",
        "calibration": "not run", "layouts": "not run",
    }  # fmt: skip
    assert "interrupted" in to_page(report)
    assert not (tmp_path / "runs").exists()


def test_the_judge_of_the_planner_reads_the_report(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(report_table(checked(Pretending(tmp_path / "runs")).report)))
    result = planner_accuracy(file)
    timed = {score.source: score.timed for score in result.scores}
    assert timed == {"mine (catalogue)": 3, "mine (calibrated)": 3}
    assert all(row.run and row.run.seconds == 0.5 and row.seconds for row in result.results)
    assert "fivefold on CPUs" in to_text(result.blocks())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"runs": []}, "has no run that was measured"),
        ({"clusters": {}}, "has no figures of the machines"),
        ({"job": None}, "`job` is missing"),
        ({"job": {"model": {"pattern": [{"mixer": "os.path:join"}]}}}, "job: "),
        ({"checkup": None}, "is no report of `fivefold checkup`"),
        ({"clusters": {"calibrated": {"group": [{"accelerator": "no such"}]}}}, "clusters.calibrated: "),
        ({"layout": "dp=2,schedule=os.path:join"}, "os.path:join"),
        ({"layout": 7}, "layout=7 is not text"),
        ({"seconds": -1}, "seconds=-1 is not a number above 0"),
        ({"layout": "dp=4"}, "4 ranks"),
    ],
)
def test_a_report_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, change: dict, sentence: str) -> None:
    table = report_table(checked(Pretending(tmp_path / "runs")).report)
    for key, value in change.items():
        if key == "layout":
            table["runs"][0]["layout"] = value
        elif key == "seconds":
            table["runs"][0]["measured"]["seconds"] = value
        else:
            table[key] = value
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(table))
    with pytest.raises(UserError) as refused:
        read_rows(file)
    assert sentence in "; ".join(refused.value.problems)


def test_the_page_loads_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    team = Pretending(tmp_path / "runs")
    team.findings = ["<script>alert(1)</script>"]
    page = to_page(checked(team).report)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "src=" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert page.count("<svg") == 4  # steps and losses, light and dark
    assert all(f'id="{name}"' in page for name in ("machines", "proofs", "lost-rank", "calibration", "layouts"))


def test_names_are_left_out_unless_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "margarete")
    team = Pretending(tmp_path / "margarete" / "runs")
    team.findings = [f"{HOST}: /home/margarete/x is full", f"rank 0 on {HOST} is slow"]
    report = checked(team).report
    text = msgspec.json.encode(report).decode()
    assert HOST not in text
    assert "margarete" not in text
    assert "GPU-0123" not in text
    assert report.part("machines").findings == ["node 1: x is full", "rank 0 on node 1 is slow"]  # type: ignore[union-attr]
    assert HOST in msgspec.json.encode(checked(team, names=True).report).decode()


def test_names_within_other_words_stay() -> None:
    assert anonymous(["vm, vmstat", {"a": "on vm"}], ["vm"], ["al"]) == ["node 1, vmstat", {"a": "on node 1"}]


def test_the_model_is_one_that_fits() -> None:
    alone, shared = chosen_model(H200, 8), chosen_model(H200, 64)
    assert (alone.preset, alone.layers) == ("llama3.2-1b", 16)
    assert shared.preset == "smollm2-135m"
    small = msgspec.structs.replace(H200, memory=8 << 30)
    assert chosen_model(small, 8).preset == "smollm2-135m"
