"""tools/keep.py: a transcript says what ran, on what, and how it ended; one that failed replaces none that held."""

import sys
from pathlib import Path

from tools.keep import keep


def test_a_transcript_says_what_ran_and_what_it_printed(tmp_path: Path, capfd) -> None:
    command = [sys.executable, "-c", "import sys; print('seen'); print('told', file=sys.stderr)"]
    assert keep("two", command, tmp_path) == 0
    text = (tmp_path / "two.txt").read_text()
    for part in ("command: ", "import sys; print", "date: 20", "commit: ", "cores", "\nseen\n", "\ntold\n"):
        assert part in text
    assert "\nexit code 0 after " in text
    assert "seen" in capfd.readouterr().out


def test_a_failure_does_not_replace_what_held(tmp_path: Path) -> None:
    assert keep("one", [sys.executable, "-c", "print('fine')"], tmp_path) == 0
    assert keep("one", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path) == 3
    assert "fine" in (tmp_path / "one.txt").read_text()
    assert "exit code 3" in (tmp_path / "one.failed.txt").read_text()
