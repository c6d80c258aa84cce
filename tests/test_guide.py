"""Every line that the guide quotes is printed by the command above it; spaces between columns do not count."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.support.errors import UserError

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


def words(line: str) -> str:
    return " ".join(line.split())


def quoted() -> dict[str, list[str]]:
    """By command, the lines below it."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ fivefold "):
                lines = found.setdefault(line.removeprefix("$ fivefold "), [])
            else:
                lines.append(words(line))
    return found


@pytest.mark.parametrize("command", quoted())
def test_the_guide_quotes_what_is_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a line for each row and each sentence
    result = CliRunner().invoke(app, shlex.split(command))
    printed = [words(line) for line in result.output.splitlines()]
    if isinstance(result.exception, UserError):
        printed = [words(f"error: {problem}") for problem in result.exception.problems]
    else:
        assert result.exit_code == 0, result.output
    lines = quoted()[command]
    assert lines
    assert [line for line in lines if line not in printed] == []
