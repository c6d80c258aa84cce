"""A schedule of a user's own module: named, proven, drawn, planned, verified and trained as one of ours."""

from collections.abc import Callable
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.support import plugins
from fivefold.support.errors import UserError
from tests.commands import fivefold
from tests.refusals import refusal

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
    assert ff.verify(f"pp=2,dp=2,schedule={NAME},microbatches=4", steps=2, seq=16).ok


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
    small = ["data.seq=32", "train.batch=4", "train.steps=1", "train.eval_samples=0", "train.device=cpu",
             "optimizer.schedule_steps=29", "run.name=own"]  # fmt: skip
    for words in (
        ["draw", NAME, "--pp", "4", "--microbatches", "8"],
        ["plan", "tiny", "--cluster", "2xCPU", "--batch", "16", "--seq", "64", "--fix", f"pp=2,schedule={NAME}"],
        ["train", f"layout=pp=2,schedule={NAME},microbatches=4", *small, "--nproc", "2"],
        ["inspect", "runs/own"],
        ["hf", "export", "runs/own", "-o", "hf"],
        ["train", "runs/own", "train.steps=2", "--plugin", NAME, "--nproc", "2"],
        ["train", "runs/own", "train.steps=3", "layout.schedule=1f1b", "--nproc", "2", "--check"],
    ):
        done = fivefold(*words, cwd=here)
        assert done.returncode == 0, (words, done.stderr)
    for words in (["runs/own", "train.steps=5"], ["runs/own", "layout.tp=1"], ["runs/own/job.toml"]):
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("planned=(1,))", 'planned=(1,), least="x", chunks=None, also=3)'), ["chunks=None", "least='x'", "also=3"]),
        (("planned=(1,))", "planned=(1,), place={}, splits=1)"), ["place={}, which cannot", "splits=1, and not True"]),
        (("planned=(1,))", "planned=(0.5,))"), ["planned=(0.5,), and not numbers of chunks"]),
        (("lambda p, m, v: 2 * p - 1", "lambda p, m, v: 'many'"), ["p=2, m=4 gave 'many'", "p=4, m=8 gave 'many'"]),
        (("lambda p, m, v: 2 * p - 1", "lambda p, m, v: min(2 * p - 1, m)"), ["as arrays, raised ValueError"] * 2),
        (
            ("planned=(1,))", "planned=(1,), place=lambda p, v: {}[p])"),
            ["place for p=2, chunks=1 raised KeyError: 2", "place for p=4, chunks=1 raised KeyError: 4"],
        ),
        (("planned=(1,))", "planned=(1,), place=lambda p, v: [0, 1])"), ["gave [0, 1], and not a Placement"] * 2),
        (("return wire(", "return 1 / 0; wire("), ["build for p=2, m=4 raised ZeroDivisionError"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["job", "plan", "simulate"])
def test_all_that_a_record_lacks_is_told_at_once_before_anything_reads_it(
    here: Path, change: tuple[str, str], words: list[str], asked: str
) -> None:
    (here / "eager.py").write_text(text := TEXT.replace(*change))
    assert text != TEXT
    layout = f"pp=2,schedule={NAME},microbatches=4"
    plugins.load(NAME)
    calls: dict[str, Callable[[], object]] = {
        "job": lambda: ff.dryrun("tiny", layout),
        "plan": lambda: ff.plan("llama3-8b", "4xH200", fix=f"pp=2,schedule={NAME}", batch=8, seq=4096),
        "simulate": lambda: ff.simulate("llama3-8b", layout, "2xH200", batch=8, seq=4096),
    }
    said = "\n".join(refusal(calls[asked]).problems)
    for word in words:
        assert word in said
        said = said.replace(word, "", 1)


def test_a_place_that_fails_for_other_numbers_is_a_sentence(here: Path) -> None:
    broken = TEXT.replace("planned=(1,))", "planned=(1,), place=lambda p, v: Placement.single({2: 2, 4: 4}[p]))")
    (here / "eager.py").write_text(broken)
    plugins.load(NAME)
    with pytest.raises(UserError, match="place for p=8, chunks=1 raised KeyError: 8"):
        ff.plan("llama3-8b", "8xH200", fix=f"pp=8,schedule={NAME}", batch=16, seq=4096)


def test_a_name_that_the_module_does_not_have_is_told_with_its_option_and_the_records(here: Path) -> None:
    """And not with --plugin, which was not given, nor with the functions that build schedules."""
    from fivefold.cli.options import _import_schedules

    error = refusal(lambda: _import_schedules({"layout": f"pp=2,schedule={NAME.partition(':')[0]}:NOPE"}))
    assert error.problems[0].startswith("layout.schedule=")
    assert error.problems[0].endswith(f"has no NOPE; known: {NAME.partition(':')[2]}")
