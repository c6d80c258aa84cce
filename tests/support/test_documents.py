"""Texts from outside: whatever is wrong with one is a sentence."""

import os
from pathlib import Path

import pytest

from fivefold.support.errors import LONGEST, MOST, UserError
from fivefold.support.parsing import Missing, path_of, read_json, read_toml

READERS = {"toml": read_toml, "json": read_json}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", b"x = " + b"[" * 100_000, "it is nested too deeply"),
        ("a.json", b"[" * 100_000, "it is nested too deeply"),
        ("a.json", b'{"a":' * 100 + b"1" + b"}" * 100, "it is nested more than 64 deep"),
        ("a.toml", b"a" + b".a" * 100 + b"=1", "it is nested more than 64 deep"),
        ("a.toml", b"\na" + b".a" * 400_000 + b"=1", "line 2 has 400,000 dots, and at most 1,000 are read"),
        ("a.toml", b"[a" + b".a" * 400_000 + b"]", "line 1 has 400,000 dots, and at most 1,000 are read"),
        ("a.toml", b"x = " + b"9" * 5000, "a number in it has thousands of digits"),
        ("a.json", b"[" + b"9" * 5000 + b"]", "a number in it has thousands of digits"),
        ("a.toml", b"x = 0x" + b"f" * 5000, "a number in it has more than 64 bits"),
        ("a.json", b'{"a": "\xff"}', "byte 7 is not of a text in UTF-8"),
        ("a.toml", b"x = 1\n# \xff", "byte 8 is not of a text in UTF-8"),
        ("a.toml", b"x = ", "Invalid value"),
        ("a.json", b"", "Expecting value"),
    ],
)
def test_what_cannot_be_parsed_is_a_sentence_with_the_file(tmp_path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} cannot be read as (TOML|JSON): {reason}"):
        READERS[path.suffix[1:]](path)


def test_what_cannot_be_opened_is_a_sentence_and_an_endless_file_is_not_read_to_its_end(tmp_path) -> None:
    with pytest.raises(Missing, match=r"cannot read .*none: No such file"):
        read_toml(tmp_path / "none")
    large = tmp_path / "large"
    large.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(UserError, match=r"large: it has .*, and at most 1\.00 MiB are read"):
        read_toml(large)
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for a writer
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(UserError, match=f"cannot read {path}: it is "):
            read_toml(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("~nouser/x", "names the home of a user, ~nouser, who is not known here"),
        ("a\0b", "a character of code 0"),
        ("a\ud800", "cannot write its characters"),
        ("a" * 256, "too long"),
        ("é" * 128, "too long"),
        ("a/" * 2048 + "a", "too long"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        path_of(text)


def test_a_path_that_a_file_can_have_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path_of("~/a b") == Path("/home/me/a b")
    assert path_of("é" * 127) == Path("é" * 127)


def test_a_flood_of_problems_is_cut_once() -> None:
    flood = UserError("x" * (LONGEST + n) for n in range(1000))
    assert len(flood.problems) == MOST + 1
    assert flood.problems[-1] == "and 980 more problems"
    assert max(map(len, flood.problems)) < LONGEST + 10
    assert UserError(flood.problems).problems == flood.problems
