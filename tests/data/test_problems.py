"""What a user can get wrong when preparing, and what they are told."""

import gzip as gzip_module
import os
import socket
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.data import records
from fivefold.data import records as sources
from fivefold.data.prepare import prepare
from fivefold.support.errors import UserError

Jsonl = Callable[..., Path]


def problems(*inputs: Path, **options: Any) -> list[str]:
    out = inputs[0].parent / "out" if inputs else Path("out")
    with pytest.raises(UserError) as caught:
        prepare(list(inputs), out, **options)
    assert not out.exists()
    return caught.value.problems


def test_everything_wrong_with_a_call_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "essays.txt").write_text("x")
    (tmp_path / "a.jsonl.zst").write_text("x")
    told = problems(
        tmp_path / "esays.txt",
        tmp_path / "nowhere" / "b.txt",
        tmp_path / "a.jsonl.zst",
        tokenizer=tmp_path / "none.json",
        valid=1.5,
        shard_tokens=0,
        prompt_field="text",
        seed=1 << 64,
    )
    assert len(told) == 8
    text = "\n".join(told)
    assert f"did you mean {tmp_path / 'essays.txt'}?" in text
    assert f"neither does the directory {tmp_path / 'nowhere'}" in text
    assert "packed (.zst)" in text
    assert f"no tokenizer file at {tmp_path / 'none.json'}" in text
    assert "valid=1.5" in text
    assert "shard_tokens=0" in text
    assert "both 'text'" in text
    assert "does not fit in 64 bits" in text


def test_no_input_and_empty_input(tmp_path: Path, jsonl: Jsonl) -> None:
    assert problems() == ["no input was given; name at least one file or directory of text"]
    (tmp_path / "empty").mkdir()
    assert "no files in" in problems(tmp_path / "empty")[0]
    assert "every file and record in it is empty" in problems(jsonl({"text": ""}))[0]


def test_every_bad_line_is_named_with_its_reason(jsonl: Jsonl) -> None:
    path = jsonl(
        {"text": "good"},
        b'{"text": "cut of',
        {"txt": "x", "id": 1},
        {"text": None},
        ["text"],
        {"segments": [{"text": "x", "lose": False}]},
        {"text": 5},
        b'{"text": "\xff"}',
    )
    told = problems(path)
    assert [sentence.split(": ")[0] for sentence in told] == [f"{path}:{line}" for line in range(2, 9)]
    assert "not JSON" in told[0]
    assert "no field 'text' among 'txt', 'id'; did you mean 'txt'?" in told[1]
    assert "field 'text' is null; a string is needed" in told[2]
    assert "not a list" in told[3]
    assert "lose" in told[4]
    assert "field 'text' is a number" in told[5]
    assert "not JSON" in told[6]


def test_a_flood_of_bad_lines_is_cut_off(jsonl: Jsonl) -> None:
    told = problems(jsonl(*[b"?"] * 1000))
    assert len(told) == 11
    assert "stopped after 10 problems" in told[-1]


def test_a_record_without_its_prompt_is_a_problem(jsonl: Jsonl) -> None:
    told = problems(jsonl({"prompt": "a", "text": "b"}, {"text": "b"}), prompt_field="prompt")
    assert len(told) == 1
    assert "records.jsonl:2: no field 'prompt' among 'text'" in told[0]


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"x" * (1 << 18) + "é".encode() + b"\xe9!")  # a character across two chunks first
    (tmp_path / "c.txt").write_bytes("é".encode()[:1])
    told = problems(tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt", tokenizer=bpe)
    assert [sentence.split(";")[0] for sentence in told] == [
        f"{tmp_path / 'a.txt'} is not UTF-8: byte 2 is 0xef",
        f"{tmp_path / 'b.txt'} is not UTF-8: byte {(1 << 18) + 2} is 0xe9",
        f"{tmp_path / 'c.txt'} is not UTF-8: byte 0 is 0xc3",
    ]


def test_damaged_gzip_and_parquet_files_are_named(tmp_path: Path, jsonl: Jsonl) -> None:
    pytest.importorskip("pyarrow")
    cut = jsonl({"text": "x" * 1000}, gzip=True)
    cut.write_bytes(cut.read_bytes()[:-10])
    fake = tmp_path / "fake.jsonl.gz"
    fake.write_text("plain")
    parquet = tmp_path / "a.parquet"
    parquet.write_text("plain")
    told = problems(cut, fake, parquet)
    assert [sentence.split()[0] for sentence in told] == [str(cut), str(fake), str(parquet)]


def test_a_missing_parquet_column_and_a_null_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"texts": ["a", None]}), path)
    assert problems(path) == [f"{path}: no field 'text' among 'texts'; did you mean 'texts'?"]
    assert problems(path, text_field="texts") == [f"{path}, row 2: field 'texts' is null; a string is needed"]


def test_missing_libraries_name_the_extra(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("x")
    for library in ("pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, library, None)
    told = "\n".join(problems(tmp_path / "a.parquet", tokenizer=bpe))
    assert 'pip install "fivefold[parquet]"' in told
    assert 'pip install "fivefold[train]"' in told


def test_a_tokenizer_without_a_usual_end_asks_for_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "#stop": 1}, unk_token="x"))
    tokenizer.add_special_tokens(["<|stop|>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("x")
    told = problems(tmp_path / "a.txt", tokenizer=tmp_path / "t.json")
    assert "give one with --eos (its special tokens: <|stop|>)" in told[0]
    told = problems(tmp_path / "a.txt", tokenizer=tmp_path / "t.json", eos="<|stopp|>")
    assert "did you mean '<|stop|>'?" in told[0]
    assert "ids are 0..2" in problems(tmp_path / "a.txt", tokenizer=tmp_path / "t.json", eos=3)[0]
    prepare([tmp_path / "a.txt"], tmp_path / "by-name", tokenizer=tmp_path / "t.json", eos="<|stop|>")
    (tmp_path / "t.json").write_text("{}")
    assert "not a tokenizer file" in problems(tmp_path / "a.txt", tokenizer=tmp_path / "t.json")[0]


def test_holding_out_from_too_few_documents_says_what_would_work(jsonl: Jsonl, tmp_path: Path) -> None:
    path = jsonl(*({"text": str(number)} for number in range(5)))
    (told,) = problems(path, valid=0.001)
    works = float(told.split("; valid=")[1].split()[0])
    assert "several files" in problems(jsonl({"text": "x"}, name="one.jsonl"), valid=0.001)[0]
    assert "leaves none to train on" in problems(path, valid=0.999999)[0]
    assert prepare([path], tmp_path / "out", valid=works).valid_documents == 1


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "in" / "socket"))
        told = problems(tmp_path / "in", Path("/dev/zero"), tmp_path / ("x" * 300))
    assert [sentence.split(": ", 1)[1].split(",")[0] for sentence in told[:3]] == [
        "it is a FIFO",
        "it is a socket",
        "it is a device",
    ]
    assert "too long" in told[3]


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "a.txt")
    monkeypatch.setattr(sources, "irregular", lambda mode: None)
    assert "it is a FIFO" in problems(tmp_path / "a.txt")[0]


def test_a_directory_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "text.txt").write_text("x")
    real = os.scandir

    def scandir(path: Any) -> Any:  # as a directory of another user: the superuser may look into all of them
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert problems(tmp_path / "a") == [f"{tmp_path / 'a' / 'b'} cannot be read: Permission denied"]


@pytest.mark.parametrize("gzip", [False, True])
def test_a_line_that_is_too_long_is_named_and_those_after_it_are_read(
    jsonl: Jsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gzip: bool
) -> None:
    monkeypatch.setattr(records, "LONGEST", 1 << 20)
    long = {"text": "x" * (3 << 20)}
    told = problems(jsonl({"text": "a"}, long, b"?", long, gzip=gzip))
    assert [sentence.split(": ")[0].rsplit(":", 1)[1] for sentence in told] == ["2", "3", "4"]
    assert "a line of more than 1 MiB is not read" in told[0]
    fits = {"text": "x" * ((1 << 20) - 13)}
    assert prepare([jsonl(fits, {"text": "b"})], tmp_path / "out").documents == 2


def test_lines_without_an_end_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST", 8 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip_module.compress(b'{"text": "' + bytes(256 << 20), 1))
    tracemalloc.start()
    try:
        assert "a line of more than 8 MiB" in problems(tmp_path / "bomb.jsonl.gz")[0]
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


def test_deep_nesting_in_a_record_is_a_problem_of_its_line(jsonl: Jsonl) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    told = problems(jsonl({"text": "a"}, b'{"text": "b", "more": ' + deep + b"}", deep))
    assert [sentence.rsplit(":", 1)[1] for sentence in told] == [" its values are nested too deeply"] * 2
