"""What hears of a run: one of ours and one of a user's own module, on rank 0, whatever it raises."""

import json
import re
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.job import named_listeners
from fivefold.job.listeners import EVENTS, ListenerLost, figures_of
from fivefold.job.named_listeners import LISTENERS
from fivefold.job.trackers import Tracker
from fivefold.support.errors import TrainingError, UserError
from fivefold.trainer.records import Evaluation
from tests.commands import fivefold
from tests.web.a_run import step as a_step

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


def test_the_example_of_the_page_works_as_written(here: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
    (text,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Lowest" in block)
    (here / "lowest.py").write_text(text)
    result = ff.train(None, [*SMALL, "run.listeners=lowest:Lowest"])
    best = min(result.steps, key=lambda step: step.loss or 0.0)
    assert (here / "runs/own/lowest.txt").read_text() == f"step {best.step}: {best.loss:.4f}\n"


@pytest.mark.parametrize("event", ["start", "step"])
def test_one_that_a_run_can_do_without_is_said_once(here: Path, plain: list[float | None], event: str) -> None:
    """At its start too, where what another raises ends the run."""
    lost = TEXT.replace("import RunListener", "import ListenerLost, RunListener")
    lost = lost.replace(f'self.write("{event}"', 'raise ListenerLost("the board is off")  # ("')
    (here / "heard.py").write_text(lost)
    said: list[str] = []
    with pytest.raises(TrainingError, match=r"all steps are done, but the board is off\n"):
        ff.train(None, [*SMALL, "train.steps=2", f"run.listeners={NAME}"], progress=said.append)
    assert sum("the board is off; training continues without it" in line for line in said) == 1
    lines = (here / "runs/own/metrics.jsonl").read_text().splitlines()
    assert [row["loss"] for row in map(json.loads, lines) if row["kind"] == "step"] == plain


class Recording(Tracker):
    """A tracker of this file: what it was told, and what goes wrong."""

    title, name = "Board", "board"

    def open(self, job: object, directory: Path, step: int) -> None:
        self.told: list[object] = [self.kept(directory)]
        self.keep(directory, "a-name")
        if self.title == "Closed":
            raise SystemExit("no way in\nand more")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.told.append((step, *figures))
        if "train/loss" not in figures:
            raise OSError("the line is cut.")

    def finish(self, *, complete: bool) -> None:
        self.told.append(complete)


def test_a_tracker_works_beside_the_run_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, step = ff.read_job(None, ["train.steps=2"]), a_step(2)
    board = Recording()
    board.start(job, tmp_path, 0)
    board.step(step)
    board.end(2)
    assert board.told == [None, (2, *figures_of(step)), True]
    (tmp_path / "board.id").write_text("../etc\n")  # no name of a run
    again = Recording()
    again.start(job, tmp_path, 2)
    again.evaluation(Evaluation(step=2, held_out_loss=1.0, samples=1, loss_tokens=1))
    with pytest.raises(ListenerLost, match=r"^Board takes no figures: the line is cut$"):
        again.end(2)
    assert again.told[0] is None
    third = Recording()
    monkeypatch.setattr(Recording, "title", "Closed")
    with pytest.raises(ListenerLost, match=r"^Closed takes no figures: no way in$"):
        third.start(job, tmp_path, 2)
    assert third.told == ["a-name"]


def test_a_package_that_is_not_installed_is_refused_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_listeners, "not_installed", lambda name: name != "tensorboard")
    problems = list(named_listeners.missing_packages(["tensorboard", "wandb", "mlflow", NAME]))
    assert [problem.code for problem in problems] == ["install.wandb", "install.mlflow"]
    assert problems[0] == 'the listener wandb needs wandb: pip install "fivefold[wandb]"'
