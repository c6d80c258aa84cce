"""tools/keep.py: a transcript says what ran, on what, and how it ended; one that failed replaces none that held.
tools/gloo_race.py: ranks that have done nothing have not lived through the race."""

import sys
from pathlib import Path

from tools.gloo_race import _judged
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


def test_ranks_that_gather_nothing_have_not_lived_through_the_race() -> None:
    assert str(_judged([0, 0], 7, 60.0)) == "all ranks lived; 7 rounds in 60 s"
    assert _judged([0, 0], 0, 60.0).wrong == ["no round was made"]
    assert _judged([0, -11], 0, 1.0) == (0, 1.0, ["rank 1 of SIGSEGV"], [])
    assert _judged([0, None], 0, 60.0).wrong == ["rank 1 hung"]
