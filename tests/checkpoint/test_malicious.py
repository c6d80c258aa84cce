"""Checkpoints that were made to do harm, with sums and seal that hold: no command runs what is in them, and each says
what is wrong. What would run makes a file, so that it would be seen."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from typer.testing import CliRunner

from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import MANIFEST, Checkpoint, Damaged, Manifest, Store
from fivefold.checkpoint.tensors import TABLE
from fivefold.cli import app
from fivefold.support.errors import UserError
from fivefold.support.files import hashed
from tests.checkpoint.old import MODEL, unpack
from tests.checkpoint.runs import Run, resealed, small_job


class Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def whole_metadata(path: Path, mark: Path) -> None:
    (path / ".metadata").write_bytes(_pickled(mark))


def inside_metadata(path: Path, mark: Path) -> None:
    """Where DCP's own reader, and one that looks only at what it needs, would not notice it."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Payload(mark)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def entry_of_bytes(path: Path, mark: Path) -> None:
    """An object among the tensors, which DCP unpickles with torch.load."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    in_shard(path, mark)


def in_shard(path: Path, mark: Path) -> None:
    """Every archive of every shard lists the payload in place of its tensor; nothing else moves."""
    for info in pickle.loads((path / ".metadata").read_bytes()).storage_data.values():
        with (path / info.relative_path).open("r+b") as shard:
            shard.seek(info.offset)
            archive = _with_payload(shard.read(info.length), mark)
            shard.seek(info.offset)
            shard.write(archive)


def _with_payload(archive: bytes, mark: Path) -> bytes:
    """Of the same length: a comment at the end takes the place of what is left out."""
    old, box = zipfile.ZipFile(io.BytesIO(archive)), io.BytesIO()
    with zipfile.ZipFile(box, "w") as new:
        for name in ("data.pkl", "data/0", "version", "byteorder"):
            new.writestr(f"archive/{name}", old.read(f"archive/{name}") if name != "data.pkl" else _pickled(mark))
    left = len(archive) - len(box.getvalue())
    with zipfile.ZipFile(box, "a") as new:
        new.comment = b" " * left
    return box.getvalue()


def _pickled(mark: Path) -> bytes:
    return pickle.dumps(Payload(mark))


HARM: dict[str, Callable[[Path, Path], None]] = {
    "metadata": whole_metadata, "planner": inside_metadata, "bytes": entry_of_bytes, "shard": in_shard
}  # fmt: skip


@pytest.fixture(params=HARM)
def evil(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A run, and the file that its checkpoint would make."""
    run, mark = unpack(tmp_path / "evil"), tmp_path / "mark"
    path = run / "checkpoints" / "step-00000002"
    HARM[request.param](path, mark)
    resealed(path)
    return run, mark


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
def test_no_command_runs_what_is_in_a_checkpoint(evil: tuple[Path, Path], tmp_path: Path, command: str) -> None:
    run, mark = evil
    words = [{"RUN": str(run), "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[command]]
    done = CliRunner().invoke(app, words)
    assert not mark.exists(), "the payload ran"
    if command == "verify":
        assert done.exit_code == 1
        assert "damaged" in done.stdout
        assert "sound" not in done.stdout
    elif command == "inspect":  # which reads the table, and no numbers
        assert done.exception is None or isinstance(done.exception, UserError), done.output
    elif command != "ls":  # which looks at sizes
        assert isinstance(done.exception, UserError), done.output


def test_a_run_does_not_resume_from_it(evil: tuple[Path, Path], tokens: Path) -> None:
    run, mark = evil
    story = Run(small_job(tokens, *MODEL), 1, run / "checkpoints")
    with pytest.raises(UserError, match=r"none of the 1 checkpoints in .* is good"):
        story.keeper.restore()
    assert not mark.exists(), "the payload ran"
    assert any("is damaged" in said for said in story.said)


def test_the_payload_is_one(tmp_path: Path) -> None:
    """The tests above could not fail otherwise."""
    for harm in ("metadata", "planner"):
        path = unpack(tmp_path / f"with-{harm}") / "checkpoints" / "step-00000002"
        HARM[harm](path, tmp_path / harm)
        pickle.loads((path / ".metadata").read_bytes())
        assert (tmp_path / harm).is_dir()


# ---- the present format --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    half = [(range(4), range(3)), (range(4, 8), range(3))]
    parts = [{"model.a": Shard.of(torch.full((4, 3), float(n)), (8, 3), box)} for n, box in enumerate(half)]
    parts[0]["model.b"] = Shard.whole(torch.arange(5))
    manifest = Manifest(step=1, samples=0, updates=0, optimizer=False, data="", job={})
    (tmp_path / "checkpoints").mkdir()
    return write_alone(Store(tmp_path / "checkpoints"), parts, manifest)


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
    "no box": (put(0, [-1, 0]), "is no box of the shape"),
    "a box outside": (put(0, [6, 0]), "is no box of the shape"),
    "too many dimensions": (put(1, [4, 3, 1]), "is no box of the shape"),
    "absurd sizes": (put(1, [1 << 62, 1 << 62]), "is no box of the shape"),
    "an absurd shape": (lambda table: table["model.a"].update(shape=[1 << 40, 1 << 40]), "its shape is none"),
    "a number without end": (lambda table: table["model.a"].update(shape=[10**400]), "is damaged"),
    "a dtype of its own": (lambda table: table["model.a"].update(dtype="os.system"), "'os.system' is none of"),
    "the same box twice": (put(0, [0, 0], number=1), "do not have every element once"),
    "a box that is missing": (lambda table: table["model.a"]["chunks"].pop(), "do not have every element once"),
    "the same bytes twice": (lambda table: table["model.b"]["chunks"][0].__setitem__(3, 8), "share bytes of rank-0"),
    "another type": (lambda table: table.update({"model.a": 7}), "Expected `object`"),
}


@pytest.mark.parametrize("how", TABLES)
def test_a_table_that_is_none_is_refused_before_anything_is_read_by_it(fresh: Path, how: str) -> None:
    table = json.loads((fresh / TABLE).read_text())
    change, said = TABLES[how]
    change(table)
    (fresh / TABLE).write_text(json.dumps(table))
    resealed(fresh)
    with pytest.raises(Damaged, match=said):
        assert Checkpoint(fresh).tensors
    (problem,) = Checkpoint(fresh).damage()
    assert str(fresh / TABLE) in problem


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "x\0", "x" * 300, TABLE])
def test_a_manifest_names_files_of_its_directory_alone(fresh: Path, name: str) -> None:
    files = json.loads((fresh / MANIFEST).read_text())["files"]
    resealed(fresh, files=[*files, {"name": name, "bytes": 1, "sha256": ""}])
    with pytest.raises(Damaged, match=r"not one of its directory|names a file twice"):
        assert Checkpoint(fresh).manifest


@pytest.mark.parametrize("name", [MANIFEST, TABLE, "rank-1.tensors"])
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
    if name == TABLE:
        with pytest.raises(Damaged):
            assert one.tensors


def test_numbers_of_a_manifest_that_no_run_has_are_damage(fresh: Path) -> None:
    for change in ({"step": -1}, {"samples": 1 << 80}, {"job": {"model": 3}}, {"files": {}}, {"version": True}):
        resealed(fresh, **change)
        with pytest.raises(Damaged):
            assert Checkpoint(fresh).manifest
        resealed(fresh, step=1, samples=0, job={}, version=2,
                 files=[msgspec.to_builtins(hashed(path)) for path in sorted(fresh.iterdir())
                        if path.name != MANIFEST])  # fmt: skip
        assert Checkpoint(fresh).manifest.step == 1
