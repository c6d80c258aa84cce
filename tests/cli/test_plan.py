"""`fivefold plan`, `serve` and `accuracy`, in this process: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fivefold.cli import app
from fivefold.job.reading import read_job
from fivefold.job.resume_rules import changes
from fivefold.job.toml_writer import to_toml
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
    output = run("plan llama3.2-1b --cluster 2xH100 --batch 128 --price 2.5").output
    tables = ("Layouts", "Time of a step", "Memory of a GPU", "What a rank sends", "Layouts one change away")
    for words in (*tables, "tokens/s", "$"):
        assert words in output


def test_a_plan_for_scripts_adds_up() -> None:
    plan = asked("plan llama3-8b --cluster 8xH100 --batch 128 --price 2")
    best = plan["best"]
    assert sum(best["time_by_cause"].values()) == pytest.approx(best["step_seconds"])
    assert sum(best["memory_by_component"].values()) == pytest.approx(best["memory_bytes"])
    assert best["fits"]
    assert best["cost_per_day"] == 2 * 24 * 8
    assert plan["weighed"] > 1_000
    assert all(one["why"] for one in plan["neighbours"])


def test_a_layout_of_one_s_own_is_explained_beside_the_best() -> None:
    output = run("plan llama3.2-1b --cluster 4xH100 --batch 64 --layout tp=4,sp,microbatches=16").output
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


def test_a_plan_of_a_large_model_is_a_job_for_it(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    printed = run(f"plan llama3-70b --cluster 8x8xH100 --tokens 1.4T --price 2.5 -o {path}").output
    output = " ".join(printed.split())  # lines break where the terminal ends
    steps = -(-14 * 10**11 // (512 * 8192))
    assert f"1.4T tokens, 19.8 per parameter: {steps:,} steps, " in output
    assert " days, " in output
    assert " GPU-hours, $" in output
    assert f"written to {path}: fill in data.path, then fivefold launch {path} --slurm" in output
    assert "nproc" not in output
    job, text = read_job(path), path.read_text()
    assert (job.model.name, job.run.name, job.run.cluster) == ("llama3-70b", "llama3-70b", "8x8xH100")
    assert (job.train.steps, job.train.batch, job.train.dtype, job.data.seq) == (steps, 512, "bfloat16", 8192)
    optimizer = job.optimizer
    assert (optimizer.lr, optimizer.warmup, optimizer.weight_decay, optimizer.final) == (1.5e-4, 2000, 0.1, 0.1)
    assert (optimizer.schedule, optimizer.clip, optimizer.betas) == ("cosine", 1.0, (0.9, 0.95))
    assert 20 <= job.checkpoint.every * 65.5 / 60 <= 60  # minutes
    assert job.problems(world=64) == []
    assert "lr = 1.5e-4             # Llama 3 70B (arXiv 2407.21783, table 3)" in text
    assert '# path = "..."  fill in: a directory made by fivefold data prepare' in text
    assert text.startswith("# llama3-70b on 8x8xH100: ")
    assert " tokens/s (996 a rank), MFU 48.5%, " in text
    assert "seed" not in text
    assert "timeout" not in text


def test_a_plan_for_scripts_has_its_run() -> None:
    plan = asked("plan llama3-8b --tokens 300B --price 2")
    run = plan["training"]
    assert (plan["batch"], run["tokens"]) == (512, 3 * 10**11)
    assert run["days"] == pytest.approx(run["steps"] * plan["best"]["step_seconds"] / 86_400)
    assert run["cost"] == pytest.approx(2 * run["gpu_hours"]) == pytest.approx(2 * 24 * 8 * run["days"])
    assert run["settings"]["optimizer.lr"] == {"value": 3e-4, "why": "Llama 3 8B (arXiv 2407.21783, table 3)"}


def test_a_job_for_a_laptop_is_one(tmp_path: Path) -> None:
    output = run(f"plan tiny --cluster 2xCPU -o {tmp_path / 'a.toml'}").output
    assert f"a.toml: fivefold train {tmp_path / 'a.toml'} --nproc 2" in output
    job = read_job(tmp_path / "a.toml")
    tokens = job.train.steps * job.train.batch * job.data.seq
    assert tokens == pytest.approx(20 * job.model.parameter_count, rel=0.01)
    assert (job.train.dtype, job.train.device, job.data.path) == ("float32", "cpu", "")
    assert 100 < job.train.steps < 5000
    assert job.optimizer.warmup <= job.train.steps // 10


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    run(f"plan tiny optimizer.lr=1e-3 run.name=mine checkpoint.every=7 train.steps=50 -c CPU --batch 8 -o {path}")
    job = read_job(path)
    assert (job.optimizer.lr, job.run.name, job.checkpoint.every, job.train.steps) == (1e-3, "mine", 7, 50)
    assert (job.train.batch, job.optimizer.warmup) == (8, 5)
    again = asked(f"plan {path} --cluster 2x2xCPU -o {path}")  # another cluster: all but the layout stays
    job = read_job(path)
    assert (job.optimizer.lr, job.train.steps, job.run.cluster, job.layout.world) == (1e-3, 50, "2x2xCPU", 4)
    assert asked(f"plan {path}")["best"]["layout"] == again["best"]["layout"]  # the file knows its cluster


def test_a_job_in_fp8_is_one_or_is_refused(tmp_path: Path) -> None:
    run(f"plan llama3-8b --precision fp8 --fix tp=1 -o {tmp_path / 'a.toml'}")
    assert read_job(tmp_path / "a.toml").train.fp8
    assert "tp=1, not tp=2" in refusal(f"plan llama3-8b --precision fp8 --fix tp=2 -o {tmp_path / 'b.toml'}")
    assert not (tmp_path / "b.toml").exists()


def test_a_plan_is_in_the_precision_that_train_would_have(tmp_path: Path) -> None:
    path, small = tmp_path / "a.toml", "plan tiny --seq 128 --batch 16 --cluster H100"
    in_float32 = asked(f"{small} train.dtype=fp32 -o {path}")
    assert read_job(path).train.dtype == "float32"
    assert in_float32["best"] == asked(f"{small} --precision fp32")["best"] != asked(small)["best"]
    eighths = asked(f"{small} train.fp8=true -o {path}")
    assert eighths["best"] == asked(f"{small} --precision fp8")["best"] == asked(f"plan {path}")["best"]


def test_a_plan_in_a_precision_that_no_run_has_becomes_no_job(tmp_path: Path) -> None:
    path, small = tmp_path / "a.toml", "plan tiny --seq 128 --batch 16"
    sentence = refusal(f"{small} --cluster V100 --precision fp16 -o {path}")
    assert "float16 would need a loss scale" in sentence
    assert "nearest: precision=fp32, as V100 has no bf16" in sentence
    assert "nearest: precision=bf16" in refusal(f"{small} --cluster H100 --precision fp16 -o {path}")
    assert "nearest: precision=fp32" in refusal(f"{small} --cluster H100 --precision tf32 -o {path}")
    assert not path.exists()
    planned = asked(f"{small} --cluster H100 --precision fp16")
    assert "train.dtype" not in planned["training"]["settings"]


def test_a_job_file_is_planned_and_keeps_its_own_settings(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "small"\n[train]\nbatch = 32\n[data]\nseq = 256\n[optimizer]\nlr = 1e-4\n')
    plan = asked(f"plan {path} --cluster 4xCPU -o {tmp_path / 'plan.toml'}")
    assert (plan["batch"], plan["seq"]) == (32, 256)
    assert read_job(tmp_path / "plan.toml").optimizer.lr == 1e-4


def test_unlike_nodes_are_planned_with_their_hosts() -> None:
    output = run("plan llama3.2-1b --cluster 2xH100+2xA100 --batch 64").output
    assert "pipeline ranks in order: " in output


def test_serving() -> None:
    plan = asked("serve llama3-8b --cluster 1xH100 --prompt 1024 --answer 256")
    assert plan
    assert "highest throughput" in run("serve llama3-8b --cluster 1xH100").output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan llama4-8b", "unknown model 'llama4-8b'; did you mean 'llama3-8b'?"),
        (
            "plan llama3-8b --cluster 8xH1000",
            "unknown accelerator 'H1000'; did you mean 'H100', 'H100-96' or 'H100-PCIE'?",
        ),
        ("plan llama3-8b --cluster 8xH100.toml", "H100.toml"),
        ("plan llama3-8b --cluster 1xH100", "it fits on"),
        ("plan llama3-8b --batch 128 --layout dp=8,microbatches=3", "nearest: batch=120 or 144"),
        ("plan llama3-8b --batch 128 --layout dp=4", "needs 4 ranks"),
        ("plan llama3-8b model.layrs=3", "did you mean 'layers'?"),
        ("plan llama3-8b layers", "is not a change; write KEY=VALUE"),
        ("plan model.layers=3", "the model comes first"),
        ("plan llama3-8b --precision fp8 --cluster 8xA100", "A100-80 has no fp8 rate"),
        ("plan llama3-8b --precision bf17", "unknown precision 'bf17'"),
        ("plan llama3-8b --software megatrn", "did you mean 'megatron'?"),
        ("plan llama3-8b --fix tq=8", "did you mean"),
        ("plan llama3-8b --tokens 5X", "tokens='5X' is not a number of tokens; write 300B"),
        ("plan llama3-8b --tokens 100k --batch 512", "nearest: tokens=4194304, or a smaller batch"),
        ("plan llama3-8b --tokens 1T train.steps=5", "train.steps=5 and tokens=1T both say"),
        (
            "plan llama3-8b layout.zero=3 layout.tp=2",
            "layout.zero=3 layout.tp=2 would be ignored: write --fix zero=3,tp=2",
        ),
        ("plan llama3-8b layout=dp=8,zero=3", "layout=dp=8,zero=3 would be ignored: write --layout dp=8,zero=3"),
        ("plan llama3-8b train.batch=8 --batch 16", "train.batch=8 and batch=16 say the same thing"),
        ("plan llama3-8b train.dtype=fp32 --precision bf16", "train.dtype=fp32 and precision=bf16 say the same thing"),
        ("plan llama3-8b run.cluster=8xB200 --cluster 8xH100", "run.cluster=8xB200 and cluster=8xH100 say the same"),
        ("serve llama3-8b layout.tp=8", "layout.tp=8 would be ignored: serving reads settings of the model"),
        ("plan gpt2-124m --seq 4096", "longer than the 1024 learned positions"),
        ("plan llama3-8b --batch 128 -o plan.yaml", "should end in .toml"),
        ("plan llama3-8b --layout dp=8 layout.zero=3", "would be ignored: write --layout dp=8,zero=3"),
        ("dryrun llama3-8b --layout dp=8 layout.zero=3", "would be ignored: write --layout dp=8,zero=3"),
        ("plan llama3-8b --layout dp=8 --batch 8 -o step.svg", "has one pipeline stage"),
        ("plan llama3-8b --layout dp=8 --batch 8 -o step.gif", "should end in"),
        ("accuracy --data /nowhere", "has no .csv files"),
        ("accuracy --rows nobody", "unknown source 'nobody'"),
        ("accuracy --write", "--write needs --fit or --coverage"),
    ],
)
def test_bad_input_gets_a_sentence(line: str, words: str) -> None:
    assert words in refusal(line)


def test_the_timeline_of_a_step_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    output = run(f"plan llama3-8b --layout pp=8,schedule=zb-v,microbatches=16 --batch 16 -o {path}").output
    assert "bubble" in output
    assert path.read_text().startswith("<svg")


def test_accuracy_on_a_directory_for_scripts(tmp_path: Path) -> None:
    from fivefold.accuracy.cases import DATA

    (tmp_path / "llama3.csv").write_text((DATA / "llama3.csv").read_text())
    found = asked(f"accuracy --data {tmp_path} -o {tmp_path / 'accuracy.svg'}")
    source = found["sources"]["llama3"]
    assert source["rows"] == 3
    assert source["mape"] < 0.10
    for name in ("median_ape", "bias", "memory_mape", "oom_precision", "oom_recall"):
        assert name in source
    assert len(found["rows"]) == 3
    assert all(row["predicted_seconds"] > 0 for row in found["rows"])
    assert (tmp_path / "accuracy.svg").read_text().count("<circle") == 3 + 1


def test_accuracy_shows_rows_and_assumptions(tmp_path: Path) -> None:
    from fivefold.accuracy.cases import DATA

    (tmp_path / "llama3.csv").write_text((DATA / "llama3.csv").read_text())
    assert "Llama-3.1-405B" in run(f"accuracy --data {tmp_path} --rows llama3").output
    assert "arXiv 2407.21783" in run("accuracy --sources").output


def test_a_job_file_keeps_every_setting_that_the_plan_does_not_decide(tmp_path: Path) -> None:
    words = [
        "model=llama3.2-1b", "model.dropout=0.1", "optimizer.lr=5e-6", "optimizer.warmup=7",
        "optimizer.betas=[0.9,0.99]",
        "optimizer.weight_decay=0.0", "optimizer.schedule=wsd", "optimizer.decay=1.0", "optimizer.final=0.0",
        "optimizer.clip=0.5", "optimizer.schedule_steps=400", "optimizer.eps=1e-7", "train.steps=321", "train.batch=64",
        "train.seed=9", "loss.z_loss=0.1", "loss.label_smoothing=0.1", "train.compile=off", "train.eval_every=17",
        "train.eval_samples=5", "train.log_every=3", "train.count=true", "train.timeout=99.0",
        "train.deterministic=false",
        "data.path=tokens", "data.seq=2048", "data.seed=4", "data.document_mask=true", "checkpoint.every=33",
        "checkpoint.keep=5", "checkpoint.keep_every=66", "checkpoint.memory_every=3", "checkpoint.url=s3://bucket/runs",
        "watch.spike=skip", "watch.window=32", "elastic.least=2", "trace.steps=2", "trace.after=4", "run.name=mine",
        "run.dir=elsewhere", "run.weights=runs/other", "run.tensorboard=true",
    ]  # fmt: skip
    for dtype in ("float32", "bfloat16", "float64"):
        job = read_job(None, [*words, f"train.dtype={dtype}"])
        (tmp_path / "job.toml").write_text(to_toml(job))
        result = run(f"plan {tmp_path}/job.toml --cluster 2xH100 -o {tmp_path}/planned.toml")
        assert result.exit_code == 0, result.output
        found = changes(job, read_job(tmp_path / "planned.toml"))
        assert {one.key for one in found if not one.key.startswith("layout.")} == {"run.cluster"}, dtype
        assert read_job(tmp_path / "planned.toml").layout.world == 2


def test_8_bit_products_that_were_not_planned_are_not_in_the_job(tmp_path: Path) -> None:
    job = read_job(None, ["model=llama3.2-1b", "train.dtype=bfloat16", "train.fp8=true", "data.seq=2048"])
    (tmp_path / "job.toml").write_text(to_toml(job))
    for precision, fp8 in (("", True), ("--precision bf16", False)):
        result = run(f"plan {tmp_path}/job.toml --cluster 2xH100 {precision} -o {tmp_path}/planned.toml")
        assert result.exit_code == 0, result.output
        assert read_job(tmp_path / "planned.toml").train.fp8 == fp8
