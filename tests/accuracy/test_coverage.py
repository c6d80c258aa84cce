"""`fivefold accuracy --coverage`: one's own runs against plans' ranges, and what was said when sources were new."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.accuracy.cases import DATA, read_rows
from fivefold.accuracy.coverage import coverage, first_sight, h200_steps, own_memory, own_times
from fivefold.cli import app
from fivefold.planner.error_range import COVERAGE, bands
from fivefold.support.errors import UserError


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Runs that are in the package: here they stand for a user's."""
    for name in ("nemo_performance_pages", "torchtitan"):
        shutil.copy(DATA / f"{name}.csv", tmp_path)
    return tmp_path


def test_one_s_own_runs_are_held_against_the_ranges_of_plans(mine: Path) -> None:
    found = coverage(mine)
    assert found.own_runs
    assert found.bands == bands()
    rows = {"nemo_performance_pages": 7, "nemo_performance_pages, experts": 2, "torchtitan": 21}
    assert {one.source: one.rows for one in found.time} == rows
    assert [one.rows for one in found.memory] == [15]
    assert all(one.inside + one.below + one.above == pytest.approx(1) for one in found.time)
    shown = json.loads(json.dumps(found.to_dict()))
    assert shown["share"] == COVERAGE
    assert shown["mean"] == found.mean
    assert "that plans print" in str(found)
    with pytest.raises(UserError, match="remove --data"):
        found.write()


def test_what_does_not_go_with_coverage_is_refused(mine: Path) -> None:
    ran = CliRunner().invoke(app, ["accuracy", "--coverage", "--fit"])
    assert isinstance(ran.exception, UserError)
    assert "remove --fit" in str(ran.exception)
    ran = CliRunner().invoke(app, ["accuracy", "--write"])
    assert "--fit or --coverage" in str(ran.exception)


def test_first_sight_is_of_rows_that_there_are() -> None:
    rows = {(row.file, row.line): row for row in read_rows()}
    first = first_sight()
    assert len({source for source, _ in first}) >= 4
    for key, then in first.items():
        assert rows[key].status == "ok"
        assert float(then["seconds"]) > 0
        assert then["device"] in ("known", "guess")


def test_this_code_s_own_steps_count_as_sources() -> None:
    times = list(own_times())
    assert len({one.source for one in times}) == 3
    assert all(abs(one.error) < 0.6 for one in times)
    assert {one.traits["system"] for one in times} == {"calibrated", "CPUs"}
    assert len(list(own_memory())) == len(h200_steps()) >= 20


def test_without_the_repository_there_are_none(tmp_path: Path) -> None:
    assert list(own_times(tmp_path)) == list(own_memory(tmp_path)) == []
