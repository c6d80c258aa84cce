"""The command line as a user meets it: real processes, real exit codes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fivefold.job.reading import read_job
from fivefold.spec.presets import PRESETS
from tests.commands import Command, executable, fivefold, here, start
from tests.refusals import refusal

FAST = ["train.steps=3", "train.batch=2", "data.seq=16", "train.eval_samples=2", "model.layers=1", "train.device=cpu"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"document {number} " * 30)
    texts = [folder / f"{number}.txt" for number in range(12)]
    assert "12 documents" in here("data", "prepare", *texts, "-o", folder / "tokens", "--valid", "0.3")
    return folder / "tokens"


def test_help_shows_every_command_with_an_example() -> None:
    text = here("--help")
    for command in ("train", "list", "data"):
        assert f"fivefold {command} " in text


def test_models_lists_every_preset_for_people_and_for_scripts() -> None:
    text = here("list", "models")
    assert all(name in text for name in PRESETS)
    assert "8,030,261,248" in text
    rows = {row["model"]: row for row in json.loads(here("list", "models", "--seq", "8192", "--json"))}
    assert rows["llama3-405b"]["parameters"] == 405_853_388_800
    assert rows["llama3-8b"]["flops_per_token_full"] > rows["llama3-8b"]["flops_per_token_causal"]


def test_a_run_leaves_its_job_its_metrics_and_its_environment(tmp_path, tokens: Path) -> None:
    done = fivefold(
        "train", f"data.path={tokens}", *FAST, "run.tensorboard=true", "layout.microbatches=2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "unigram entropy" in done.stdout
    assert "held-out loss" in done.stdout
    first_screen = done.stdout[: done.stdout.index("step 1/3")].splitlines()
    assert len(first_screen) <= 9, "what trains, where, on what; the settings are in a file"
    assert first_screen[1:4] == [
        "train   3 steps of 2 sequences of 16 tokens; adamw, lr 0.003, cosine",
        "layout  microbatches=2: 1 rank on CPU, float32",
        "run     runs/run; every setting: runs/run/job.toml",
    ]
    run = tmp_path / "runs" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step"] * 3 + ["evaluation"]
    assert records[0]["tokens"] == 32
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"]
    assert environment["deterministic"] is True
    assert any(file.name.startswith("events") for file in (run / "tensorboard").iterdir())
    job = read_job(run / "job.toml")
    assert (job.train.steps, job.layout.microbatches, job.model.layers) == (3, 2, 1)

    again = fivefold("train", str(run / "job.toml"), "--fresh", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    repeated = [json.loads(line) for line in (tmp_path / "runs/run-2/metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in repeated[:3]] == [r["loss"] for r in records[:3]]  # to the bit


def test_a_finished_run_says_so_and_goes_on_when_it_is_told_to(tmp_path: Path, tokens: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "checkpoint.every=1"]
    assert fivefold(*words, cwd=tmp_path).returncode == 0
    done = fivefold(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert "all 3 steps of runs/run are done; --fresh starts over" in done.stdout
    on = fivefold("train", "runs/run/", "train.steps=5", "optimizer.lr=1e-4", cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert "after step 3" in on.stdout
    assert "changed  optimizer.lr: 0.003 -> 0.0001\nchanged  train.steps: 3 -> 5\n" in on.stdout
    records = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5]
    other = fivefold(*words, "model.hidden=32", cwd=tmp_path)
    assert other.returncode == 2
    assert "runs/run has another model: model.hidden: 128 -> 32" in other.stderr
    fresh = fivefold(*words, "model.hidden=32", "--fresh", cwd=tmp_path)
    assert fresh.returncode == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"run", "run-2"}


def started(tmp_path: Path, tokens: Path, *words: str) -> Command:
    """A run without end that has made its first step."""
    endless = ["train", f"data.path={tokens}", "data.seq=16", "train.steps=100000", "model.layers=1"]
    run = start(*endless, "train.eval_samples=0", *words, cwd=tmp_path)
    metrics = tmp_path / "runs/run/metrics.jsonl"
    run.until(lambda: metrics.exists() and metrics.stat().st_size)
    return run


def test_a_rank_that_is_killed_is_named_and_nothing_is_left(tmp_path: Path, tokens: Path) -> None:
    with started(tmp_path, tokens, "--nproc", "2", "layout=tp=2") as run:
        ranks = run.children
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait() == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    err = run.stderr
    assert re.fullmatch(r"rank 1 \(tp 1\) was ended by SIGKILL in step \d+", err.strip().splitlines()[-1])
    assert "Traceback" not in err
    assert re.search(r"error: (step \d+: )?rank 0 (\(tp 0\): .+ rank 1 \(|lost its connection to another rank)", err)


def test_a_model_larger_than_memory_is_refused_before_it_is_made(tmp_path, tokens: Path) -> None:
    done = fivefold("train", f"data.path={tokens}", "model=megatron-1t", "train.eval_samples=0", cwd=tmp_path)
    refused(done, "megatron-1t has 1.01T parameters: weights, gradients and optimizer take")
    assert not (tmp_path / "runs").exists()


def test_a_note_is_one_line(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 300, "n_positions": 64}'
    )
    done = fivefold("list", "models", "config.json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "note: attn_pdrop is read as 0: attention probabilities are never dropped\n"


def refused(done: subprocess.CompletedProcess[str], *sentences: str) -> None:
    """Exit code 2, one sentence per problem, no traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == len(sentences), done.stderr
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith("error: ")
        assert sentence in line


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(tmp_path) -> None:
    refused(
        fivefold("train", "train.steps=5", "layout.tp=3", cwd=tmp_path),
        "tp=3 does not divide the 4 attention heads of tiny; nearest: tp=2 or tp=4",
        "layout tp=3 needs 3 ranks (dp x tp x pp x cp), and there is 1; nearest: --nproc 3",
    )
    assert not (tmp_path / "runs").exists()


def test_bad_jobs_are_refused(tmp_path, tokens: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[train]\nstep = 5\n[optimizer]\nlr = 'high'\n")
    for words, said in {
        "layout=dp=2 --nproc 3": "layout dp=2 needs 2 ranks (dp x tp x pp x cp), and there are 3; nearest: dp=3, or "
        "--nproc 2",
        "nosuch.toml": "no job file nosuch.toml",
        "job.toml": "optimizer.lr='high' is not a number",
        "a.toml b.toml": "give at most one job file",
        "jbo.toml": "did you mean 'job.toml'",
        f"data.path={tokens} model.vocab=100": "has a vocabulary of 257, and model.vocab=100; nearest: model.vocab=257",
    }.items():
        first, *more = refusal(lambda words=words: here("train", *words.split())).problems
        assert said in first
        assert more == ["train.step is not a setting; did you mean 'steps'?"] * (words == "job.toml")


def test_an_edited_token_is_found_before_the_first_step_and_its_file_is_named(tmp_path, tokens: Path) -> None:
    """Token 5 becomes 300. That the vocabulary has 257 is seen where a sum does not tell: tests/data/test_tokens.py."""
    copy = tmp_path / "tokens"
    copy.mkdir()
    for file in tokens.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    [shard] = copy.glob("train-*.tokens")
    ids = np.fromfile(shard, "<u2")
    ids[5] = 300
    ids.tofile(shard)
    done = fivefold("train", f"data.path={copy}", *FAST, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(rf"{shard.name} is damaged, within bytes 0 to \d+ of \d+: its sha256", done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()
    refusal(lambda: here("data", "check", copy))
    here("data", "check", tokens)

    shard.write_bytes(shard.read_bytes()[:-2])
    short = fivefold("train", f"data.path={copy}", *FAST, cwd=tmp_path)
    assert short.returncode == 2
    assert "short" in short.stderr


def test_the_job_can_be_checked_without_training(tmp_path, tokens: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "steps = 3" in here("train", f"data.path={tokens}", *FAST, "--check")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_under_torchrun_the_same_command_joins_and_is_brought_back(tmp_path, tokens: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "checkpoint.every=1"]
    assert fivefold(*words, "run.name=plain", cwd=tmp_path).returncode == 0
    torchrun = ["--standalone", "--nproc-per-node=1", "--max-restarts=1", "--module", "fivefold", *words]
    env = {"FIVEFOLD_FAULT": "kill@rank=0,step=2", "PYTHON_EXEC": executable(tmp_path)}  # what torchrun starts
    done = fivefold(*torchrun, cwd=tmp_path, env=env, module="torch.distributed.run")
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert losses(tmp_path / "runs/run") == losses(tmp_path / "runs/plain")


def losses(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def test_under_slurm_the_same_command_joins(tmp_path, tokens: Path) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0",
             "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "4321"}  # fmt: skip
    done = fivefold("train", f"data.path={tokens}", *FAST, cwd=tmp_path, env=slurm)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    ["checkpoint ls NAME", "generate NAME --prompt x", "hf import NAME -o y", "draw 1f1b --pp 2 -m 2 -o NAME.svg"],
)
def test_a_name_that_no_file_can_have_is_a_sentence(tmp_path, words: str) -> None:
    done = fivefold(*words.replace("NAME", "a" * 300).split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: the path 'a{40}'\.\.\. is too long(: names have 255 bytes at most, paths 4095| for the file system)\n",
        done.stderr,
    )
