"""Checkpoints on disk: complete or not, newest first, and what may go."""

from pathlib import Path

import msgspec
import pytest

from fivefold.checkpoint.find import find
from fivefold.checkpoint.manifest import MANIFEST, Manifest
from fivefold.checkpoint.retention import retain
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import TABLE_FILE, Chunk, Stored
from fivefold.support.errors import UserError
from fivefold.support.files import hash_file


def save(store: Store, step: int, text: str = "weights", finish: bool = True) -> Path:
    path = store.new(step)
    (path / "rank-0.tensors").write_text(text)
    table = {"model.a": Stored((len(text),), "uint8", (Chunk((0,), (len(text),), "rank-0.tensors", 0, len(text)),))}
    (path / TABLE_FILE).write_bytes(msgspec.json.encode(table))
    files = [hash_file(file) for file in path.iterdir()]
    manifest = Manifest(fivefold="0", torch="0", step=step, samples=0, updates=0, optimizer=True, data="", job={},
                        files=files)  # fmt: skip
    return store.commit(path, manifest).path if finish else path


def test_a_save_exists_from_its_manifest_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    assert store.complete() == []
    first = save(store, 4)
    half = save(store, 8, finish=False)
    assert [one.path for one in store.complete()] == [first]
    assert store.incomplete() == [half]
    assert (store.directory / "latest").resolve() == first
    assert find(tmp_path).step == 4
    second = save(store, 8)  # beside the half one: two saves never share a directory
    assert second.name == "step-00000008.2"
    assert [one.path for one in store.complete()] == [second, first]
    assert (store.directory / "latest").resolve() == second


def test_retention_keeps_the_newest_good_ones_and_every_nth(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(1, 10):
        save(store, step)
    (tmp_path / "step-00000009" / "rank-0.tensors").write_text("short")  # 9 is no longer good, and does not count
    gone = retain(store, keep=2, every=4)
    assert [one.step for one in store.complete()] == [9, 8, 7, 4]
    assert sorted(path.name for path in gone) == [f"step-{step:08d}" for step in (1, 2, 3, 5, 6)]
    assert not list(tmp_path.glob("*.deleting"))


def test_what_a_kill_left_half_deleted_goes_with_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1).rename(tmp_path / "step-00000001.deleting")
    save(store, 2)
    assert [one.step for one in store.complete()] == [2]
    retain(store, keep=1, every=0)
    assert not list(tmp_path.glob("*.deleting"))


def test_of_saves_that_were_never_finished_the_newest_set_aside_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step, times in ((2, 1), (12, 12)):
        for _ in range(times):
            store.set_aside(save(store, step, finish=False), "incomplete")
    store.set_aside(save(store, 1), "damaged")
    (tmp_path / "mine.incomplete").mkdir()
    save(store, 13)
    half = save(store, 14, finish=False)  # of this run, and nobody is at it any more
    retain(store, keep=1, every=0)
    assert [path.name for path in store.set_aside_folders()] == [
        "mine.incomplete", "step-00000001.damaged", "step-00000012.incomplete-12"
    ]  # fmt: skip
    assert not half.exists()
    assert [one.step for one in store.complete()] == [13]


def test_a_checkpoint_needs_no_link(tmp_path: Path) -> None:
    (tmp_path / "latest" / "mine").mkdir(parents=True)
    save(Store(tmp_path), 1)
    assert find(tmp_path).step == 1
    assert (tmp_path / "latest" / "mine").is_dir()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: file.write_text("weighty"), "is damaged: its sha256 is"),
        (lambda file: file.write_text("w"), "is short: 1 bytes, and the manifest promises 7"),
        (lambda file: file.unlink(), "is missing: the manifest promises 7 bytes"),
    ],
)
def test_harm_is_named_by_file(tmp_path: Path, harm, said: str) -> None:
    path = save(Store(tmp_path), 1)
    (one,) = Store(tmp_path).complete()
    assert one.damage() == []
    harm(path / "rank-0.tensors")
    (problem,) = Store(tmp_path).complete()[0].damage()
    assert "rank-0.tensors" in problem
    assert said in problem


def test_a_manifest_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    path = save(Store(tmp_path), 1)
    (path / MANIFEST).write_text("{}")
    (problem,) = Store(tmp_path).complete()[0].misfits()
    assert "manifest.json is damaged" in problem


def test_set_aside_moves_the_link_and_deletes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = save(store, 1), save(store, 2)
    assert store.set_aside(second, "damaged").name == "step-00000002.damaged"
    assert (tmp_path / "latest").resolve() == first
    assert store.set_aside(save(store, 2), "damaged").name == "step-00000002.damaged-2"
    assert len(store.set_aside_folders()) == 2
    store.set_aside(first, "damaged")
    assert not (tmp_path / "latest").exists()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"runs/b is not a directory; .*runs has: .*runs/a"):
        find(tmp_path / "runs" / "b")
    with pytest.raises(UserError, match="has no complete checkpoint"):
        find(tmp_path / "runs" / "a")
    save(Store(tmp_path / "runs" / "a" / "checkpoints"), 3)
    with pytest.raises(UserError, match="no complete checkpoint of step 4; it has: 3"):
        find(tmp_path / "runs" / "a", 4)
    with pytest.raises(UserError, match="is the checkpoint of step 3, and --step 4 is another"):
        find(tmp_path / "runs" / "a" / "checkpoints" / "latest", 4)
