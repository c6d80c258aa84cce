"""Resuming a run: by its directory, by its name, and never by accident."""

import json
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from fivefold.checkpoint.store import Store
from fivefold.data.prepare import prepare
from fivefold.job.reading import read_job
from fivefold.job.resume_rules import changes, resume_problems
from fivefold.support.errors import UserError
from fivefold.trainer.resuming import job_of_run, run_named
from fivefold.trainer.run import finished_sentence
from tests.commands import Command, fivefold, start

FAST = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=1", "model.hidden=32", "model.ffn=48",
        "train.device=cpu", "optimizer.warmup=2", "train.steps=6", "checkpoint.every=3"]  # fmt: skip


@pytest.fixture(scope="module")
def first(tokens: Path, tmp_path_factory) -> Path:
    """A directory in which a run of six steps has ended, with a cosine of six."""
    folder = tmp_path_factory.mktemp("first")
    done = fivefold("train", f"data.path={tokens}", *FAST, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    shutil.copytree(first, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def rates(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == list(range(1, len(records) + 1))
    return [one["lr"] for one in records]


def refused(folder: Path, *words: object) -> str:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = fivefold("train", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before  # nothing was touched
    return done.stderr


LAUNCHERS = ["", "--nproc", "ranks", "srun", pytest.param("torchrun", marks=pytest.mark.slow)]


def as_ranks(world: int, *words: str, cwd: Path) -> list[Command]:
    """As torchrun's ranks would run, without torchrun, which imports torch anew for each of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    places = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    with ExitStack() as ending:
        ranks = [ending.enter_context(start(*words, cwd=cwd, env=place)) for place in places]
        for rank in ranks:
            rank.wait()
    return ranks


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_goes_on_in_its_directory_with_its_job_wherever_it_was_moved(folder: Path, launcher: str) -> None:
    """Its name is another than the one in its job, and a run of the first name is there, too."""
    shutil.copytree(folder / "runs/run", folder / "else/where", symlinks=True)
    words: list[str] = ["train", "else/where/", "train.steps=8", "optimizer.schedule_steps=6"]
    module, env = "fivefold", {}
    if launcher == "--nproc":
        words += ["--nproc", "2", "layout=dp=2"]
    elif launcher == "torchrun":
        module = "torch.distributed.run"
        words = ["--standalone", "--nproc-per-node", "2", "--module", "fivefold", *words, "layout=dp=2"]
    elif launcher == "srun":
        env = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    if launcher == "ranks":
        words += ["layout=dp=2"]
        done = as_ranks(2, *words, cwd=folder)[0]
    else:
        done = fivefold(*words, cwd=folder, module=module, env=env)
    assert done.returncode == 0, done.stderr
    assert "resumes from else/where/checkpoints/step-00000006, after step 6" in done.stdout
    shown = [line.partition("  ")[2] for line in done.stdout.splitlines() if line.startswith("changed")]
    layout = ["layout.dp: 1 -> 2"] if "layout=dp=2" in words else []
    assert shown == [*layout, "optimizer.schedule_steps: 0 -> 6", "train.steps: 6 -> 8"]
    assert rates(folder / "else/where")[5:] == pytest.approx([3e-4] * 3)
    assert len(rates(folder / "runs/run")) == 6
    job = job_of_run(folder / "else/where")
    assert (job.run.name, job.run.dir) == ("where", str(folder / "else"))
    assert sorted(path.name for path in (folder / "else").glob("[!.]*")) == ["where"]


def test_a_schedule_from_a_file_moves_with_its_run(tokens: Path, tmp_path: Path) -> None:
    fivefold("draw", "gpipe", "--pp", "1", "-m", "2", "-o", "own.txt", cwd=tmp_path)
    layout = ["layout.schedule=own.txt", "layout.microbatches=2"]
    done = fivefold("train", f"data.path={tokens}", *FAST, *layout, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "own.txt").unlink()
    (tmp_path / "runs/run").rename(tmp_path / "moved")
    done = fivefold("train", "moved", "train.steps=7", "optimizer.schedule_steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert job_of_run(tmp_path / "moved").layout.schedule == str(tmp_path / "moved/schedule.txt")


def test_fresh_trains_the_job_of_a_directory_in_a_new_one(folder: Path) -> None:
    done = fivefold("train", "runs/run", "--fresh", "train.steps=2", "model.layers=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (len(rates(folder / "runs/run-2")), len(rates(folder / "runs/run"))) == (2, 6)


def test_words_that_name_no_run_are_sentences(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    run = Path("runs/run")
    for word, said in {
        "runs": "runs is not the directory of a run: it has neither job.toml nor a checkpoint; there is: runs/run",
        "runs/rum": "there is neither a run nor a job file runs/rum; did you mean 'runs/run'?",
        "runs/run/checkpoints": "has checkpoints; 'fivefold train runs/run' resumes from the newest "
        r"(step-00000006)",
        "runs/run/checkpoints/step-00000003": "is a checkpoint; 'fivefold train runs/run' resumes",
        "runs/run/checkpoints/latest/": "'fivefold checkpoint reshard runs/run --step 6 --layout dp=1 -o NEW' makes",
    }.items():
        with pytest.raises(UserError) as error:
            run_named(word)
        (problem,) = error.value.problems
        assert said in problem
    assert run_named("runs/run/") == run
    assert run_named("job.toml") is run_named(None) is run_named("runs/run/job.toml") is None
    with pytest.raises(UserError, match=r"run.name=x is not runs/run.*train runs/run/job.toml"):
        job_of_run(run, ["run.name=x"])
    for text, said in {
        "[train\n": "cannot be read as TOML",
        "run = 3\n": "has settings where it should",
        "[train]\nstep=2\n": "job.toml: train.step is not a setting",
    }.items():
        (run / "job.toml").write_text(text)
        with pytest.raises(UserError, match=said) as error:
            job_of_run(run)
        assert "runs/run/job.toml" in str(error.value)
    (run / "job.toml").unlink()
    assert job_of_run(run, ["train.steps=9"]).train.steps == 9  # the checkpoint has the job, too
    assert job_of_run(run).model.hidden == 32
    for one in Store(run / "checkpoints").complete():
        shutil.rmtree(one.path)
    with pytest.raises(UserError, match="is not the directory of a run"):
        run_named("runs/run")


def test_a_run_that_is_named_without_its_place_is_found(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    said = "error: there is neither a run nor a job file run; did you mean 'runs/run'?\n"
    assert fivefold("train", "run").stderr == said
    assert run_named("demo") is None  # an example of the package, though runs/demo may be there
    Path("runs/demo").mkdir()
    Path("runs/demo/job.toml").touch()
    assert run_named("demo") is None
    assert run_named("nosuch") is None  # a job file of that name may be meant, which is looked for next


def test_a_job_goes_on_in_its_own_directory_where_a_newer_one_of_its_name_is_anothers(
    folder: Path, tokens: Path
) -> None:
    words = [f"data.path={tokens}", *FAST]
    done = fivefold("train", "runs/run", "--fresh", "train.steps=2", "model.layers=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    own = fivefold("train", *words, cwd=folder)
    assert own.returncode == 0, own.stderr
    assert "all 6 steps of runs/run are done" in own.stdout
    assert "runs/run-2 has another model" in refused(folder, *words, "train.seed=3")  # nobody's


def test_a_run_without_a_checkpoint_does_not_go_on(folder: Path) -> None:
    shutil.rmtree(folder / "runs/run/checkpoints")
    assert "runs/run has no checkpoint to resume from; --fresh starts its job over" in refused(folder, "runs/run")


def test_a_command_by_hand_never_goes_on_with_another_job(folder: Path, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Other words. " * 200)
    prepare([tmp_path / "text.txt"], tmp_path / "other")
    other = f"data.path={tmp_path}/other"
    for more in ([], ["--nproc", "2", "layout=dp=2"]):
        said = refused(folder, other, *FAST, "train.seed=1", "optimizer.lr=0.01", *more)
        assert (
            "error: runs/run was trained with other settings: optimizer.lr: 0.003 -> 0.01, train.seed: 0 -> 1" in said
        )
        assert f"data: {tokens} (" in said
        assert "run.name=NAME or --fresh trains this job in a directory of its own" in said
        model = ["model.layers=3", "model.name=x", *more]
        assert "has another model: model.layers: 1 -> 3; --fresh" in refused(folder, "runs/run", *model)
    # The same settings, said of the directory, are meant; and the same tokens may lie elsewhere.
    shutil.copytree(tokens, tmp_path / "same")
    same = [f"data.path={tmp_path}/same", *FAST, "layout.microbatches=2", "train.deterministic=false", "--check"]
    assert fivefold("train", *same, cwd=folder).returncode == 0
    on = fivefold("train", "runs/run", other, "train.steps=7", "optimizer.lr=0.01", "optimizer.schedule_steps=7",
                  cwd=folder)  # fmt: skip
    assert on.returncode == 0, on.stderr
    assert f"-> {tmp_path}/other (" in on.stdout


def test_rank_0_refuses_for_all_where_another_launcher_started_them(folder: Path, tokens: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "layout=dp=2", "train.seed=1"]
    ranks = as_ranks(2, *words, cwd=folder)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "error: runs/run was trained with other settings: train.seed: 0 -> 1" in ranks[0].stderr
    assert ranks[1].stderr == ""


def test_a_longer_cosine_is_refused_until_its_length_is_said(folder: Path, tokens: Path) -> None:
    words = [f"data.path={tokens}", *FAST, "train.steps=12"]
    said = (
        "train.steps=12 changes the learning rate of the 6 steps that are done: their cosine schedule was 6 steps "
        "long; optimizer.schedule_steps=6 keeps it, and the rate stays at 0.0003; optimizer.schedule_steps=12 means "
        "the other curve, and it goes from 0.0003 to 0.00165"
    )
    assert said in refused(folder, *words)
    assert said in refused(folder, "runs/run", "train.steps=12")
    finished = fivefold("train", "runs/run", cwd=folder).stdout
    assert "'fivefold train runs/run train.steps=12 optimizer.schedule_steps=6' continues it" in finished
    kept = fivefold("train", *words[:-1], "train.steps=7", "optimizer.schedule_steps=6", cwd=folder)
    assert kept.returncode == 0, kept.stderr
    longer = fivefold("train", "runs/run", "train.steps=8", "optimizer.schedule_steps=14", cwd=folder)
    assert longer.returncode == 0, longer.stderr
    assert rates(folder / "runs/run")[5:] == pytest.approx([3e-4, 3e-4, 0.00165])


def test_a_schedule_is_longer_than_its_warm_up() -> None:
    job = read_job(None, ["optimizer.schedule_steps=5", "optimizer.warmup=5"])
    assert job.problems() == [
        "optimizer.schedule_steps=5 must be above optimizer.warmup=5, since the schedule follows the warm-up; "
        "nearest: optimizer.schedule_steps=6; with 0, the schedule has train.steps"
    ]


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        (["optimizer.warmup=2"], " optimizer.schedule_steps=12"),
        (["optimizer.warmup=20"], ""),  # nothing but the warm-up is done
        (["optimizer.warmup=12"], ""),
        (["optimizer.warmup=2", "optimizer.schedule=constant"], ""),
        (["optimizer.warmup=2", "optimizer.schedule_steps=30"], ""),
    ],
)
def test_what_a_finished_run_offers_is_accepted(words: list[str], keeps: str) -> None:
    before = read_job(None, ["train.steps=12", *words])
    said = finished_sentence(Path("runs/run"), before, 12)
    assert f"'fivefold train runs/run train.steps=24{keeps}' continues it" in said
    now = read_job(None, ["train.steps=12", *words, "train.steps=24", *keeps.split()])
    assert now.problems() == resume_problems(before, now, 12, changes(before, now), Path("runs/run"), named=True) == []
