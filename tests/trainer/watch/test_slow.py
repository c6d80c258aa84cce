"""A rank that becomes slow is named once, with its place, phase and factor, and once more when it no longer is."""

import re
from pathlib import Path

import pytest

from fivefold.trainer.stragglers import SlowRanks
from tests.commands import fivefold

PHASES = ("data", "forward")


def rows(*ranks: tuple[float, float]) -> list[list[float]]:
    """Seconds of both phases; a step takes 1 s."""
    return [[*one, 1.0] for one in ranks]


def judge(stages: list[int]) -> SlowRanks:
    return SlowRanks(1.5, stages, [f"dp {rank}" for rank in range(len(stages))], PHASES)


def test_it_is_named_when_it_starts_and_when_it_ends() -> None:
    ranks, even = judge([0, 0, 0]), rows((0.0, 0.2), (0.0, 0.2), (0.0, 0.21))
    late = rows((0.0, 0.2), (0.0, 0.5), (0.0, 0.2))
    assert ranks.look(10, even) == []
    assert ranks.look(12, late) + ranks.look(14, even) + ranks.look(18, late) == []  # it may be a moment
    assert ranks.look(20, late) == [
        "step 20: rank 1 (dp 1) is slow in forward, 2.5x the median of ranks 0, 2 (500 ms against 200)"
    ]
    assert ranks.look(30, late) == []
    assert ranks.look(40, rows((0.0, 0.2), (0.0, 0.28), (0.0, 0.2))) == []  # neither slow nor well
    assert ranks.look(50, even) == ["step 50: rank 1 (dp 1) is no longer slow in forward, as it was from step 18 on"]
    assert ranks.look(60, even) == []


def test_of_two_ranks_the_slower_is_the_slow_one() -> None:
    ranks, table = judge([0, 0]), rows((0.1, 0.2), (0.3, 0.2))
    (said,) = ranks.look(5, table) + ranks.look(10, table)
    assert said == "step 10: rank 1 (dp 1) is slow in data, 3.0x the median of rank 0 (300 ms against 100)"
    ranks, table = judge([0] * 8), rows((0.0, 0.5), *[(0.0, 0.1)] * 7)
    (said,) = ranks.look(10, table) + ranks.look(20, table)
    assert "5.0x the median of the 7 other ranks of its stage" in said  # many peers are counted


def test_stages_are_not_compared_and_trifles_not_mentioned() -> None:
    for ranks, table in (
        (judge([0, 0, 1, 1]), rows((0.0, 0.1), (0.0, 0.1), (0.0, 0.4), (0.0, 0.4))),
        (judge([0, 0]), rows((0.001, 0.1), (0.02, 0.1))),  # twenty times 1 ms, of a second
    ):
        assert ranks.look(10, table) + ranks.look(20, table) == []


def test_a_rank_without_peers_is_held_against_itself() -> None:
    ranks, usual, late = judge([0, 1]), rows((0.0, 0.3), (0.0, 0.1)), rows((0.0, 0.3), (0.0, 0.4))
    assert ranks.look(10, usual) + ranks.look(20, usual) + ranks.look(30, usual) == []
    assert ranks.look(35, late) + ranks.look(40, late) == [
        "step 40: rank 1 (dp 1) is slow in forward, 4.0x what it took before (400 ms against 100)"
    ]
    assert ranks.look(50, late) == []  # and what is slow does not become usual
    assert len(ranks.look(60, usual)) == 1


@pytest.mark.parametrize("layout", ["dp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_a_rank_that_becomes_slow_in_mid_run_is_named(tmp_path: Path, layout: str) -> None:
    """By what it does itself: its peer's steps are just as long."""
    words = ["train.steps=24", "watch.slow_every=4", "watch.slow=4", "train.eval_samples=0", "checkpoint.save=false"]
    small = ["model.layers=1", "model.hidden=32", "model.ffn=32", "data.seq=16", "train.batch=2"]  # beside 250 ms
    small += ["train.device=cpu"]  # of a GPU's kernels the host sees no time
    fault = {"FIVEFOLD_FAULT": "slow@rank=1,step=8,until=20,at=forward"}
    done = fivefold("train", f"layout={layout}", *words, *small, "--nproc", "2", cwd=tmp_path, env=fault)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if " slow in forward" in line]
    place = rf"rank 1 \({layout.partition('=')[0]} 1\)"
    assert re.match(rf"note  step (16|20): {place} is slow in forward, [\d.]+x the median of rank 0", notes[0])
    assert all(re.match(rf"note  step 24: {place} is no longer slow in forward", note) for note in notes[1:])
    assert re.search(r"watchers  [\d.]+% of the steps' time: .*slow ranks [\d.]+%.*spikes [\d.]+%", done.stdout)
