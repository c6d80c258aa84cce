"""The rule for spikes, what is done about them, and what of it outlives a start: no ranks, no torch."""

import math
from pathlib import Path

import pytest

from fivefold.job.config import WatchConfig
from fivefold.job.reading import read_job
from fivefold.support.errors import TrainingError, UserError
from fivefold.trainer.records import MetricsFile, Step, StepDecision, read, trim
from fivefold.trainer.spikes import (
    DECISIONS_FILE,
    Account,
    Decisions,
    Policy,
    StepNumbers,
    is_spike,
    read_decisions,
    write,
)

EVEN = [StepNumbers(2.0 + 0.01 * (-1) ** n, 1.0) for n in range(8)]


def policy(**settings: object) -> Policy:
    made = Policy(WatchConfig(**({"window": 8} | settings)))  # type: ignore[arg-type]
    for number, one in enumerate(EVEN):
        assert made.look(number + 1, 4 * number, 4 * number + 4, one) is None
    return made


def decision(step: int = 9, **fields: object) -> StepDecision:
    usual = {"why": "spike", "action": "skip", "loss": 9.0, "grad_norm": 1.0}
    samples = {"first": 4 * step - 4, "samples": 4 * step}
    return StepDecision(step=step, **(usual | samples | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "is_one"),
    [
        ((2.0, 1.0), False),
        ((2.09, 1.0), False),  # nine distances above the median, and less than a twentieth of it
        ((2.11, 1.0), True),  # more than ten distances, and than a twentieth
        ((0.5, 1.0), False),  # a fall is none
        ((2.0, 10.0), False),
        ((2.0, 10.1), True),
    ],
)
def test_a_spike_stands_out_from_the_steps_before(found: tuple[float, float], is_one: bool) -> None:
    assert is_spike(StepNumbers(*found), EVEN, window=8, factor=10) == is_one
    assert not is_spike(StepNumbers(*found), EVEN[:3], window=8, factor=10)  # too few to judge by


def test_losses_that_vary_or_fall_make_no_spikes() -> None:
    falling = [StepNumbers(6.0 - 0.1 * n, 2.0) for n in range(16)]
    assert not any(is_spike(one, falling[:at], 16, 10) for at, one in enumerate(falling))
    assert not is_spike(StepNumbers(7.0, 2.0), [StepNumbers(5.0 + n % 3, 2.0) for n in range(16)], 16, 10)


def test_a_policy_warns_skips_rolls_back_or_looks_away() -> None:
    for action in ("warn", "skip", "rollback"):
        found = policy(spike=action).look(9, 32, 36, StepNumbers(50.0, 1.0))
        assert found is not None
        assert (found.action, found.why, found.first, found.samples) == (action, "spike", 32, 36)
        assert found.usual_loss == pytest.approx(2.0, abs=0.02)
    assert policy(spike="off").look(9, 32, 36, StepNumbers(50.0, 1.0)) is None


def test_what_was_skipped_does_not_become_usual_and_what_was_warned_of_does() -> None:
    for action, size in (("skip", EVEN), ("warn", [*EVEN[1:], StepNumbers(50.0, 1.0)])):
        made = policy(spike=action)
        made.look(9, 32, 36, StepNumbers(50.0, 1.0))
        assert list(made.recent) == list(size)


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (2.0, math.inf)])
def test_no_number_stops_the_run_unless_asked_otherwise(numbers: tuple[float, float]) -> None:
    with pytest.raises(TrainingError, match=r"step 9: loss .* samples 32 to 35; the weights were not touched$"):
        policy().look(9, 32, 36, StepNumbers(*numbers))
    by_plugin = Policy(WatchConfig(), "mine:Mine")
    with pytest.raises(TrainingError, match=r"step 1: .* weights were not touched$"):
        by_plugin.look(1, 0, 4, StepNumbers(*numbers))
    with pytest.raises(TrainingError, match=r"step 2: .*; they are as mine:Mine, a plugin, has left them, which may"):
        by_plugin.look(2, 4, 8, StepNumbers(*numbers))
    found = policy(nonfinite="skip").look(9, 32, 36, StepNumbers(*numbers))
    assert found is not None
    assert (found.action, found.why) == ("skip", "nonfinite")
    assert "nan" in str(found)
    assert None in (found.loss, found.grad_norm)


def test_no_policy_goes_on_for_ever() -> None:
    made = policy(spike="skip", most=2)
    for step in (9, 10):
        found = made.look(step, 4 * step - 4, 4 * step, StepNumbers(50.0, 1.0))
        assert found is not None
        made.settle(found)
    with pytest.raises(TrainingError, match=r"step 11: .* steps 9, 10 were skipped or rolled back already"):
        made.look(11, 40, 44, StepNumbers(50.0, 1.0))
    assert made.look(20, 80, 84, StepNumbers(50.0, 1.0)) is not None  # far enough behind


def test_rollbacks_to_one_step_do_not_go_on_for_ever_either() -> None:
    made = policy(spike="rollback", most=3)
    for number in range(3):  # a hundred batches each time, and not a step further
        made.settle(
            decision(100, first=400 * number, samples=400 * number + 4, action="rollback", back=0, back_samples=0)
        )
    with pytest.raises(TrainingError, match=r"the run ends"):
        made.look(99, 9000, 9004, StepNumbers(50.0, 1.0))


def test_a_decision_is_made_again_without_judging_and_so_is_none() -> None:
    made = policy(spike="warn")
    made.decisions.add([decision(9)])
    assert made.look(9, 32, 36, StepNumbers(2.0, 1.0)) == decision(9)  # nothing is wrong with it any more
    made.judged = 44
    assert made.look(11, 40, 44, StepNumbers(50.0, 1.0)) is None  # which another start found to be none
    assert made.look(12, 44, 48, StepNumbers(500.0, 1.0)) is not None
    made = policy(spike="skip")
    made.decisions.add([decision(9, action="warn")])
    found = made.look(9, 32, 36, StepNumbers(2.0, 1.0))
    assert found is not None
    assert found.action == "skip"  # other rules were asked for since


def test_a_rollback_is_made_again_by_leaving_out_its_samples() -> None:
    first = decision(14, first=52, samples=56, action="rollback", back=10, back_samples=40)
    again = decision(13, first=64, samples=68, action="rollback", back=10, back_samples=40)
    further = decision(20, first=90, samples=94, action="rollback", back=11, back_samples=72)
    found = Decisions([again, first, further])
    assert found.onward(10, 40) == 68
    assert found.onward(11, 72) == 94
    assert found.onward(10, 44) == 44
    assert [at for at in range(40, 100, 4) if found.undone(at)] == [*range(44, 68, 4), *range(76, 94, 4)]
    assert found.at(52, 56) is None


def test_decisions_outlive_a_start_and_damage_to_them_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, decision(9))
    with (tmp_path / DECISIONS_FILE).open("ab") as file:
        file.write(b'{"kind":"decision","step"')
    assert (read_decisions(tmp_path).decisions, read_decisions(tmp_path).damaged) == (
        [decision(9)],
        0,
    )  # once: it is removed
    write(tmp_path, decision(10))
    assert read_decisions(tmp_path).decisions == [decision(9), decision(10)]
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_step(step(5))
    assert read_decisions(tmp_path).judged == 20
    trim(tmp_path / "metrics.jsonl", 2)
    assert read_decisions(tmp_path).judged == 20


def test_metrics_hold_one_curve_and_what_was_decided(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for number in range(1, 6):
        metrics.on_step(step(number))
    back = decision(6, action="rollback", back=2, back_samples=8, loss=None)
    metrics.on_decision(back)
    metrics.on_step(step(3))
    metrics.on_decision(decision(3))
    metrics.close()
    found = [record for _, record in read(tmp_path / "metrics.jsonl")]
    assert found == [step(1), step(2), back, step(3), decision(3)]
    assert trim(tmp_path / "metrics.jsonl", 2) == ([step(1), step(2)], 0)
    assert [record for _, record in read(tmp_path / "metrics.jsonl")] == found[:3]


def test_a_manifest_keeps_what_the_rule_needs() -> None:
    made, other = policy(spike="skip"), Policy(WatchConfig(window=8))
    made.settle(decision(9))
    made.settle(decision(10, action="warn"))
    other.restore(made.keep(), "here")
    assert other.recent == made.recent
    assert list(other.decisions) == [decision(9)]  # a warning changed nothing
    with pytest.raises(UserError, match=r"here: what its watchers knew cannot be read"):
        other.restore({"recent": [["x", 1]]}, "here")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["watch.spike=rollback", "checkpoint.save=false"], "goes back to a checkpoint, and checkpoint.save=false mak"),
        (["watch.nonfinite=rollback", "checkpoint.every=4"], "may have 4 of them; nearest: checkpoint.keep=4"),
        (["watch.slow=0.5"], "watch.slow=0.5 is a factor: above 1, or 0 for none"),
        (["watch.window=2"], "watch.window=2 must be at least 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(words: list[str], sentence: str) -> None:
    assert any(sentence in problem for problem in read_job(None, words).problems())
    nearest = read_job(None, ["watch.nonfinite=rollback", "checkpoint.every=4", "checkpoint.keep=4"])
    assert nearest.problems() == []


def test_the_account_is_of_the_steps_time() -> None:
    account = Account()
    assert str(account) == "none at work"
    account.add("spikes", 0.001)
    account.add("slow ranks", 0.002)
    account.step(1.0)
    account.step(1.0)
    assert account.shares() == {"spikes": 0.0005, "slow ranks": 0.001}
    assert str(account) == "0.150% of the steps' time: spikes 0.050%, slow ranks 0.100%"


def step(number: int) -> Step:
    return Step(step=number, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=64, loss_tokens=64, seconds=1.0,
                tokens_per_second=64.0, mfu=None, memory=1, samples=4 * number)  # fmt: skip
