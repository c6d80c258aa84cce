"""A rank's pieces in several files at a time: equal bits, true sums, and an error in any of them is the save's."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.checkpoint import save
from fivefold.checkpoint import save as writer
from fivefold.checkpoint.async_save import NotSaved
from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import Checkpoint, Manifest
from fivefold.checkpoint.save import write
from fivefold.checkpoint.shards import Shard, Shards
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.launch import host
from fivefold.parallel.control import Control
from fivefold.support.files import HashedFile, hash_file
from tests.checkpoint.runs import loaded, small_job, train
from tests.ranks import run_ranks

SHAPES = {"table": (300, 40), "up": (96, 40), "down": (40, 96), "norm": (40,), "step": ()}


class Alone(Control):
    def __init__(self) -> None:
        self.rank, self.size = 0, 1


def tensors() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=noise) for name, shape in SHAPES.items()}


def pieces(of: dict[str, Tensor]) -> Shards:
    return {name: Shard.whole(tensor) for name, tensor in of.items()}


def manifest() -> Manifest:
    return Manifest(step=1, samples=8, updates=1, optimizer=True, data="", job={})


@pytest.fixture
def three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MIN_FILE_BYTES", 1 << 10)
    monkeypatch.setattr(save, "for_files", lambda: 3)


@pytest.mark.usefixtures("three_files")
def test_several_files_hold_every_bit_and_their_sums_are_of_what_is_on_the_disk(tmp_path: Path) -> None:
    of = tensors()
    path = write(Store(tmp_path), Alone(), pieces(of), manifest())
    found = Checkpoint(path).manifest.files
    assert [file.name for file in found] == [*(f"rank-0.{number}.tensors" for number in range(3)), "tensors.json"]
    assert found == [hash_file(path / file.name) for file in found]
    assert not Checkpoint(path).damage()
    sizes = sorted(file.bytes for file in found[:-1])
    assert sizes[0] > 15_000  # the two matrices; the table, the largest by far, is by itself
    back = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    load(Checkpoint(path), pieces(back))
    assert all(torch.equal(back[name], tensor) for name, tensor in of.items())


@pytest.mark.usefixtures("three_files")
@pytest.mark.parametrize("full", range(3))
def test_what_fails_in_one_of_the_files_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    real = HashedFile.write

    def refuse(stream: Any, data: Any) -> int:
        if stream.file.name == f"rank-0.{full}.tensors" and stream.tell() + memoryview(data).nbytes > 1000:
            raise OSError(28, os.strerror(28))
        return real(stream, data)

    monkeypatch.setattr(HashedFile, "write", refuse)
    with pytest.raises(NotSaved, match=f"No space left on device.*go into {tmp_path}"):
        write(Store(tmp_path), Alone(), pieces(tensors()), manifest())
    assert not list(tmp_path.iterdir())  # nothing half is left


def test_work_is_spread_over_threads_and_comes_back_in_order() -> None:
    meet = threading.Barrier(3, timeout=30)  # three are at work at a time, or it breaks

    def do(number: int) -> int:
        meet.wait()
        return number * number

    assert host.side_by_side(do, range(9), 3) == [number * number for number in range(9)]
    assert host.side_by_side(str, [], 3) == []


def test_after_an_error_nothing_more_is_begun() -> None:
    begun = []

    def do(number: int) -> None:
        begun.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match=r"^[01]$"):
        host.side_by_side(do, range(100), 2)
    assert len(begun) <= 2


def test_a_process_does_not_wait_for_its_threads() -> None:
    """Ctrl-C in the middle of a save: the files are of no use without their manifest."""
    slow = "import threading, time; from fivefold.launch.host import side_by_side"
    save = "threading.Thread(target=lambda: side_by_side(time.sleep, [60, 60], 2), daemon=True).start()"
    subprocess.run([sys.executable, "-c", f"{slow}; {save}; time.sleep(0.2)"], timeout=30, check=True)


def train_in_parts(rank: int, world: int, job: Job, path: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MIN_FILE_BYTES", 1 << 12)
        patch.setattr(save, "for_files", lambda: 3)
        return train(rank, world, job, path)


def test_several_files_of_several_ranks_are_read_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=2", "layout=dp=2,zero=1")
    written = run_ranks(2, train_in_parts, job, tmp_path)
    files = [file.name for file in Store(tmp_path).complete()[0].manifest.files]
    assert files == [*(f"rank-{rank}.{part}.tensors" for rank in range(2) for part in range(3)), "tensors.json"]
    reader = small_job(tokens, "train.steps=2", "layout=tp=2")
    step, state, said = run_ranks(2, loaded, reader, tmp_path)[0]
    assert (step, said) == (2, [])
    assert state == written[0][1]


def test_small_pieces_stay_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "for_files", lambda: 8)
    path = write(Store(tmp_path), Alone(), pieces(tensors()), manifest())
    assert [file.name for file in path.glob("*.tensors")] == ["rank-0.tensors"]


def test_the_system_may_take_less_of_a_write_than_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with more than two gigabytes at a time."""
    real = HashedFile(tmp_path / "file.tensors")
    monkeypatch.setattr(real, "_raw", Sips(real._raw))
    data = os.urandom(10_000)
    assert real.write(data) == 10_000
    assert real.tell() == 10_000
    real.close()
    assert (tmp_path / "file.tensors").read_bytes() == data
    assert real.file == hash_file(tmp_path / "file.tensors")


class Sips:
    def __init__(self, raw: Any):
        self.raw = raw

    def write(self, data: memoryview) -> int:
        return self.raw.write(data[:777])

    def close(self) -> None:
        self.raw.close()


@pytest.mark.parametrize(
    ("machine", "mine", "ranks", "threads"),
    [
        (2, 2, "1", 1),
        (16, 16, "1", 8),
        (16, 16, "4", 2),
        (16, 16, "16", 1),
        (192, 192, "8", 8),
        (128, 16, "8", 8),  # each bound to its own
        (16, 4, "1", 2),
        (16, 16, "x", 8),
    ],
)
def test_files_take_half_of_a_rank_s_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, machine: int, mine: int, ranks: str, threads: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: mine)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, ranks)
    assert host.for_files() == threads
