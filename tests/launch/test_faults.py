import pytest

from fivefold.launch import faults
from fivefold.launch.faults import Fault, parse
from fivefold.launch.world import RESTARTS_ENV
from tests.refusals import refusal


def test_several_faults_stand_in_one_variable() -> None:
    assert parse("kill@rank=1,step=4; slow@at=write,step=2,until=5,start=1") == (
        Fault("kill", rank=1, step=4),
        Fault("slow", "write", step=2, until=5, start=1),
    )
    assert parse("") == parse(" ; ") == ()
    assert parse("flip@rank=1;flip@at=shard") == (Fault("flip", "weight", rank=1), Fault("flip", "shard"))


@pytest.mark.parametrize(
    "text", ["boom@step=1", "kill@step=x", "kill@at=moon", "kill@when=2", "kill@step=1;flop", "flip@at=write"]
)
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    assert refusal(lambda: parse(text)).codes == ["environment.fault"]


def test_when_a_fault_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def due(text: str, step: int | None, restarts: int = 0, at: str = "step") -> bool:
        monkeypatch.setenv(RESTARTS_ENV, str(restarts))
        return parse(text)[0].due(at, step)

    assert due("kill@rank=1,step=4", 4)
    assert not due("kill@rank=1,step=4", 5)
    assert not due("kill@rank=0,step=4", 4)
    assert [due("slow@step=3,until=5", step) for step in range(2, 7)] == [False, True, True, True, False]
    assert not due("kill@step=4", 4, restarts=1)
    assert due("kill@step=4,starts=2", 4, restarts=1)
    assert [due("kill@step=4,start=1", 4, restarts) for restarts in range(3)] == [False, True, False]
    assert not due("kill@at=write", 4)
    assert due("kill@at=write", None, at="write")


def test_the_caller_is_told_what_to_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "nan@step=2")
    assert faults.strike("step", step=1) == ""
    assert faults.strike("step", step=2) == "nan"
