"""Texts from outside: whatever is wrong with one is a sentence."""

import os
from pathlib import Path

import pytest

from fivefold.support.errors import MAX_PROBLEMS, MAX_SENTENCE, UserError
from fivefold.support.parsing import Missing, path_of, read_json, read_toml
from tests.refusals import refusal

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
    error = refusal(lambda: READERS[path.suffix[1:]](path))
    assert error.codes == ["file.syntax"]
    assert str(error).startswith(f"{path} cannot be read as {path.suffix[1:].upper()}: {reason}")


def test_what_cannot_be_opened_is_a_sentence_and_an_endless_file_is_not_read_to_its_end(tmp_path) -> None:
    assert isinstance(refusal(lambda: read_toml(tmp_path / "none")), Missing)
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for a writer
    for path in (tmp_path / "none", tmp_path / "large", tmp_path, Path("/dev/zero"), tmp_path / "pipe"):
        error = refusal(lambda path=path: read_toml(path))
        assert (error.codes, str(error).startswith(f"cannot read {path}: ")) == (["file.read"], True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("~nouser/x", "path.home"), ("~\ud800", "path.home"), ("~\0", "path.characters"),
        ("a\0b", "path.characters"), ("a\ud800", "path.characters"), ("a" * 256, "path.length"),
        ("é" * 128, "path.length"), ("a/" * 2048 + "a", "path.length"),
    ],
)  # fmt: skip
def test_a_path_that_no_file_can_have_is_refused(text: str, code: str) -> None:
    assert refusal(lambda: path_of(text)).codes == [code]


def test_a_path_that_a_file_can_have_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path_of("~/a b") == Path("/home/me/a b")
    assert path_of("é" * 127) == Path("é" * 127)


def test_a_flood_of_problems_is_cut_once() -> None:
    flood = UserError("x" * (MAX_SENTENCE + n) for n in range(1000))
    assert len(flood.problems) == MAX_PROBLEMS + 1
    assert flood.problems[-1] == "and 980 more problems"
    assert max(map(len, flood.problems)) < MAX_SENTENCE + 10
    assert UserError(flood.problems).problems == flood.problems
