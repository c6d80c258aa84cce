"""What a page quotes: commands and the lines below them, and what the commands print.

    quoted(ROOT / "docs" / "guide.md")  # {"compare zero 7.5e9 --ranks 64": ["0 120 135 15 30 90", ...], ...}

Spaces between columns do not count.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.support.errors import UserError


def words(line: str) -> str:
    return " ".join(line.split())


def quoted(page: Path) -> dict[str, list[str]]:
    """By command, the lines below it."""
    found: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        lines: list[str] = []
        if language:
            continue
        for line in block.splitlines():
            if line.startswith("$ fivefold "):
                lines = found.setdefault(line.removeprefix("$ fivefold "), [])
            else:
                lines.append(words(line))
    return found


def printed(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a command prints in a terminal of this width, its refusals too."""
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, shlex.split(command))
    if isinstance(result.exception, UserError):
        return [words(f"error: {problem}") for problem in result.exception.problems]
    assert result.exit_code in (0, 1), result.output
    return [words(line) for line in result.output.splitlines()]


def large(command: str) -> bool:
    """Searches of 64 GPUs and more take as long as all other commands together; but a fixed layout is quick. The README
    quotes one of them, and tests/test_readme.py runs it."""
    nodes = re.search(r"--cluster (\d+)x8xH100", command)
    return nodes is not None and int(nodes[1]) >= 8 and "--fix" not in command
