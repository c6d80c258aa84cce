"""Text becomes tokens: every kind of input, document boundaries, held-out documents, shards, atomic directories."""

import gzip as gzip_module
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fivefold.data import documents as pieces
from fivefold.data.prepare import prepare
from fivefold.data.tokens import Split, TokenStore
from fivefold.support.progress import bar

Jsonl = Callable[..., Path]


def split_of(path: Path, name: str = "train") -> Split:
    return TokenStore.open(path).split(name)


def texts(split: Split) -> list[bytes]:
    """The documents of a split of bytes, by its document ids alone."""
    window = split.read(0, split.tokens)
    found = []
    for document in range(split.documents):
        ids = window.tokens[window.documents == document]
        assert ids[-1] == 256
        assert (ids[:-1] < 256).all()
        found.append(bytes(ids[:-1].tolist()))
    return found


def bits(mask: np.ndarray) -> str:
    return "".join(map(str, mask.astype(int)))


def test_a_text_file_is_a_document_and_directories_are_walked_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "z.md").write_bytes(b"last\r\n")
    (folder / "a.txt").write_bytes(b"first\xff\x00")  # bytes mode takes any bytes
    (folder / "b" / "code.py").write_bytes(b"x = 1\n")
    (folder / ".git" / "config").write_bytes(b"hidden")
    (folder / "empty.txt").write_bytes(b"")
    summary = prepare([folder], tmp_path / "out")
    assert texts(split_of(tmp_path / "out")) == [b"first\xff\x00", b"last\r\n", b"x = 1\n"]
    assert (summary.documents, summary.tokens, summary.empty_documents) == (3, 22, 1)
    assert summary.bytes_read == 19
    assert summary.tokens_per_second > 0


@pytest.mark.parametrize("gzip", [False, True])
def test_a_jsonl_record_is_a_document(tmp_path: Path, jsonl: Jsonl, gzip: bool) -> None:
    path = jsonl({"text": "één"}, b"", {"id": 1, "text": "two\n"}, {"text": ""}, gzip=gzip)
    assert prepare([path], tmp_path / "out").empty_documents == 1
    assert texts(split_of(tmp_path / "out")) == ["één".encode(), b"two\n"]


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {number}" for number in range(1000)]
    table = pyarrow.table({"content": rows, "other": range(1000)})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=300)
    reports: list[tuple[int, int]] = []
    summary = prepare(
        [tmp_path / "in.parquet"], tmp_path / "out", text_field="content", progress=lambda *now: reports.append(now)
    )
    assert [text.decode() for text in texts(split_of(tmp_path / "out"))] == rows
    size = (tmp_path / "in.parquet").stat().st_size
    assert reports[-1] == (size, size)
    assert summary.bytes_read == size
    segments = [[{"text": "ask", "loss": False}, {"text": "ok", "loss": True}]]
    parquet.write_table(pyarrow.table({"segments": segments}), tmp_path / "in.parquet")
    prepare([tmp_path / "in.parquet"], tmp_path / "segments")
    assert bits(split_of(tmp_path / "segments").read(0, 6).loss) == "000111"


def test_text_may_be_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip_module.compress(b"unpacked"))
    prepare([tmp_path / "a.txt.gz"], tmp_path / "out")
    assert texts(split_of(tmp_path / "out")) == [b"unpacked"]


def test_the_bar_takes_reports(tmp_path: Path, jsonl: Jsonl, capfd: pytest.CaptureFixture[str]) -> None:
    with bar("preparing") as report:
        prepare([jsonl({"text": "x"})], tmp_path / "out", progress=report)
    out, err = capfd.readouterr()
    assert "preparing" in err
    assert out == ""


def test_a_tokenizer_file_gives_its_own_ids_and_travels_along(tmp_path: Path, bpe: Path, jsonl: Jsonl) -> None:
    import tokenizers

    documents = ["def f(x):\n    return x\n", "été 東京 🎈", "a" * 5000]
    path = jsonl(*({"text": text} for text in documents))
    tokenizer = tokenizers.Tokenizer.from_file(str(bpe))
    # Settings of another use, saved in the file: they would cut and fill up every document.
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prepare([path], tmp_path / "out", tokenizer=tmp_path)  # a directory with a tokenizer.json will do
    store = TokenStore.open(tmp_path / "out")
    end = tokenizer.token_to_id("<|endoftext|>")
    assert (store.vocab, store.dtype, store.index.end_of_document) == (600, np.dtype("<u2"), end)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    expected = [id for text in documents for id in [*tokenizer.encode(text).ids, end]]
    split = store.split("train")
    assert split.read(0, split.tokens).tokens.tolist() == expected
    copy = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert copy.decode(expected, skip_special_tokens=True) == "".join(documents)


def test_a_vocabulary_above_65536_is_stored_in_32_bits(tmp_path: Path, jsonl: Jsonl) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    prepare([jsonl({"text": "w69999 w7"})], tmp_path / "out", tokenizer=tmp_path / "words.json")
    store = TokenStore.open(tmp_path / "out")
    assert store.dtype == np.dtype("<u4")
    assert store.split("train").read(0, 3).tokens.tolist() == [69_999, 7, 70_000]


def test_long_documents_are_cut_where_the_tokenizer_does_not_notice(tmp_path: Path, bpe: Path) -> None:
    import tokenizers

    line = "for name in names:  # é\n    print(name)\nx = 1\n\n"
    text = line * (5 * pieces.PIECE_SIZE // len(line) // 2)
    (tmp_path / "long.txt").write_text(text)
    summary = prepare([tmp_path / "long.txt"], tmp_path / "out", tokenizer=bpe)
    assert summary.documents == 1
    expected = tokenizers.Tokenizer.from_file(str(bpe)).encode(text).ids
    split = split_of(tmp_path / "out")
    assert split.read(0, split.tokens - 1).tokens.tolist() == expected


def test_pieces_join_to_the_text_whatever_its_line_ends() -> None:
    for line in ("x" * 70, "\n", "a \n ", "é" * 1000 + "\n", "a\n"):
        text = line * (3 * pieces.PIECE_SIZE // len(line))
        parts = list(pieces.in_pieces([text[:1000], text[1000:]]))
        assert "".join(parts) == text
        assert len(parts) >= 3
        assert max(map(len, parts)) <= pieces.PIECE_SIZE


def test_segments_and_prompts_mask_the_loss(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl(
        {"text": "plain"},
        {"segments": [{"text": "ask", "loss": False}, {"text": "ok"}, {"text": "?", "loss": False}]},
        {"text": "end"},
    )
    prepare([path], tmp_path / "segments")
    window = split_of(tmp_path / "segments").read(0, 17)
    # The end of the second document follows a segment without loss, and has none itself.
    assert bits(window.loss) == "111111" + "000" + "11" + "00" + "1111"
    assert np.bincount(window.documents).tolist() == [6, 7, 4]

    path = jsonl({"question": "2+2?", "text": "4"}, {"question": "", "text": "yes"}, {"question": "no", "text": ""})
    prepare([path], tmp_path / "prompts", prompt_field="question")
    split = split_of(tmp_path / "prompts")
    assert texts(split) == [b"2+2?4", b"yes", b"no"]
    assert bits(split.read(0, 13).loss) == "000011" + "1111" + "001"


def test_a_mask_begun_late_covers_what_came_before(tmp_path: Path, jsonl: Jsonl) -> None:
    early = jsonl(*({"text": "x" * 999} for _ in range(9000)), name="a.jsonl")  # more than one batch
    late = jsonl({"segments": [{"text": "no", "loss": False}, {"text": "yes"}]}, name="b.jsonl")
    prepare([early, late], tmp_path / "out")
    window = split_of(tmp_path / "out").read(0, 9_000_006)
    assert np.flatnonzero(~window.loss).tolist() == [9_000_000, 9_000_001]


def test_no_mask_is_written_when_every_token_carries_loss(tmp_path: Path, jsonl: Jsonl) -> None:
    prepare([jsonl({"segments": [{"text": "all"}]})], tmp_path / "out")
    assert sorted(file.suffix for file in (tmp_path / "out").iterdir()) == [".documents", ".json", ".tokens"]


def test_held_out_documents_are_a_pure_function_of_seed_and_ordinal(tmp_path: Path, jsonl: Jsonl) -> None:
    records = [{"text": f"document {number}"} for number in range(2000)]
    whole = jsonl(*records)
    halves = [jsonl(*records[:777], name="a.jsonl"), jsonl(*records[777:], name="b.jsonl", gzip=True)]
    summary = prepare([whole], tmp_path / "whole", valid=0.1, seed=3)
    prepare(halves, tmp_path / "halves", valid=0.1, seed=3, shard_tokens=500)
    prepare([whole], tmp_path / "other", valid=0.1, seed=4)
    train, valid = (texts(split_of(tmp_path / "whole", name)) for name in ("train", "valid"))
    assert sorted(train + valid) == sorted(record["text"].encode() for record in records)
    assert (len(train), len(valid)) == (summary.documents - summary.valid_documents, summary.valid_documents)
    assert 150 < len(valid) < 250
    assert texts(split_of(tmp_path / "halves", "valid")) == valid
    assert texts(split_of(tmp_path / "other", "valid")) != valid
    # A larger fraction holds out the same documents and more.
    prepare([whole], tmp_path / "more", valid=0.2, seed=3)
    assert set(valid) < set(texts(split_of(tmp_path / "more", "valid")))


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl({"text": "once"}, {"text": "again"})
    for name in ("a", "b"):
        prepare([path], tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_shards_end_with_documents(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl(*({"text": "x" * length} for length in (3, 3, 30, 2, 2, 2, 9)))
    prepare([path], tmp_path / "out", shard_tokens=8)
    shards = TokenStore.open(tmp_path / "out").index.splits["train"]
    assert [(shard.documents, shard.tokens) for shard in shards] == [(2, 8), (1, 31), (3, 9), (1, 10)]


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"0123456789abcdef" * (6 << 20))
    tracemalloc.start()
    try:
        prepare([tmp_path / "big.txt"], tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20  # of 96 MiB of text and 192 MiB of tokens
    assert split_of(tmp_path / "out").documents == 1  # although many batches made it


def test_prepared_tokens_beside_the_text_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    first = prepare([tmp_path], tmp_path / "tokens")
    again = prepare([tmp_path], tmp_path / "other")
    assert (first.documents, again.documents) == (1, 1)
