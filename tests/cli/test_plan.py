"""`fivefold plan`, `simulate`, `truth`, in this process: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fivefold.cli import app
from fivefold.job.config import read_job
from fivefold.support.errors import UserError


def run(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def asked(line: str) -> Any:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refusal(line: str) -> str:
    result = run(line)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_a_plan_says_what_and_why() -> None:
    output = run("plan llama3-8b --batch 128 --price 2.5").output
    for words in (
        "Layouts",
        "Time of a step",
        "Memory of a GPU",
        "What a rank sends",
        "Layouts one change away",
        "tokens/s",
        "$",
    ):
        assert words in output


def test_a_plan_for_scripts_adds_up() -> None:
    plan = asked("plan llama3-70b --cluster 8x8xH100 --batch 512 --price 2")
    best = plan["best"]
    assert sum(best["time_by_cause"].values()) == pytest.approx(best["step_seconds"])
    assert sum(best["memory_by_component"].values()) == pytest.approx(best["memory_bytes"])
    assert best["fits"]
    assert best["cost_per_day"] == 2 * 24 * 64
    assert plan["weighed"] > 10_000
    assert all(one["why"] for one in plan["neighbours"])


def test_a_layout_of_one_s_own_is_explained_beside_the_best() -> None:
    output = run("plan llama3-70b --cluster 8x8xH100 --batch 512 --layout dp=8,tp=8,zero=3,sp,microbatches=64").output
    assert "the planner's choice, " in output
    assert "faster: " in output


def test_a_plan_becomes_a_job_that_train_reads(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = asked(f"plan tiny model.layers=6 --cluster 2xCPU --batch 16 --seq 128 -o {path}")
    job = read_job(path)
    assert job.model.layers == 6
    assert (job.train.batch, job.data.seq, job.train.dtype) == (16, 128, "float32")
    assert str(job.layout) == plan["best"]["layout"]
    assert job.problems(world=2) == []


def test_a_job_file_is_planned_and_keeps_its_own_settings(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "small"\n[train]\nbatch = 32\n[data]\nseq = 256\n[optimizer]\nlr = 1e-4\n')
    plan = asked(f"plan {path} --cluster 4xCPU -o {tmp_path / 'plan.toml'}")
    assert (plan["batch"], plan["seq"]) == (32, 256)
    assert read_job(tmp_path / "plan.toml").optimizer.lr == 1e-4


def test_unlike_nodes_are_planned_with_their_hosts() -> None:
    output = run("plan llama3-8b --cluster 8xH100+8xA100 --batch 64").output
    assert "pipeline stages in order: " in output


def test_serving() -> None:
    plan = asked("plan llama3-8b --cluster 1xH100 --inference --prompt 1024 --answer 256")
    assert plan
    assert "highest throughput" in run("plan llama3-8b --cluster 1xH100 --inference").output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan llama4-8b", "unknown model 'llama4-8b'; did you mean 'llama3-8b'?"),
        ("plan llama3-8b --cluster 8xH1000", "unknown accelerator 'H1000'; did you mean 'H100'?"),
        ("plan llama3-8b --cluster 8xH100.toml", "H100.toml"),
        ("plan llama3-405b --cluster 8xH100", "it fits on"),
        ("plan llama3-8b --batch 0", "batch=0 must be at least 1"),
        ("plan llama3-8b --batch 128 --layout dp=8,microbatches=3", "nearest: batch=120 or 144"),
        ("plan llama3-8b --batch 128 --layout dp=4", "needs 4 ranks"),
        ("plan llama3-8b model.layrs=3", "did you mean 'layers'?"),
        ("plan llama3-8b layers", "is not a change; write KEY=VALUE"),
        ("plan model.layers=3", "the model comes first"),
        ("plan llama3-8b --precision fp8 --cluster 8xA100", "A100-80 has no fp8 rate"),
        ("plan llama3-8b --precision bf17", "unknown precision 'bf17'"),
        ("plan llama3-8b --software megatrn", "did you mean 'megatron'?"),
        ("plan llama3-8b --fix tq=8", "did you mean"),
        ("plan llama3-8b --price -1", "price=-1"),
        ("plan gpt2-124m --seq 4096", "longer than the 1024 learned positions"),
        ("plan llama3-8b --batch 128 -o plan.json", "should end in .toml"),
        ("simulate llama3-8b --layout dp=8 --batch 8 -o step.svg", "has one pipeline stage"),
        ("simulate llama3-8b --layout dp=8 --batch 8 -o step.gif", "should end in"),
        ("truth --data /nowhere", "has no .csv files"),
        ("truth --rows nobody", "unknown source 'nobody'"),
        ("truth --write", "--write keeps what --fit finds"),
    ],
)
def test_bad_input_gets_a_sentence(line: str, words: str) -> None:
    assert words in refusal(line)


def test_a_simulated_step_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    output = run(f"simulate llama3-8b --layout pp=8,schedule=zb-v,microbatches=16 --batch 16 -o {path}").output
    assert "bubble" in output
    assert path.read_text().startswith("<svg")


def test_truth_on_a_directory_for_scripts(tmp_path: Path) -> None:
    from fivefold.truth.cases import DATA

    (tmp_path / "llama3.csv").write_text((DATA / "llama3.csv").read_text())
    found = asked(f"truth --data {tmp_path} -o {tmp_path / 'truth.svg'}")
    source = found["sources"]["llama3"]
    assert source["rows"] == 3
    assert source["mape"] < 0.10
    for name in ("median_ape", "bias", "memory_mape", "oom_precision", "oom_recall"):
        assert name in source
    assert len(found["rows"]) == 3
    assert all(row["predicted_seconds"] > 0 for row in found["rows"])
    assert (tmp_path / "truth.svg").read_text().count("<circle") == 3 + 1


def test_truth_shows_rows_and_assumptions(tmp_path: Path) -> None:
    from fivefold.truth.cases import DATA

    (tmp_path / "llama3.csv").write_text((DATA / "llama3.csv").read_text())
    assert "Llama-3.1-405B" in run(f"truth --data {tmp_path} --rows llama3").output
    assert "arXiv 2407.21783" in run("truth --sources").output
