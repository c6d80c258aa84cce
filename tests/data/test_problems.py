"""What a user can get wrong when preparing, and what they are told."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
