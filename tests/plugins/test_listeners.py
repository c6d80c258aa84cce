"""What hears of a run: one of ours and one of a user's own module, on rank 0, whatever it raises."""

import json
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.job.listeners import EVENTS
from fivefold.job.named_listeners import LISTENERS
from fivefold.support.errors import TrainingError, UserError
from tests.commands import fivefold

NAME = "heard:Heard"
SMALL = ["data.seq=16", "train.batch=4", "train.steps=4", "train.eval_every=2", "train.eval_samples=2",
         "model.layers=1", "train.device=cpu", "model.hidden=32", "model.ffn=32", "checkpoint.every=2", "run.name=own",
         "optimizer.schedule_steps=30"]  # fmt: skip
TEXT = """
import json, os
from fivefold.job.listeners import RunListener

class Heard(RunListener):
    def start(self, job, directory, step):
        self.file = open(directory / "heard.jsonl", "a")
        self.write("start", step, job.model.name)

    def write(self, *row):
        print(json.dumps([*row, os.environ.get("RANK", "0")]), file=self.file, flush=True)

    def step(self, record):
        self.write("step", record.step, record.loss)

    def evaluation(self, record):
        self.write("evaluation", record.step, record.held_out_loss)

    def checkpoint(self, step):
        self.write("checkpoint", step)

    def end(self, step):
        self.write("end", step)
"""


@pytest.fixture
def here(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heard.py").write_text(TEXT)
    return tmp_path


def test_it_hears_of_every_step_on_rank_0_beside_one_of_ours(here: Path) -> None:
    result = ff.train(None, [*SMALL, f"run.listeners=tensorboard,{NAME}", "layout=dp=2"])
    rows = [json.loads(line) for line in (here / "runs/own/heard.jsonl").read_text().splitlines()]
    assert {row[-1] for row in rows} == {"0"}
    assert [row[:2] for row in rows if row[0] != "checkpoint"] == [
        ["start", 0], ["step", 1], ["step", 2], ["evaluation", 2],
        ["step", 3], ["step", 4], ["evaluation", 4], ["end", 4],
    ]  # fmt: skip
    assert [row[2] for row in rows if row[0] == "step"] == result.losses
    assert [row[1] for row in rows if row[0] == "checkpoint"] == [2, 4]
    assert any((here / "runs/own/tensorboard").iterdir())


def test_a_stored_run_names_it_and_imports_nothing(here: Path) -> None:
    small = [*SMALL, "train.steps=1"]
    assert fivefold("train", *small, f'run.listeners=["{NAME}"]', cwd=here).returncode == 0
    (here / "heard.py").write_text("open('imported', 'w')\n" + TEXT)
    done = fivefold("train", "runs/own", "train.steps=2", cwd=here)
    assert done.returncode == 2
    assert f"--plugin {NAME}" in done.stderr
    shown = fivefold("inspect", "runs/own", cwd=here)
    assert shown.returncode == 0
    assert NAME not in shown.stdout  # it reads the model alone, and this one has no experts
    done = fivefold("train", "runs/own", "train.steps=2", "run.listeners=", cwd=here)
    assert done.returncode == 0, done.stderr
    assert not (here / "imported").exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """The losses of a run that nobody listens to."""
    return ff.train(None, [*SMALL, "train.steps=2", f"run.dir={tmp_path_factory.mktemp('plain')}"]).losses


@pytest.mark.parametrize("event", ["step", "evaluation", "checkpoint", "end"])
def test_what_it_raises_is_said_once_and_changes_no_step(here: Path, plain: list[float | None], event: str) -> None:
    (here / "heard.py").write_text(TEXT.replace(f'self.write("{event}"', f'raise OSError("{event} lost")  # ("'))
    said: list[str] = []
    with pytest.raises(TrainingError, match=f"all steps are done, but the listener {NAME} raised OSError in {event}"):
        ff.train(None, [*SMALL, "train.steps=2", f"run.listeners={NAME}"], progress=said.append)
    assert sum(f"the listener {NAME} raised OSError in {event}: {event} lost; training" in line for line in said) == 1
    lines = (here / "runs/own/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["kind"] == "step"]
    assert losses == plain


def test_one_that_cannot_start_ends_the_run_before_its_first_step(here: Path) -> None:
    (here / "heard.py").write_text(TEXT.replace('self.write("start"', 'raise SystemExit(0)  # ("'))
    done = fivefold("train", *SMALL, f"run.listeners={NAME}", cwd=here)
    assert done.returncode == 2
    assert f"run.listeners: the listener {NAME} raised SystemExit in start: 0" in done.stderr
    assert "step 1/" not in done.stdout


@pytest.mark.parametrize(("change", "said"), [
    (("def step(self, record)", "def step(self)"), "has step(self), and not step(self, record)"),
    (("    def start(self", "    def __init__(self, url): pass\n\n    def start(self"), "takes url to be made"),
    (("Heard(RunListener)", "Heard"), "is the class Heard, and not a subclass of fivefold.job.listeners:RunList"),
    (("class Heard(RunListener):", "class Heard(RunListener):\n    pass\n\nclass Other:"), "has none of the methods"),
])  # fmt: skip
def test_one_that_is_wrong_is_a_sentence(here: Path, change: tuple[str, str], said: str) -> None:
    (here / "heard.py").write_text(TEXT.replace(*change))
    with pytest.raises(UserError) as refused:
        ff.read_job(None, [f"run.listeners={NAME}"])
    assert said in refused.value.problems[0]


def test_a_name_that_is_none_and_the_short_way(here: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        ff.read_job(None, ["run.listeners=tensorbord"])
    assert ff.read_job(None, ["run.tensorboard=true"]).run.heard == ["tensorboard"]
    assert set(EVENTS) <= {name for kind in LISTENERS.table.values() for name in dir(kind)}
