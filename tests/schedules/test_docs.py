"""The page on schedules: its commands run, its example is a schedule, and the tests it names are there."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.schedules.registry import build
from fivefold.schedules.text import read_text

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
COMMANDS = sorted(set(re.findall(r"fivefold ((?:draw|compare schedules) [^`\n]*--[^`\n]*)", PAGE)))


def test_there_are_commands_on_the_page() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_example_on_the_page_is_what_the_command_writes() -> None:
    (example,) = re.findall(r"```\n(schedule 1f1b\n.*?)```", PAGE, re.DOTALL)
    assert read_text(example).schedule == build("1f1b", 2, 2)


def test_every_file_that_is_named_as_a_proof_exists() -> None:
    named = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert named
    assert all((Path(__file__).parent / name).is_file() for name in named)
