"""One flipped bit in what a checkpoint says of itself: the run goes on from the one before, and names the damage."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.checkpoint.find import find
from fivefold.checkpoint.inspect import list_checkpoints, show_checkpoint, verify_checkpoints
from fivefold.checkpoint.load import newest
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import TABLE_FILE
from fivefold.support.errors import Note
from tests.checkpoint.runs import Run, small_job

SAMPLE = 421  # every so many bits; it is odd, so that all places of a byte have their turn

TINY = ["model.layers=1", "model.hidden=4", "model.heads=2", "model.kv_heads=1", "model.head_dim=2", "model.ffn=4",
        "model.tied=true", "train.batch=4"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny run with the checkpoints of two steps."""
    job = small_job(tokens, *TINY, "train.steps=2", "checkpoint.every=1")
    run = Run(job, 1, tmp_path_factory.mktemp("run") / "checkpoints")
    run.trainer.run([], checkpointing=run.keeper)
    return run


def flips(file: Path, every: int) -> Iterator[str]:
    """The file with one bit flipped, again and again; at the end it is as it was."""
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), every):
        byte = whole[bit // 8]
        _put(file, bit // 8, byte ^ 1 << bit % 8)
        try:
            yield f"bit {bit % 8} of byte {bit // 8} ({chr(byte)!r})"
        finally:
            _put(file, bit // 8, byte)


def _put(file: Path, place: int, byte: int) -> None:
    with file.open("r+b") as stream:  # in place: to write all of it anew takes longer than the rest
        stream.seek(place)
        stream.write(bytes([byte]))


@pytest.mark.parametrize("name", [MANIFEST, TABLE_FILE])
@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_checkpoint_before(trained: Run, name: str, every: int) -> None:
    store = trained.keeper.store
    second = store.complete()[0].path
    wanted, same, tried = Checkpoint(second).manifest, 0, 0
    for where in flips(second / name, every):
        said: list[str] = []
        found = newest(store, trained.keeper.control, said.append)
        assert found is not None, where
        tried += 1
        if found.step == 2:  # 1e-5 is 1E-5
            assert name == MANIFEST, where
            assert found.manifest == wanted, where
            same += 1
            continue
        assert found.step == 1, where
        assert f"{second.name}/{name}" in said[0], where
        assert said[-1].startswith(f"skipping {second.name} (set aside as {second.name}.damaged"), where
        os.rename(f"{second}.damaged", second)
    assert same < tried / 500
    print(f"{tried} flips of {name}, {same} of them change nothing")


@pytest.mark.parametrize("name", [MANIFEST, TABLE_FILE])
@pytest.mark.parametrize("every", [SAMPLE, pytest.param(13, marks=pytest.mark.slow)])
def test_commands_say_which_is_damaged(trained: Run, name: str, every: int) -> None:
    run = trained.keeper.store.directory.parent
    second = Store(run / "checkpoints").complete()[0].path
    for where in flips(second / name, every):
        checked = verify_checkpoints(run)
        assert not checked.problems["step-00000001"], where
        if checked.ok:
            continue
        assert name in checked.problems["step-00000002"][0], where
        rows = list_checkpoints(run).checkpoints
        assert [row["complete"] for row in rows] == [True, name == TABLE_FILE], where
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            assert find(run).step == (1 if name == MANIFEST else 2), where
        assert [note.category for note in notes] == ([Note] if name == MANIFEST else []), where
        assert len(show_checkpoint(run, step=1).tensors) == len(trained.keeper.shards()), where


def test_a_link_that_leads_elsewhere_does_not_matter(trained: Run, tmp_path: Path) -> None:
    """`latest` is for people; the run finds its checkpoints itself."""
    store = trained.keeper.store
    link = store.directory / "latest"
    for target in ("step-10000002", "/", "../../..", str(tmp_path), "latest", "\x01\x7f"):
        link.unlink()
        link.symlink_to(target)
        found = newest(store, trained.keeper.control, lambda _: None)
        assert found is not None
        assert found.step == 2
