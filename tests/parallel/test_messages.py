"""What ranks tell each other: data of a declared type, and never code."""

import pickle
from pathlib import Path

import pytest
import torch.distributed as dist

from fivefold.parallel.control import all_gather_values, gather_values, packed, unpacked
from fivefold.schedules.actions import FORWARD, Action
from fivefold.schedules.clock import BusySpan
from fivefold.support.errors import TrainingError
from fivefold.support.files import File
from fivefold.tracing.records import Flight, NamedSpan, RankTrace, StepWindow, Wait
from tests.ranks import run_ranks


@pytest.mark.parametrize(("value", "kind"), [
    (Path("a") / "b", Path),
    (None, Path | None),
    ((Path("x"), ["a"]), tuple[Path | None, list[str]]),
    ([File("a", 1, "00")], list[File]),
    ("x" * 100_000, str),
])  # fmt: skip
def test_values_arrive_as_they_were(value: object, kind: object) -> None:
    assert unpacked(packed(value), kind) == value


def test_a_trace_arrives_whole() -> None:
    during = Action(FORWARD, 1, 2)
    trace = RankTrace(
        rank=1,
        name="dp1",
        pipeline=0,
        pp_rank=0,
        steps=(StepWindow(1, 0.0, 1.0),),
        actions=(BusySpan(during, 0.0, 0.5),),
        updates=(NamedSpan("norm", 0.5, 0.6),),
        waits=(Wait("pp", "send", 0.1, 0.2, during), Wait("dp", "barrier", 0.1, 0.2)),
        flights=(Flight("dp", "all-reduce", 12, 0.1, 0.2),),
    )
    assert unpacked(packed(trace), RankTrace) == trace


def test_what_is_not_of_its_type_is_refused_and_its_rank_named() -> None:
    with pytest.raises(TrainingError, match=r"rank 3 sent what is not .*int"):
        unpacked(packed("text"), int, rank=3)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    with pytest.raises(TrainingError):
        unpacked(pickle.dumps(Payload()), dict[str, int])
    assert not (tmp_path / "ran").exists()


def gather(rank: int, world: int) -> tuple[object, ...]:
    return [len(text) for text in all_gather_values("x" * (1000 * rank + 1), str)], gather_values(
        rank, int, dist.group.WORLD
    )


def test_ranks_gather_messages_of_unequal_length() -> None:
    lengths = [1, 1001, 2001]
    assert run_ranks(3, gather) == [(lengths, [0, 1, 2]), (lengths, []), (lengths, [])]
