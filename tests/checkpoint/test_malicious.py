"""Checkpoints that were made to do harm, with sums and seal that hold: no command runs what is in them, and each says
what is wrong. What would run makes a file, so that it would be seen."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Damaged, Manifest
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import TABLE_FILE
from fivefold.cli import app
from fivefold.support.errors import UserError
from fivefold.support.files import hash_file
from tests.checkpoint.runs import resealed


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    half = [(range(4), range(3)), (range(4, 8), range(3))]
    parts = [{"model.a": Shard.of(torch.full((4, 3), float(n)), (8, 3), box)} for n, box in enumerate(half)]
    parts[0]["model.b"] = Shard.whole(torch.arange(5))
    manifest = Manifest(step=1, samples=0, updates=0, optimizer=False, data="", job={})
    (tmp_path / "checkpoints").mkdir()
    return write_alone(Store(tmp_path / "checkpoints"), parts, manifest)


COMMANDS = {
    "ls": ["checkpoint", "ls", "RUN"],
    "inspect": ["inspect", "RUN"],
    "verify": ["checkpoint", "ls", "--verify", "RUN"],
    "reshard": ["checkpoint", "reshard", "RUN", "--layout", "tp=2", "-o", "OUT"],
    "generate": ["generate", "RUN", "--tokens", "72,101", "-n", "2"],
    "export": ["hf", "export", "RUN", "-o", "OUT"],
    "import": ["hf", "import", "RUN", "-o", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_of_dcp_is_refused_and_its_pickle_is_not_read(fresh: Path, tmp_path: Path, command: str) -> None:
    """Version 1 had a pickled table. What would run makes a directory."""
    mark = tmp_path / "mark"

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    (fresh / ".metadata").write_bytes(pickle.dumps(Payload()))
    files = json.loads((fresh / MANIFEST).read_text())["files"]
    resealed(fresh, version=1, files=[*files, msgspec.to_builtins(hash_file(fresh / ".metadata"))])
    words = [{"RUN": str(tmp_path), "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[command]]
    done = CliRunner().invoke(app, words)
    assert not mark.exists(), "the payload ran"
    told = str(done.exception) if isinstance(done.exception, UserError) else done.stdout
    if command != "import":  # which finds no config.json
        assert "version 1 of the format" in told
        assert "an earlier release reads both" in " ".join(told.split())
    pickle.loads((fresh / ".metadata").read_bytes())
    assert mark.exists(), "the payload is none"


def chunk(table: Any, number: int = 0) -> list[Any]:
    found: list[Any] = table["model.a"]["chunks"][number]
    return found


def put(index: int, value: Any, number: int = 0) -> Callable[[Any], None]:
    """In a chunk: offsets, sizes, file, start, bytes."""

    def change(table: Any) -> None:
        chunk(table, number)[index] = value

    return change


TABLES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another directory": (put(2, "../rank-0.tensors"), r"are not in '\.\./rank-0\.tensors'"),
    "an absolute path": (put(2, "/etc/passwd"), "are not in '/etc/passwd'"),
    "a file that the manifest has not": (put(2, MANIFEST), "are not in 'manifest.json'"),
    "a negative start": (put(3, -8), "bytes -8 to 40 are not in"),
    "a start behind the end": (put(3, 1 << 40), "are not in 'rank-0.tensors'"),
    "a negative length": (put(4, -48), "has -48 bytes, and its numbers take 48"),
    "another length": (put(4, 44), "has 44 bytes, and its numbers take 48"),
    "no box": (put(0, [-1, 0]), "is not a box within the shape"),
    "a box outside": (put(0, [6, 0]), "is not a box within the shape"),
    "too many dimensions": (put(1, [4, 3, 1]), "is not a box within the shape"),
    "absurd sizes": (put(1, [1 << 62, 1 << 62]), "is not a box within the shape"),
    "an absurd shape": (lambda table: table["model.a"].update(shape=[1 << 40, 1 << 40]), "its shape is not valid"),
    "a number without end": (lambda table: table["model.a"].update(shape=[10**400]), "is damaged"),
    "a dtype of its own": (lambda table: table["model.a"].update(dtype="os.system"), "'os.system' is not one of"),
    "the same box twice": (put(0, [0, 0], number=1), "do not have every element once"),
    "a box that is missing": (lambda table: table["model.a"]["chunks"].pop(), "do not have every element once"),
    "the same bytes twice": (lambda table: table["model.b"]["chunks"][0].__setitem__(3, 8), "share bytes of rank-0"),
    "another type": (lambda table: table.update({"model.a": 7}), "Expected `object`"),
}


@pytest.mark.parametrize("how", TABLES)
def test_a_table_that_is_none_is_refused_before_anything_is_read_by_it(fresh: Path, how: str) -> None:
    table = json.loads((fresh / TABLE_FILE).read_text())
    change, said = TABLES[how]
    change(table)
    (fresh / TABLE_FILE).write_text(json.dumps(table))
    resealed(fresh)
    with pytest.raises(Damaged, match=said):
        assert Checkpoint(fresh).tensors
    (problem,) = Checkpoint(fresh).damage()
    assert str(fresh / TABLE_FILE) in problem


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "x\0", "x" * 300, TABLE_FILE])
def test_a_manifest_names_files_of_its_directory_alone(fresh: Path, name: str) -> None:
    files = json.loads((fresh / MANIFEST).read_text())["files"]
    resealed(fresh, files=[*files, {"name": name, "bytes": 1, "sha256": ""}])
    with pytest.raises(Damaged, match=r"not one of its directory|names a file twice"):
        assert Checkpoint(fresh).manifest


@pytest.mark.parametrize("name", [MANIFEST, TABLE_FILE, "rank-1.tensors"])
@pytest.mark.parametrize("what", ["fifo", "directory", "link", "device"])
def test_what_is_no_regular_file_is_damage_and_nobody_waits_for_it(
    fresh: Path, tmp_path: Path, name: str, what: str
) -> None:
    place = fresh / name
    (tmp_path / "away").write_bytes(place.read_bytes())
    place.unlink()
    if what == "fifo":
        os.mkfifo(place)
    elif what == "directory":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "away" if what == "link" else "/dev/zero")
    (one,) = Store(fresh.parent).complete()
    (problem,) = one.misfits()
    assert str(place) in problem
    if name == TABLE_FILE:
        with pytest.raises(Damaged):
            assert one.tensors


def test_numbers_of_a_manifest_that_no_run_has_are_damage(fresh: Path) -> None:
    for change in ({"step": -1}, {"samples": 1 << 80}, {"job": {"model": 3}}, {"files": {}}, {"version": True}):
        resealed(fresh, **change)
        with pytest.raises(Damaged):
            assert Checkpoint(fresh).manifest
        resealed(fresh, step=1, samples=0, job={}, version=2,
                 files=[msgspec.to_builtins(hash_file(path)) for path in sorted(fresh.iterdir())
                        if path.name != MANIFEST])  # fmt: skip
        assert Checkpoint(fresh).manifest.step == 1
