"""Bars for people who wait: on a terminal, and not where silence was asked for."""

import io
import sys

import pytest

from fivefold.support.progress import is_shown, late_bar, silence


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch) -> str:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with late_bar("hashing", after=-1.0) as report:
        report(1, 2)
        report(2, 2)
    return screen.getvalue()


def test_a_bar_comes_late_and_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert "hashing" in drawn(monkeypatch)


def test_silence_ends_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with silence():
        assert not is_shown()
        assert drawn(monkeypatch) == ""
    assert is_shown()
