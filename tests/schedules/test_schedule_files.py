"""`schedule=FILE` works wherever a name does: in layouts, in every command, in a run that is resumed."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.check import check
from fivefold.schedules.communication import wire, with_zero
from fivefold.schedules.registry import build, record_of
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.schedules.text import load, save
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError


def edited() -> Schedule:
    """zb-h1 for two ranks with its W moved by hand: an order that no builder makes."""
    orders = {
        0: "F0.0 F0.1 I0.0 F0.2 W0.0 I0.1 W0.1 F0.3 I0.2 W0.2 I0.3 W0.3",
        1: "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1 F1.2 I1.2 F1.3 W1.2 I1.3 W1.3",
    }
    actions = [[_action(word) for word in orders[rank].split()] for rank in range(2)]
    return wire("by hand", Placement.single(2), 4, actions)


def _action(word: str) -> Action:
    stage, _, microbatch = word[1:].partition(".")
    return Action(Kind(word[0]), int(stage), int(microbatch))


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    save(edited(), tmp_path / "mine.txt")
    return tmp_path / "mine.txt"


def run(words: Sequence[object], code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        return str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_edited_order_is_new_and_proven() -> None:
    assert not check(edited())
    for name in ("zb-h1", "zb-h2", "auto"):
        built = build(name, 2, 4)
        assert [built.compute(rank) for rank in range(2)] != [edited().compute(rank) for rank in range(2)]


@pytest.mark.parametrize("suffix", ["txt", "json"])
@pytest.mark.parametrize(("name", "p", "m"), [("zb-v", 2, 4), ("interleaved", 2, 4), ("gpipe", 4, 3), ("1f1b", 1, 2)])
def test_a_layout_takes_its_facts_from_the_file(tmp_path: Path, name: str, p: int, m: int, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    schedule = build(name, p, m)
    save(schedule, path)
    layout = Layout.parse(f"pp={p},schedule={path},microbatches={m}")
    assert Layout.parse(str(layout)) == layout
    assert layout.placement == schedule.placement
    assert layout.chunks == schedule.placement.chunks
    assert layout.splits_backward == schedule.splits
    assert not layout.problems(preset("tiny"))
    assert schedule_of(preset("tiny"), layout, 64) == schedule
    named = Layout(pp=p, schedule=name, microbatches=m)
    assert layout.breaks_graphs == named.breaks_graphs


def test_a_job_has_the_file_too(by_hand: Path) -> None:
    job = read_job(None, [f"layout=pp=2,schedule={by_hand},microbatches=4"])
    assert job.layout == read_job(None, ["layout.pp=2", f"layout.schedule={by_hand}", "layout.microbatches=4"]).layout


def test_a_changed_file_is_read_again(by_hand: Path) -> None:
    before = record_of(str(by_hand))
    assert record_of(str(by_hand)) is before
    save(build("gpipe", 2, 8), by_hand)
    assert record_of(str(by_hand)).schedule == build("gpipe", 2, 8)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("pp=4,microbatches=4", "layout.pp=4, and {path} is a schedule for pp=2; nearest: pp=2"),
        ("pp=2,microbatches=8", "layout.microbatches=8, and {path} is a schedule for microbatches=4; nearest: micro"),
        ("pp=2,microbatches=4,chunks=2", "layout.chunks=2, and schedule={path} has 1 per rank"),
    ],
)
def test_other_numbers_than_the_files_get_one_sentence(by_hand: Path, layout: str, sentence: str) -> None:
    problems = Layout.parse(f"{layout},schedule={by_hand}").problems(preset("tiny"))
    assert len(problems) == 1
    assert sentence.format(path=by_hand) in problems[0]


def test_what_the_trainer_does_not_do_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"

    def refusal(schedule: Schedule) -> str:
        save(schedule, path)
        (problem,) = Layout(pp=2, schedule=str(path), microbatches=4).problems(preset("tiny"))
        return problem

    assert "places GATHER, REDUCE or STEP: training does these by layout.zero" in refusal(
        with_zero(build("1f1b", 2, 4), 1)
    )
    orders = [[Action(Kind.FORWARD, stage, k) for k in range(4) for stage in own] for own in ((0, 1), (2,))]
    orders[0] += [Action(Kind.BACKWARD, stage, k) for k in range(4) for stage in (1, 0)]
    orders[1] += [Action(Kind.BACKWARD, 2, k) for k in range(4)]
    uneven = wire("uneven", Placement((0, 0, 1)), 4, orders, buffers=4)
    assert "has 2 on rank 0, 1 on rank 1: training needs the same number" in refusal(uneven)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    swapped = [[Action(kind, stage, k) for kind in kinds for k in range(4)] for stage in (1, 0)]
    assert "has stage 0 on rank 1: training" in refusal(wire("swapped", Placement((1, 0)), 4, swapped, buffers=4))


COMMANDS = {
    "train": "train model=tiny layout={layout} --nproc 2 run.dir={runs}",
    "verify": "verify model=tiny --layout {layout}",
    "plan": "plan llama3-8b --layout {layout} --batch 4",
    "dryrun": "dryrun tiny --layout {layout}",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["missing", "broken", "wrong pp"])
def test_a_bad_file_gets_sentences_before_anything_starts(by_hand: Path, command: str, what: str) -> None:
    layout, sentence = f"pp=2,schedule={by_hand},microbatches=4", "cannot be read: No such file"
    if what == "missing":
        by_hand.unlink()
    elif what == "broken":
        by_hand.write_text(by_hand.read_text().replace("F1.1", "F1.x"))
        sentence = "'F1.x' is not an action"
    else:
        layout, sentence = f"pp=1,schedule={by_hand},microbatches=4", "is a schedule for pp=2; nearest: pp=2"
    line = COMMANDS[command].format(layout=layout, runs=by_hand.parent / "runs")
    assert sentence in run(line.split(), code=2)
    assert not (by_hand.parent / "runs").exists()


def test_draw_and_plan_take_a_file(by_hand: Path) -> None:
    assert json.loads(run(["draw", by_hand, "--json"]))["schedule"] == "by hand"
    layout = f"pp=2,schedule={by_hand},microbatches=4"
    given = ["plan", "llama3.2-1b", "--cluster", "2xH100", "--batch", "4", "--json", "--layout"]
    found = json.loads(run([*given, layout]))["layout"]
    assert found["layout"] == layout
    named = json.loads(run([*given, "pp=2,schedule=zb-h1,microbatches=4"]))["layout"]
    assert found["step_seconds"] != named["step_seconds"]
    fixed = ["plan", "llama3.2-1b", "--cluster", "8xH100", "--batch", "16", "--json", "--fix"]
    plan = json.loads(run([*fixed, f"schedule={by_hand}"]))
    layouts = [option["layout"] for option in plan["options"]]
    assert layouts
    for one in layouts:
        assert f"schedule={by_hand}" in one
        assert "pp=2" in one
        assert "microbatches=4" in one


def test_a_file_that_says_what_a_name_says_is_timed_alike(tmp_path: Path) -> None:
    cluster, spec = Cluster.parse("8xH100"), preset("llama3-8b")
    for name in ("1f1b", "zb-v", "dualpipe-v"):
        save(build(name, 4, 8), tmp_path / f"{name}.txt")
        seconds = [
            estimate(Workload(spec, Layout(pp=4, dp=2, schedule=schedule, microbatches=8), cluster, 4096, 16)).seconds
            for schedule in (name, str(tmp_path / f"{name}.txt"))
        ]
        assert seconds[0] == seconds[1]


@pytest.mark.parametrize(("model", "seq"), [("tiny", 128), ("llama3-8b", 8192), ("gpt3-175b", 2048)])
def test_planner_and_trainer_run_the_same_auto(model: str, seq: int) -> None:
    """One object, made for the stages; and the planner's simulation is of that object."""
    spec, cluster = preset(model), Cluster.parse("8xH100")
    for pp in (2, 4, 8):
        if pp > spec.layers + 2:
            continue
        for m in (1, 3, 8, 16):
            layout = Layout(pp=pp, schedule="auto", microbatches=m)
            simulation = estimate(Workload(spec, layout, cluster, seq, m)).simulation
            assert simulation is not None
            assert simulation.schedule is schedule_of(spec, layout, seq)


def test_verify_and_dryrun_run_the_edited_order(by_hand: Path) -> None:
    layout = f"pp=2,schedule={by_hand},microbatches=4"
    assert "ok" in run(["verify", "model=tiny", "model.layers=2", "--steps", "1", "--layout", layout])
    assert str(by_hand.name) in run(["dryrun", "tiny", "model.layers=2", "--layout", layout, "--batch", 4])


def test_train_keeps_the_schedule_and_resumes_without_the_original(by_hand: Path, tmp_path: Path) -> None:
    settings = ["data.seq=16", "train.batch=4", "checkpoint.every=1", f"run.dir={tmp_path / 'runs'}", "run.name=one"]
    layout = f"layout=pp=2,schedule={by_hand},microbatches=4"
    run(["train", "model=tiny", layout, *settings, "train.steps=1", "train.eval_samples=0", "--nproc", 2])
    folder = tmp_path / "runs" / "one"
    by_hand.unlink()
    kept = read_job(folder / "job.toml").layout
    assert kept.schedule == str(folder / "schedule.txt")
    assert load(folder / "schedule.txt") == edited()
    run(["train", folder / "job.toml", "train.steps=2", "--nproc", 2])
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_job_finds_the_schedule_that_lies_beside_it(by_hand: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "job.toml").write_text(f'[layout]\npp = 2\nmicrobatches = 4\nschedule = "{by_hand.name}"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Path(read_job(tmp_path / "job.toml").layout.schedule) == tmp_path / by_hand.name
