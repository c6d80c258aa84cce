"""A checkpoint's manifest and its table of tensors: read, or refused in sentences. Many are sealed again."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.find import job_of
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
from fivefold.checkpoint.tensors import TABLE_FILE
from fivefold.job.reading import job_from, read_job
from fivefold.support.files import File
from tests.fuzz.cases import changed, damaged, documents, fuzz, survives

NUMBERS = bytes(64)
TENSORS = {
    "model.norm.weight": {"shape": [8], "dtype": "float32", "chunks": [[[0], [4], "rank-0.tensors", 0, 16],
                                                                      [[4], [4], "rank-0.tensors", 16, 16]]},
    "model.head.weight": {"shape": [2, 4], "dtype": "float32", "chunks": [[[0, 0], [2, 4], "rank-0.tensors", 32, 32]]},
}  # fmt: skip


def manifest(tensors: bytes) -> dict[str, Any]:
    held = {TABLE_FILE: tensors, "rank-0.tensors": NUMBERS}
    files = [File(name, len(content), sha256(content).hexdigest()) for name, content in held.items()]
    job = msgspec.to_builtins(read_job())
    one = Manifest(step=2, samples=32, updates=2, optimizer=True, data="", job=job, files=files)
    return msgspec.to_builtins(one.sealed())


def sealed(table: Any) -> bytes:
    """With the seal of what it says, so that more than the seal is looked at."""
    if not isinstance(table, dict):
        return json.dumps(table).encode()
    try:
        seal = sha256(msgspec.json.encode(table | {"seal": ""})).hexdigest()
        return msgspec.json.encode(table | {"seal": seal})
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return json.dumps(table).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    (path / "rank-0.tensors").write_bytes(NUMBERS)
    return path


def judge(folder: Path, said: bytes, tensors: bytes) -> None:
    (folder / MANIFEST).write_bytes(said)
    (folder / TABLE_FILE).write_bytes(tensors)

    for ask in (lambda one: one.misfits(), lambda one: one.damage(), lambda one: one.tensors, job_of):
        survives(lambda ask=ask: ask(Checkpoint(folder)))


WHOLE = json.dumps(TENSORS).encode()
SAID = manifest(WHOLE)


def test_the_undamaged_one_is_read(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(json.dumps(SAID).encode())
    (folder / TABLE_FILE).write_bytes(WHOLE)
    one = Checkpoint(folder)
    assert not one.damage()
    assert set(one.tensors) == set(TENSORS)
    assert job_from(one.manifest.job) == read_job()


@fuzz
@given(st.one_of(documents(SAID), changed(SAID).map(sealed), damaged(json.dumps(SAID).encode())))
def test_manifests(folder: Path, said: bytes) -> None:
    judge(folder, said, WHOLE)


@fuzz
@given(documents(TENSORS))
def test_tables_of_tensors(folder: Path, tensors: bytes) -> None:
    judge(folder, json.dumps(manifest(tensors)).encode(), tensors)
