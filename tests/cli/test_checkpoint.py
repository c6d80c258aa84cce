"""Checkpoints from the command line: stopped, killed and started again, looked at, exported and spoken with."""

import json
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.checkpoint.store import Store
from fivefold.cli import app
from fivefold.data.prepare import prepare
from fivefold.support.errors import UserError
from tests.cli.test_cli import losses
from tests.commands import Command, fivefold, here, start

FAST = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=2", "model.hidden=32", "model.ffn=48",
        "train.device=cpu", "optimizer.schedule=constant", "train.log_every=1"]  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("The same few words, again and again. " * 200)
    prepare([folder / "text.txt"], folder / "tokens")
    return folder / "tokens"


def training(tmp_path: Path, tokens: Path, *words: str) -> Command:
    """A run without end that has made its third step."""
    run = start("train", f"data.path={tokens}", *FAST, "train.steps=100000", *words, cwd=tmp_path)
    run.until("step      3/")
    return run


def fault(text: str) -> dict[str, str]:
    return {"FIVEFOLD_FAULT": text}


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory) -> tuple[list[str], Path]:
    """A run of 8 steps on two ranks that nothing happens to: its words, and its directory."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["train", f"data.path={tokens}", *FAST, "--nproc", "2", "layout=dp=2,zero=1", "train.steps=8",
             "checkpoint.every=2"]  # fmt: skip
    done = fivefold(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return words, folder / "runs" / "run"


def test_sigterm_saves_one_agreed_step_and_the_same_command_goes_on(whole, tmp_path: Path) -> None:
    words, want = whole
    done = fivefold(*words, cwd=tmp_path, env=fault("term@rank=1,step=3"))
    assert done.returncode == 143, done.stderr
    assert "stopped by a signal to another rank after step 3; its checkpoint is saved" in done.stdout
    assert Store(tmp_path / "runs/run/checkpoints").complete()[0].step == 3
    on = fivefold(*words, cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert "after step 3" in on.stdout
    assert losses(tmp_path / "runs/run") == losses(want)


def test_a_run_whose_last_checkpoint_was_not_written_fails_and_names_the_newest_good_one(whole, tmp_path: Path) -> None:
    words, want = whole
    done = fivefold(*words, cwd=tmp_path, env=fault("raise@at=write,rank=1,step=8"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    failed = (
        "the checkpoint of step 8 was not written: rank 1: FIVEFOLD_FAULT=raise@at=write,rank=1,step=8 was asked for"
    )
    assert f"error: {failed}, and happens; the last good one is step-00000006" in done.stderr
    on = fivefold(*words, cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert "after step 6" in on.stdout
    assert losses(tmp_path / "runs/run") == losses(want)


def test_ranks_end_with_a_launcher_that_is_killed(tokens: Path, tmp_path: Path) -> None:
    with training(tmp_path, tokens, "--nproc", "2", "layout=tp=2") as run:
        ranks = run.children
        assert len(ranks) == 2
        run.send_signal(signal.SIGKILL)
        run.wait()
        deadline = time.monotonic() + 300
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.slow)])  # test_cli has a rank
def test_a_killed_run_is_brought_back_by_itself(whole, tmp_path: Path, launcher: str) -> None:
    words, want = whole
    if launcher == "ours":
        done = fivefold(*words, "--restarts", "2", cwd=tmp_path, env=fault("kill@rank=1,step=5"))
        assert "rank 1 (dp 1) was ended by SIGKILL in step 5" in done.stderr
        assert "step 5: rank 0 (dp 0):" in done.stderr
        assert "starting again from the last checkpoint: 1 of 2" in done.stderr
        assert done.stderr.count("starting again") == 1
    else:
        at = words.index("--nproc")
        plain = words[:at] + words[at + 2 :]
        torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--module", "fivefold"]
        done = fivefold(*torchrun, *plain, "--fresh", cwd=tmp_path, env=fault("kill@rank=1,step=5"),
                        module="torch.distributed.run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").glob("run*")] == ["run"]
    assert losses(tmp_path / "runs/run") == losses(want)


def test_an_exception_of_one_rank_comes_first_and_the_others_say_a_line(whole, tmp_path: Path) -> None:
    words, _ = whole
    done = fivefold(*words, cwd=tmp_path, env=fault("raise@rank=1,step=2"))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert done.stderr.count("Traceback") == 1
    assert any("FIVEFOLD_FAULT=raise@rank=1,step=2 was asked for, and happens" in line for line in lines)
    assert any(line.startswith("error: step 2: rank 0 (dp 0):") for line in lines)
    assert lines[-1] == "rank 1 (dp 1) failed with exit code 1 in step 2"


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it(whole, tmp_path: Path) -> None:
    words, _ = whole
    done = fivefold(*words, "train.timeout=3", cwd=tmp_path, env=fault("stop@rank=1,step=2"))
    assert done.returncode == 1
    assert "step 2: rank 0 (dp 0): the gradient norm waited 3." in done.stderr
    assert "for rank 1 (world): it gave no sign" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rank 1 (dp 1) did not end with the others")


def test_an_unwritable_output_is_refused_before_the_first_step(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    done = fivefold("train", f"data.path={tokens}", *FAST, "--nproc", "2", "layout=dp=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a directory that can be written to" in done.stderr


def test_the_commands_that_look(whole) -> None:
    _, run = whole
    listed = json.loads(here("checkpoint", "ls", run, "--json"))
    assert [row["step"] for row in listed["checkpoints"]] == [6, 8]
    assert listed["checkpoints"][1]["layout"] == "dp=2,zero=1"
    assert "step-00000008" in here("checkpoint", "ls", run)
    shown = json.loads(here("inspect", run, "--json"))["checkpoint"]
    assert (shown["step"], shown["samples"], shown["updates"], len(shown["tensors"])) == (8, 32, 8, 63)
    assert "any other reads it" in here("inspect", run, "--step", "6")
    assert here("checkpoint", "ls", "--verify", run).count("sound") == 2
    damaged = run.parent / "damaged"
    shutil.copytree(run, damaged, symlinks=True)
    (damaged / "checkpoints/step-00000006/rank-1.tensors").unlink()
    done = CliRunner().invoke(app, ["checkpoint", "ls", "--verify", str(damaged)])
    assert done.exit_code == 1
    assert "step-00000006  damaged" in done.stdout
    assert "rank-1.tensors is missing" in done.stdout.replace("\n", "")
    assert "damaged" in here("checkpoint", "ls", damaged)


def test_reshard_export_import_and_generate(whole, tmp_path: Path, monkeypatch) -> None:
    _, run = whole
    monkeypatch.chdir(tmp_path)
    assert "--nproc 4" in here("checkpoint", "reshard", run, "--layout", "tp=2,pp=2", "-o", "cut")
    assert json.loads(here("checkpoint", "ls", "--verify", "cut", "--json"))["sound"]
    here("hf", "export", run, "-o", "out", "--dtype", "float32")
    here("hf", "import", "out", "-o", "runs/in")
    said = {
        str(source): json.loads(here("generate", source, "--prompt", "The same", "-n", "8", "--json"))
        for source in (run, "cut", "out", "runs/in")
    }
    assert len({json.dumps(one) for one in said.values()}) == 1
    (answer,) = said["out"]
    assert answer["prompt_tokens"] == list(b"The same")
    assert len(answer["tokens"]) == 8
    # What was resharded trains on, in its new layout, and says the same on many ranks.
    named = here("generate", run / "checkpoints" / "latest", "--prompt", "The same", "-n", "8", "--json")
    assert json.loads(named) == [answer]
    # The end of a text goes along, and nothing of others is touched.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256
    (tmp_path / "file").write_text("mine")
    for words in (["hf", "export", run], ["hf", "import", "out"], ["checkpoint", "reshard", run, "--layout", "tp=2"]):
        for place in ("file", "file/x"):
            with pytest.raises(UserError, match=r"not empty|cannot write"):
                here(*words, "-o", place)
    on = fivefold("train", "cut/job.toml", "--nproc", "4", "train.steps=9", cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert "after step 8" in on.stdout
    plain = fivefold("generate", "out", "--prompt", "The same", "-n", "8", "--layout", "tp=2", cwd=tmp_path)
    assert plain.stdout == f"The same{answer['text']}\n"
    # It is sampled unless the likeliest token is asked for, and says how to get the same again.
    assert plain.stderr == "sampled with --temperature 0.8 --top-p 0.95 --seed 0\n"
    assert answer["sampling"] == {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "seed": 0}
    other, again = (
        json.loads(here("generate", "out", "--prompt", "The same", "-n", "40", "--seed", seed, "--json"))[0]["text"]
        for seed in ("1", "2")
    )
    assert other != again
    greedy = fivefold("generate", "out", "--prompt", "The same", "-n", "8", "--temperature", "0", cwd=tmp_path)
    assert greedy.stderr == ""


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_made(whole, tmp_path: Path) -> None:
    _, run = whole
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for words in (["hf", "export", run], ["checkpoint", "reshard", run, "--layout", "tp=2"]):
        done = fivefold(*words, "-o", "x", cwd=tmp_path, before=full)
        assert done.returncode == 2, done.stderr
        assert "cannot write x: " in done.stderr
        assert "are free there" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_bad_words_are_sentences(whole, tmp_path: Path, monkeypatch) -> None:
    _, run = whole
    monkeypatch.chdir(tmp_path)
    for words, said in [
        (["generate", run], "give either --prompt or --tokens"),
        (["generate", run, "--tokens", "a"], "is not a list of numbers"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is not a directory"),
        (["hf", "export", run, "-o", "x", "--shard-size", "big"], "--shard-size big is not a size"),
        (["hf", "export", run, "-o", "x", "--dtype", "int8"], "--dtype int8 is not one of"),
        (["hf", "import", "nowhere", "-o", "x"], "nowhere is not a directory"),
        (["checkpoint", "reshard", run, "--layout", "tp=3", "-o", "x"], "does not divide the 4 attention heads"),
        (["generate", run, "--prompt", "x", "--temperature", "1e-320"], "must be at least 0.001; 0 is greedy"),
        (["generate", run, "--prompt", "x", "--seed", str(1 << 70)], "--seed=2^70 or so is more than"),
        (["inspect", run, "--step", "7"], "has no complete checkpoint of step 7; it has: 6, 8"),
        (["train", "--restarts", "1"], "--restarts needs --nproc"),
        (["train", "checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1"),
    ]:
        with pytest.raises(UserError) as error:
            here(*words)
        assert said in "\n".join(error.value.problems), words
    monkeypatch.setenv("FIVEFOLD_FAULT", "explode")
    with pytest.raises(UserError, match="FIVEFOLD_FAULT='explode' is not"):
        here("train")
    assert not (tmp_path / "x").exists()


def test_a_directory_is_trained_by_one_process_at_a_time(tokens: Path, tmp_path: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "train.steps=100000", "checkpoint.every=1"]
    with training(tmp_path, tokens, "checkpoint.every=1"):
        second = fivefold(*words, "--nproc", "2", "layout=tp=2", cwd=tmp_path)
    assert second.returncode == 2
    assert second.stderr.splitlines()[0] == (
        "error: another process is training in runs/run; --fresh starts a run of its own, and so does another run.name"
    )
    assert "Traceback" not in second.stderr
    third = fivefold(*words[:-2], "train.steps=5", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
