"""`fivefold trace`, and `fivefold train ... trace.steps=N`, as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import fivefold, here
from tests.refusals import refusal

SMALL = ["model.layers=2", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=4", "train.device=cpu"]


def test_a_trace_of_a_pipeline_is_one_file_and_a_table(tokens: Path, tmp_path: Path) -> None:
    words = [f"data.path={tokens}", "layout=pp=2,microbatches=2", "trace.steps=2", "trace.after=1", "-o", "two.json"]
    done = fivefold("trace", *words, *SMALL, cwd=tmp_path, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for words_ in ("mean of 2 steps", "0  pp0", "1  pp1", "measured", "predicted", "of the time of 1f1b", "two.json"):
        assert words_ in done.stdout
    events = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"F0.0", "F1.1", "B1.1", "STEP"} <= {event["name"] for event in events}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.json"]


@pytest.fixture(scope="module")
def mixture(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A step of experts on two ranks: the summary as JSON, and the events of trace.json."""
    folder = tmp_path_factory.mktemp("mixture")
    words = ["model=tiny-moe", "layout=dp=2,ep=2,zero=1", "trace.steps=1", "trace.after=1", "model.experts.ffn=16"]
    done = fivefold("trace", f"data.path={tokens}", *words, *SMALL, "--json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_a_script_reads_the_summary_as_json(mixture: Any) -> None:
    told, _ = mixture
    assert (told["layout"], told["steps"], told["file"]) == ("dp=2,zero=1,ep=2", 1, "trace.json")
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    for rank in (*told["ranks"], told["mean"]):
        parts = sum(rank[name] for name in ("compute", "bubble", "optimizer", "other"))
        assert parts + sum(rank["exposed"].values()) == pytest.approx(rank["step"])
        assert rank["bubble_predicted"] == 0
    assert told["sent"]["dp"]["payload"] > 0


def test_tokens_on_their_way_to_experts_and_back_have_spans_of_their_own(mixture: Any) -> None:
    told, events = mixture
    assert min(told["experts"]["dispatch"], told["experts"]["combine"]) > 0
    actions = [
        (event["pid"], event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "compute"
    ]
    for name in ("dispatch", "combine"):
        spans = [event for event in events if event["name"] == name]
        assert len(spans) == 2 * 2 * 2 * 2  # ranks, layers, forward and backward; sent off, and waited for
        for one in spans:
            start, end = one["ts"], one["ts"] + one["dur"]
            assert any(pid == one["pid"] and first <= start and end <= last + 1e-2 for pid, first, last in actions)


def test_training_can_trace_some_of_its_steps(tokens: Path, tmp_path: Path) -> None:
    words = [
        f"data.path={tokens}",
        "train.steps=4",
        "trace.steps=2",
        "trace.after=1",
        "train.eval_samples=0",
        "run.name=seen",
    ]
    done = fivefold("train", *words, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean of 2 steps" in done.stdout
    document = json.loads((tmp_path / "runs" / "seen" / "trace.json").read_text())
    assert {"step 2", "step 3"} == {e["name"] for e in document["traceEvents"] if e["name"].startswith("step ")}
    assert len((tmp_path / "runs" / "seen" / "metrics.jsonl").read_text().splitlines()) == 4


REFUSED = {
    "layout=tp=3": "tp=3 does not divide the 4 attention heads of tiny; nearest: tp=2 or tp=4",
    "trace.steps=-1": "trace.steps=-1 must be at least 0",
    "-o nowhere/trace.json": "--output nowhere/trace.json: there is no directory nowhere",
    ".": "is not a job file, and trace runs one; `fivefold inspect . --html FILE` shows a run's trace",
    "demo/trace.json": "`fivefold inspect demo --html FILE` shows a run's trace",
    "trace.step=1": "trace.step is not a setting; did you mean 'steps'?",
}


def test_what_cannot_be_traced_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, sentence in REFUSED.items():
        assert sentence in str(refusal(lambda words=words: here("trace", *words.split())))
    said = "trace.steps=3 after trace.after=3 steps are more than train.steps=5; nearest: train.steps=6"
    assert said in str(refusal(lambda: here("train", "trace.steps=3", "train.steps=5")))
