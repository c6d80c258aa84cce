"""Shared by the data tests: a small BPE tokenizer, trained on a few sources of the standard library."""

import argparse
import ast
import gzip as gzip_module
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = [Path(module.__file__).read_text() for module in (argparse, ast, textwrap)]
    tokenizer.train_from_iterator(sources, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write records (or raw lines, given as bytes) as a JSONL file."""

    def write(*records: Any, name: str = "records.jsonl", gzip: bool = False) -> Path:
        lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
        path = tmp_path / (name + ".gz" if gzip else name)
        data = b"\n".join(lines) + b"\n"
        path.write_bytes(gzip_module.compress(data) if gzip else data)
        return path

    return write
