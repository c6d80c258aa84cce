"""What a user can get wrong when preparing, and what they are told."""

import gzip as gzip_module
import json
import os
import re
import socket
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from fivefold.data import documents, text_sources
from fivefold.data.prepare import prepare
from fivefold.support.errors import UserError
from tests.refusals import refusal, same_words

Jsonl = Callable[..., Path]


def refused(*inputs: Path, **options: Any) -> UserError:
    out = inputs[0].parent / "out" if inputs else Path("out")
    error = refusal(lambda: prepare(list(inputs), out, **options))
    assert not out.exists()
    return error


def lines(*values: object) -> bytes:
    return b"\n".join(value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)


class Case(NamedTuple):
    codes: str
    files: dict[str, bytes]
    inputs: tuple[str, ...] = ()  # of these; all files, where none is named
    options: Mapping[str, Any] = MappingProxyType({})


TEXT = {"a.txt": b"x"}
FIVE = {"a.jsonl": lines(*({"text": str(number)} for number in range(5)))}
DEEP = b"[" * 100_000 + b"]" * 100_000
CASES = {
    "everything at once": Case(
        "prepare.valid.range prepare.shard_tokens.range prepare.seed.range prepare.prompt_field.text "
        "prepare.input.missing prepare.input.missing prepare.input.packed prepare.tokenizer.missing",
        {"essays.txt": b"x", "a.jsonl.zst": b"x"},
        ("esays.txt", "nowhere/b.txt", "a.jsonl.zst"),
        {"tokenizer": "none.json", "valid": 1.5, "shard_tokens": 0, "prompt_field": "text", "seed": 1 << 64},
    ),
    "fields": Case(
        "prepare.field.name prepare.field.segments", TEXT, (), {"text_field": 'a"b', "prompt_field": "segments"}
    ),
    "an end of bytes": Case("prepare.eos.bytes", TEXT, (), {"eos": 3}),
    "a packed parquet": Case("prepare.input.packed", {"a.parquet.gz": b"x"}),
    "no tokenizer": Case("prepare.tokenizer.damaged", {**TEXT, "t.json": b"{}"}, ("a.txt",), {"tokenizer": "t.json"}),
    "empty records": Case("prepare.input.empty", {"a.jsonl": lines({"text": ""})}),
    "bad lines": Case(
        "record.syntax record.field record.text record.object record.segments record.text record.syntax",
        {
            "a.jsonl": lines(
                {"text": "good"},
                b'{"text": "cut of',
                {"txt": "x", "id": 1},
                {"text": None},
                ["text"],
                {"segments": [{"text": "x", "lose": False}]},
                {"text": 5},
                b'{"text": "\xff"}',
            )
        },
    ),
    "a flood": Case("record.syntax " * 10 + "problems.more", {"a.jsonl": lines(*[b"?"] * 1000)}),
    "no prompt": Case(
        "record.field", {"a.jsonl": lines({"prompt": "a", "text": "b"}, {"text": "b"})}, (), {"prompt_field": "prompt"}
    ),
    "deep nesting": Case(
        "record.syntax " * 2, {"a.jsonl": lines({"text": "a"}, b'{"text": "b", "more": ' + DEEP + b"}", DEEP)}
    ),
    "no gzip": Case("file.read", {"fake.jsonl.gz": b"plain"}),
    "held out none of one": Case("prepare.valid.none", {"a.jsonl": lines({"text": "x"})}, (), {"valid": 0.001}),
    "held out none of five": Case("prepare.valid.none", FIVE, (), {"valid": 0.001}),
    "held out all": Case("prepare.valid.all", FIVE, (), {"valid": 0.999999}),
}


def of_case(case: Case, folder: Path) -> UserError:
    folder.mkdir(exist_ok=True)
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    options = {**case.options}
    if "tokenizer" in options:
        options["tokenizer"] = folder / options["tokenizer"]
    return refused(*(folder / name for name in case.inputs or case.files), **options)


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    assert of_case(CASES[name], tmp_path).codes == CASES[name].codes.split()


def test_the_words_of_refusals(tmp_path: Path) -> None:
    foreign = re.compile(r"(not JSON: |(?:can|cannot) be read: |\d: Object ).*?(?=;|$)")  # words of libraries
    said = {name: of_case(case, tmp_path / name).problems for name, case in CASES.items()}
    plain = {name: [text.replace(str(tmp_path / name), "DIR") for text in texts] for name, texts in said.items()}
    same_words(__file__, {name: [foreign.sub(r"\1...", text) for text in texts] for name, texts in plain.items()})


def test_no_input_and_empty_input(tmp_path: Path) -> None:
    assert refused().codes == ["prepare.input.missing"]
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").codes == ["prepare.input.empty"]


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"x" * (1 << 18) + "é".encode() + b"\xe9!")  # a character across two chunks first
    (tmp_path / "c.txt").write_bytes("é".encode()[:1])
    error = refused(tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt", tokenizer=bpe)
    assert error.codes == ["prepare.input.utf8"] * 3
    assert [sentence.split(";")[0] for sentence in error.problems] == [
        f"{tmp_path / 'a.txt'} is not UTF-8: byte 2 is 0xef",
        f"{tmp_path / 'b.txt'} is not UTF-8: byte {(1 << 18) + 2} is 0xe9",
        f"{tmp_path / 'c.txt'} is not UTF-8: byte 0 is 0xc3",
    ]


def test_damaged_gzip_and_parquet_files_are_named(tmp_path: Path, jsonl: Jsonl) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    cut = jsonl({"text": "x" * 1000}, gzip=True)
    cut.write_bytes(cut.read_bytes()[:-10])
    (tmp_path / "a.parquet").write_text("plain")
    error = refused(cut, tmp_path / "a.parquet")
    assert error.codes == ["file.read", "prepare.parquet"]
    assert [sentence.split()[0] for sentence in error.problems] == [str(cut), str(tmp_path / "a.parquet")]
    parquet.write_table(pyarrow.table({"texts": ["a", None]}), tmp_path / "b.parquet")
    assert refused(tmp_path / "b.parquet").codes == ["record.field"]
    error = refused(tmp_path / "b.parquet", text_field="texts")
    assert (error.codes, "b.parquet, row 2: " in str(error)) == (["record.text"], True)


def test_missing_libraries_name_the_extra(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("x")
    for library in ("pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, library, None)
    error = refused(tmp_path / "a.parquet", tokenizer=bpe)
    assert error.codes == ["install.pyarrow", "install.tokenizers"]
    assert [sentence.split("pip install ")[1] for sentence in error.problems] == [
        '"fivefold[parquet]"', '"fivefold[train]"'
    ]  # fmt: skip


def test_a_tokenizer_without_a_usual_end_asks_for_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "#stop": 1}, unk_token="x"))
    tokenizer.add_special_tokens(["<|stop|>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("x")
    for eos, code, end in (
        (None, "prepare.eos.missing", "give one with --eos (its special tokens: <|stop|>)"),
        ("<|stopp|>", "prepare.eos.unknown", "did you mean '<|stop|>'?"),
        (3, "prepare.eos.unknown", "ids are 0..2"),
    ):
        error = refused(tmp_path / "a.txt", tokenizer=tmp_path / "t.json", eos=eos)
        assert (error.codes, str(error).endswith(end)) == ([code], True)
    prepare([tmp_path / "a.txt"], tmp_path / "by-name", tokenizer=tmp_path / "t.json", eos="<|stop|>")


def test_holding_out_from_too_few_documents_says_what_would_work(tmp_path: Path) -> None:
    works = float(str(of_case(CASES["held out none of five"], tmp_path)).split("; valid=")[1].split()[0])
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "out", valid=works).valid_documents == 1


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "in" / "socket"))
        error = refused(tmp_path / "in", Path("/dev/zero"), tmp_path / ("x" * 300))
    assert error.codes == ["file.read", "file.read", "file.read", "path.length"]
    kinds = [sentence.split(": ", 1)[1].split(",")[0] for sentence in error.problems[:3]]
    assert kinds == ["it is a FIFO", "it is a socket", "it is a device"]


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "a.txt")
    monkeypatch.setattr(text_sources, "irregular", lambda mode: None)
    assert "it is a FIFO" in str(refused(tmp_path / "a.txt"))


def test_a_directory_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "text.txt").write_text("x")
    real = os.scandir

    def scandir(path: Any) -> Any:  # as a directory of another user: the superuser may look into all of them
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert refused(tmp_path / "a").problems == [f"{tmp_path / 'a' / 'b'} cannot be read: Permission denied"]


@pytest.mark.parametrize("gzip", [False, True])
def test_a_line_that_is_too_long_is_named_and_those_after_it_are_read(
    jsonl: Jsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gzip: bool
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 20)
    long = {"text": "x" * (3 << 20)}
    error = refused(jsonl({"text": "a"}, long, b"?", long, gzip=gzip))
    assert error.codes == ["record.long", "record.syntax", "record.long"]
    assert [sentence.split(": ")[0].rsplit(":", 1)[1] for sentence in error.problems] == ["2", "3", "4"]
    fits = {"text": "x" * ((1 << 20) - 13)}
    assert prepare([jsonl(fits, {"text": "b"})], tmp_path / "out").documents == 2


def test_lines_without_an_end_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 8 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip_module.compress(b'{"text": "' + bytes(256 << 20), 1))
    tracemalloc.start()
    try:
        assert refused(tmp_path / "bomb.jsonl.gz").codes == ["record.long"]
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
