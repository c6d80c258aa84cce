"""A schedule of a user's own module: named, proven, drawn, planned, verified and trained as one of ours."""

from pathlib import Path

import pytest

import fivefold as ff
from fivefold.support import plugins
from fivefold.support.errors import UserError
from tests.commands import fivefold

NAME = "eager:EAGER"
TEXT = '''
from fivefold.schedules.actions import BACKWARD, FORWARD, Action
from fivefold.schedules.communication import wire
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.schedule import Placement

def order(p, m, rank):
    """1F1B with a deeper warm-up."""
    warm_up = min(m, 2 * (p - rank) - 2)
    actions = [Action(FORWARD, rank, k) for k in range(warm_up)]
    for k in range(m):
        actions += [Action(FORWARD, rank, warm_up + k)] * (warm_up + k < m) + [Action(BACKWARD, rank, k)]
    return actions

def eager(r):
    return wire("eager", Placement.single(r.p), r.m, [order(r.p, r.m, rank) for rank in range(r.p)])

EAGER = ScheduleInfo("eager", eager, live=lambda p, m, v: 2 * p - 1, planned=(1,))
'''


@pytest.fixture
def here(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eager.py").write_text(TEXT)
    return tmp_path


def test_it_computes_what_one_process_computes_in_float64(here: Path) -> None:
    assert ff.verify(f"pp=2,dp=2,schedule={NAME},microbatches=4").ok


def test_it_is_planned_and_timed(here: Path) -> None:
    job = ff.read_job(None, [f"layout=pp=4,schedule={NAME},microbatches=8", "model=llama3-8b"])
    assert job.problems() == []
    assert job.plugins == [NAME]
    same = ff.simulate("llama3-8b", "pp=4,schedule=1f1b,microbatches=8", "4xH200", batch=8, seq=4096)
    own = ff.simulate("llama3-8b", f"pp=4,schedule={NAME},microbatches=8", "4xH200", batch=8, seq=4096)
    assert own.option.footprint.total > same.option.footprint.total  # it holds more activations
    best = ff.plan("llama3-8b", "4xH200", fix=f"pp=4,schedule={NAME}", batch=8, seq=4096).chosen
    assert best.layout.schedule == NAME
    assert str(ff.Layout.parse(str(best.layout))) == str(best.layout)


def test_a_layout_in_python_needs_the_import(here: Path) -> None:
    layout = ff.Layout(pp=2, schedule=NAME, microbatches=2)
    [problem] = layout.problems(ff.preset("tiny"))
    assert f"--plugin {NAME}" in problem
    plugins.load(NAME)
    assert ff.Layout(pp=2, schedule=NAME, microbatches=2).problems(ff.preset("tiny")) == []


def test_commands_take_it_where_they_take_a_layout_and_a_stored_one_when_they_are_told(here: Path) -> None:
    small = ["data.seq=32", "train.batch=4", "train.steps=2", "train.eval_samples=0", "train.device=cpu",
             "optimizer.schedule_steps=29", "run.name=own"]  # fmt: skip
    for words in (
        ["draw", NAME, "--pp", "4", "--microbatches", "8"],
        ["plan", "llama3-8b", "--cluster", "8xH200", "--batch", "16", "--fix", f"pp=8,schedule={NAME}"],
        ["train", f"layout=pp=2,schedule={NAME},microbatches=4", *small, "--nproc", "2"],
        ["inspect", "runs/own"],
        ["hf", "export", "runs/own", "-o", "hf"],
        ["train", "runs/own", "train.steps=3", "--plugin", NAME, "--nproc", "2"],
        ["train", "runs/own", "train.steps=4", "layout.schedule=1f1b", "--nproc", "2"],
    ):
        done = fivefold(*words, cwd=here)
        assert done.returncode == 0, (words, done.stderr)
    for words in (["runs/own", "train.steps=5"], ["runs/own", "layout.tp=1"], ["runs/own/job.toml"]):
        (here / "runs/own/job.toml").write_text(
            (here / "runs/own/job.toml").read_text().replace('schedule = "1f1b"', f'schedule = "{NAME}"')
        )
        done = fivefold("train", *words, cwd=here)
        assert done.returncode == 2
        assert f"layout.schedule={NAME} is stored" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("live=lambda p, m, v: 2 * p - 1, ", ""), "holds 7 activations of a rank, and its `live` says 4"),
        (("Placement.single(r.p), r.m,", "Placement.single(r.p), r.m + 1,"), "builds a schedule for p=4, m=9"),
        (("    return actions", "    return actions[:-1]"), "never runs a backward of F0.7"),
        (("    return actions", "    return 1 / 0"), "raised ZeroDivisionError: division by zero"),
        (("planned=(1,))", "planned=(1,))\nEAGER = [EAGER]"), "is a list, and not a fivefold.schedules.info:"),
        (('    return wire("eager", ', '    return ("eager", '), "builds a tuple, and not a Schedule"),
    ],
)  # fmt: skip
def test_one_that_is_wrong_is_a_sentence(here: Path, change: tuple[str, str], said: str) -> None:
    text = TEXT.replace(*change)
    assert text != TEXT
    (here / "eager.py").write_text(text)
    plugins.load(NAME)
    with pytest.raises(UserError) as refused:
        ff.schedule(NAME, pp=4, microbatches=8)
    assert any(said in problem for problem in refused.value.problems), refused.value.problems
