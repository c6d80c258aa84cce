"""The index of prepared tokens: opened and read, or refused in sentences. Half of the damaged ones are sealed again."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.data.index import INDEX_FILE, DataIndex
from fivefold.data.tokens import TokenStore
from tests.fuzz.cases import changed, documents, fuzz, survives


@pytest.fixture(scope="module")
def folder(tokens: Path, tmp_path_factory) -> Path:
    return Path(shutil.copytree(tokens, tmp_path_factory.mktemp("index") / "tokens"))


def judge(folder: Path, content: bytes) -> None:
    (folder / INDEX_FILE).write_bytes(content)

    def question() -> None:
        store = TokenStore.open(folder)
        split = store.split("train")
        split.read(0, min(64, split.tokens))

    survives(question)


def test_an_index(folder: Path, tokens: Path) -> None:
    table = json.loads((tokens / INDEX_FILE).read_bytes())

    @fuzz
    @given(st.one_of(documents(table), changed(table).map(sealed)))
    def cases(content: bytes) -> None:
        judge(folder, content)

    cases()


def sealed(table: Any) -> bytes:
    """With the seal of what it says, where it says what an index says."""
    try:
        return msgspec.json.encode(msgspec.convert(table, DataIndex).sealed())
    except (msgspec.MsgspecError, ValueError):
        return json.dumps(table).encode()
