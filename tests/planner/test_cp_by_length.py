"""Whole steps by length and cp: the best of each, and what another attention kernel changes."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.planner.cp_by_length import LengthsResult, cp_by_length
from fivefold.planner.plan import plan
from fivefold.support.errors import UserError


@pytest.fixture(scope="module")
def found() -> LengthsResult:
    return cp_by_length([4096, 65536], "llama3.2-1b", "4xH100", kernels=["flash2", "peak"])


def test_each_length_has_its_best_cp_among_those_that_leave_tokens(found: LengthsResult) -> None:
    assert [(row.seq, row.batch, row.kernel) for row in found.rows] == [
        (4096, 1024, "flash2"), (4096, 1024, "peak"), (65536, 64, "flash2"), (65536, 64, "peak"),
    ]  # fmt: skip
    for row in found.rows:
        assert list(row.by_cp) == [1, 2, 4]
        assert row.best is not None
        assert min(row.slower(cp) or 0.0 for cp in row.by_cp) == 0
        for cp, option in row.by_cp.items():
            assert option is not None
            assert option.layout.cp == cp
            assert option.fits


def test_a_faster_kernel_makes_a_shorter_step(found: LengthsResult) -> None:
    flash2, peak = (row.best for row in found.rows[2:])
    assert flash2 is not None
    assert peak is not None
    assert peak.seconds < 0.8 * flash2.seconds
    assert peak.workload.mfu(peak.seconds, "causal") < 1


def test_without_a_kernel_it_is_what_a_plan_finds() -> None:
    (row,) = cp_by_length([8192], "llama3.2-1b", "2xH100").rows
    assert row.best is not None
    asked = plan("llama3.2-1b", "2xH100", batch=512, seq=8192, top=1)
    assert row.best.seconds == pytest.approx(asked.options[0].seconds)


def test_the_command_and_what_it_refuses() -> None:
    def refusal(line: str) -> str:
        return str(CliRunner().invoke(app, line.split()).exception)

    ran = CliRunner().invoke(
        app, ["compare", "cp", "--lengths", "4096", "--model", "llama3.2-1b", "--cluster", "2xH100", "--json"]
    )
    assert [row["cp"] for row in json.loads(ran.stdout)["lengths"][0]["by_cp"]] == [1, 2]
    assert "describes one layer, but --lengths plans whole steps" in refusal("compare cp --lengths 4096 --cp 2")
    assert "or give --lengths" in refusal("compare cp --seq 4096")
    assert "--kernels needs --lengths" in refusal("compare cp --seq 4096 --cp 2 --kernels peak")
    assert "did you mean 'flash3'" in refusal("compare cp --lengths 4096 --kernels flash4")
    assert "'8k' is not a whole number" in refusal("compare cp --lengths 4096,8k")
    with pytest.raises(UserError, match="give one group"):
        cp_by_length([4096], "llama3.2-1b", "8xH100+8xA100")
