"""What a run that goes on may change."""

import copy
import re
from pathlib import Path

import msgspec
import pytest

from fivefold.job.config import Job
from fivefold.job.reading import job_of, read_job, resolve
from fivefold.job.resume_rules import FREE, MEANT, NEVER, RATE, RULES, changes, flat, resume_problems, rule_of
from fivefold.optim.adamw import AdamW
from fivefold.support.errors import Note, UserError


def problems(before: Job, now: Job, done: int, named: bool = False) -> list[str]:
    return resume_problems(before, now, done, changes(before, now), Path("runs/run"), named=named)


def job(*words: str) -> Job:
    return read_job(None, words)


def test_every_rule_is_of_a_setting_and_the_page_says_each() -> None:
    tables = msgspec.to_builtins(job())
    for key in RULES:
        section, _, setting = key.partition(".")
        assert section in tables
        assert not setting or setting in tables[section], key
    settings = [f"{section}.{key}" for section, table in tables.items() for key in table]
    assert {rule_of(key) for key in settings} == {FREE, MEANT, NEVER, RATE}
    page = (Path(__file__).parents[2] / "docs/jobs.md").read_text()
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| *")}
    told = {FREE: rows["| *free*"], MEANT: rows["| *meant*"], RATE: rows["| *rate*"], NEVER: rows["| *never*"]}
    for key, rule in RULES.items():
        assert f"`{key}`" in told[rule], (key, rule)


@pytest.mark.parametrize(
    ("words", "done", "refused"),
    [
        (["train.steps=24"], 12, True),
        (["train.steps=24"], 3, True),
        (["train.steps=24"], 2, False),  # nothing but the warm-up is done
        (["train.steps=6"], 3, True),
        (["train.steps=6"], 12, False),  # there is nothing to do
        (["train.steps=24", "optimizer.schedule_steps=12"], 12, False),
        (["train.steps=24", "optimizer.schedule_steps=24"], 12, False),
        (["train.steps=24", "optimizer.schedule_steps=18"], 12, False),
    ],
)
def test_a_cosine_of_twelve_steps(words: list[str], done: int, refused: bool) -> None:
    before = job("train.steps=12", "optimizer.warmup=2")
    assert bool(problems(before, job("optimizer.warmup=2", *words), done)) == refused
    assert bool(problems(before, job("optimizer.warmup=2", *words), done, named=True)) == refused


@pytest.mark.parametrize(("done", "refused"), [(9, False), (10, False), (11, True), (12, True)])
def test_a_wsd_of_twelve_steps_can_grow_until_its_rate_falls(done: int, refused: bool) -> None:
    wsd = ["optimizer.warmup=2", "optimizer.schedule=wsd"]
    found = problems(job("train.steps=12", *wsd), job("train.steps=24", *wsd), done)
    assert bool(found) == refused
    assert not refused or "their wsd schedule was 12 steps long" in found[0]


def test_a_constant_rate_has_no_length() -> None:
    constant = "optimizer.schedule=constant"
    assert not problems(job("train.steps=12", constant), job("train.steps=24", constant), 12)


def test_whoever_names_the_directory_and_a_schedule_means_it() -> None:
    before, now = job("train.steps=40"), job("train.steps=80", "optimizer.schedule=constant", "optimizer.lr=3e-4")
    assert "was trained with other settings: optimizer.lr: 0.003 -> 0.0003" in problems(before, now, 40)[0]
    assert problems(before, now, 40, named=True) == []


@pytest.mark.parametrize("word", ["optimizer.lr=0.0029", "optimizer.warmup=1", "optimizer.final=0.2", "train.seed=1"])
def test_another_peak_or_warm_up_says_nothing_of_a_length(word: str) -> None:
    before = job("train.steps=12", "optimizer.warmup=2")
    longer = ["train.steps=24", "optimizer.warmup=2", word]
    assert "their cosine schedule was 12 steps long" in problems(before, job(*longer), 12, named=True)[0]
    assert problems(before, job(*longer, "optimizer.schedule_steps=12"), 12, named=True) == []
    assert problems(before, job("train.steps=12", "optimizer.warmup=2", word), 6, named=True) == []


@pytest.mark.parametrize(("warmup", "offered"), [(1, {12, 24}), (12, {24}), (30, {31})])
def test_no_length_is_offered_that_its_warm_up_forbids(warmup: int, offered: set[int]) -> None:
    before = job("train.steps=12", "optimizer.warmup=2")
    now = ["train.steps=24", f"optimizer.warmup={warmup}"]
    (said,) = problems(before, job(*now), 12, named=True)
    lengths = set(map(int, re.findall(r"optimizer.schedule_steps=(\d+)", said)))
    assert lengths == offered
    for length in lengths:
        longer = job(*now, f"optimizer.schedule_steps={length}")
        assert longer.problems() == problems(before, longer, 12, named=True) == []


def test_a_length_that_was_said_stays_said() -> None:
    before = job("train.steps=80", "optimizer.schedule_steps=40")
    assert (
        "schedule was 40 steps long; optimizer.schedule_steps=40 keeps it"
        in problems(before, job("train.steps=80"), 50)[0]
    )
    assert problems(before, job("train.steps=90", "optimizer.schedule_steps=40"), 50) == []


def test_imported_weights_have_no_curve_yet() -> None:
    assert problems(job(), job("optimizer.lr=1", "train.steps=9", "train.seed=4"), 0) == []
    assert problems(job(), job("model.layers=3"), 0) != []


def test_many_differences_are_counted() -> None:
    words = ["data.seq=64", "data.seed=1", "optimizer.lr=1", "optimizer.eps=1", "optimizer.clip=2", "train.batch=8",
             "train.seed=1", "train.dtype=bfloat16", "model.dropout=0.1"]  # fmt: skip
    (said,) = problems(job(), job(*words), 1)
    assert "model.dropout: 0.0 -> 0.1, data.seq: 128 -> 64, data.seed: 0 -> 1" in said
    assert " and 3 more; run.name=NAME or --fresh" in said


def test_experts_stay_and_what_keeps_them_even_may_be_changed_by_name() -> None:
    before = job("model=tiny-deepseek")
    [never] = problems(before, job("model=tiny-deepseek", "model.experts.top_k=1"), 5, named=True)
    assert "has another model: model.experts.top_k: 2 -> 1; " in never
    now = job("model=tiny-deepseek", "train.balance_rate=0.01", "train.balance_loss=0.1")
    [meant] = problems(before, now, 5)
    assert "train.balance_rate: 0.001 -> 0.01, train.balance_loss: 0.0 -> 0.1" in meant
    assert problems(before, now, 5, named=True) == []
    assert "model.experts.count: none -> 8" in problems(job("model=tiny"), job("model=tiny-moe"), 5)[0]


def test_settings_of_the_class_before_fall_away_where_the_new_one_does_not_have_them() -> None:
    stored = msgspec.to_builtins(job("optimizer.name=muon", "optimizer.lr=0.02", "loss.z_loss=1e-4"))
    with pytest.warns(Note, match=r"optimizer.nesterov.* of muon fell away: adamw does not have it"):
        found = resolve(stored, ["optimizer.name=adamw", "optimizer.eps=1e-6"], stored=True)
    assert isinstance(found.optimizer, AdamW)
    assert (found.optimizer.lr, found.optimizer.eps) == (0.02, 1e-6)
    wrong = ["optimizer.name=adamw", "optimizer.nesterov=true"]  # what the change itself says is no leftover
    with pytest.raises(UserError, match=r"optimizer.nesterov is not a setting"):
        resolve(msgspec.to_builtins(job("optimizer.name=muon")), wrong, stored=True)


def test_settings_of_a_class_that_is_not_here_are_left_alone_until_another_is_named() -> None:
    stored = {"loss": {"name": "nowhere.at_all:Smooth", "eps": 0.1, "smoothing": 3}}
    with pytest.raises(UserError) as refused:
        resolve(copy.deepcopy(stored), stored=True)
    assert refused.value.codes == ["plugin.untrusted"]
    with pytest.warns(Note, match=r"loss.eps, loss.smoothing of nowhere.at_all:Smooth fell away"):
        assert resolve(stored, ["loss.name=cross_entropy"], stored=True).loss == job().loss


def test_what_is_planned_has_the_settings_that_training_takes() -> None:
    for change, code in (("optimizer.lr=-1", "optimizer.lr"), ("loss.z_loss=-1", "loss.z_loss")):
        with pytest.raises(UserError, match=rf"{code}=-1"):
            job_of("tiny", [change])
    job_of("tiny", ["train.batch=3", "layout.dp=64"])  # a plan chooses both for itself


def test_a_list_of_a_stored_job_is_the_tuple_of_another() -> None:
    assert flat({"betas": [0.9, 0.95]}) == flat({"betas": (0.9, 0.95)})
