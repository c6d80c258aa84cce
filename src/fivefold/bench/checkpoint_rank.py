"""One rank of `fivefold bench checkpoint`."""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from fivefold.bench.checkpoint import CheckpointResult
from fivefold.bench.harness import RoundTimes
from fivefold.bench.rank_timing import Call, timed
from fivefold.checkpoint.load import load, newest
from fivefold.checkpoint.memory_snapshots import MEMORY_DIR_ENV
from fivefold.checkpoint.save import total, write
from fivefold.checkpoint.shards import saveable_tensors, shards_to_write
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_device
from fivefold.launch.processes import Rank
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.files import sync
from fivefold.trainer.checkpointing import Checkpoints
from fivefold.trainer.loop import Trainer


def _checkpoints(rank: Rank, job: Job, directory: Path) -> Checkpoints:
    if rank.world > 1:
        rank.join("gloo")
    mesh = Mesh.of_job(job, choose_device(job.train.device, rank.number))
    trainer = Trainer(job, preflight(job, rank.world), mesh)
    return Checkpoints(Store(directory), Control(mesh), trainer, lambda _: None)


class Steps:
    """A trainer's steps, one at a time."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.reads = trainer, enumerate(trainer.reads(), start=1)

    def take(self) -> float:
        """Take the next step; returns its seconds, without the reading of the batch."""
        number, read = next(self.reads)
        batch = read()
        start = time.perf_counter()
        self.trainer.step(number, batch)
        self.trainer.done, self.trainer.samples = number, int(batch.samples[-1]) + 1
        return time.perf_counter() - start

    def beside(self, save: Callable[[int], object], count: int) -> tuple[float, float, float]:
        """Returns the seconds of a usual step, those of the call of `save`, and the extra seconds of the call and of
        the `count` steps after it, compared with as many usual steps."""
        usual = median(self.take() for _ in range(count))
        start = time.perf_counter()
        save(self.trainer.done)
        blocked = time.perf_counter() - start
        after = [self.take() for _ in range(count)]  # every rank takes equally many: they wait for each other
        return usual, blocked, blocked + sum(after) - count * usual


def run(rank: Rank, job: Job, directory: str, rounds: int, plain_steps: int) -> CheckpointResult:
    checkpoints = _checkpoints(rank, job, Path(directory) / "run")
    steps = Steps(checkpoints.trainer)
    checkpoints.prepare()
    for _ in range(2):
        steps.take()
    costs: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        costs.append(steps.beside(checkpoints.save, plain_steps))
        checkpoints.ensure()
    files = CheckpointFiles(rank, checkpoints, Path(directory))
    usual, snapshot, lost = map(list, zip(*costs, strict=True))
    return CheckpointResult(job, files.bytes, usual, snapshot, lost, *files.times(rounds))


class CheckpointFiles:
    """Saves and loads one state in three ways: ours, DCP alone, torch.save of each rank's part."""

    def __init__(self, rank: Rank, checkpoints: Checkpoints, directory: Path):
        engine, shapes = checkpoints.trainer.engine, checkpoints.shapes
        self.rank, self.control, self.manifest = rank, checkpoints.control, checkpoints.store.complete()[0].manifest
        self.pieces = shards_to_write(engine.weights, shapes, engine.optimizer, engine.buffers)
        self.into = saveable_tensors(engine.weights, shapes, engine.optimizer)
        self.plain = {name: piece.make() for name, piece in self.pieces.items()}
        self.bytes = sum(self.control.all_gather_values(sum(tensor.nbytes for tensor in self.plain.values()), int))
        self.store = Store(directory / "files")
        self.dcp, self.torch = directory / f"dcp-{rank.number}", directory / f"torch-{rank.number}.pt"

    def times(self, rounds: int) -> tuple[RoundTimes, RoundTimes]:
        systems: dict[str, tuple[Call, Call]] = {
            "ours": (partial(write, self.store, self.control, self.pieces, self.manifest), self.load_ours),
            "dcp": (self.save_dcp, self.load_dcp),
            "torch": (self.save_torch, self.load_torch),
        }
        saves, loads = RoundTimes({name: [] for name in systems}), RoundTimes({name: [] for name in systems})
        for _ in range(rounds):
            for name, (saving, loading) in systems.items():
                saves[name].append(timed(saving))
                loads[name].append(timed(loading))
            if self.rank.number == 0:
                for old in self.store.complete():
                    old.storage.delete(old.path)
            shutil.rmtree(self.dcp)
            os.sync()
            self.control.all_gather_values(None, None)
        return saves, loads

    def load_ours(self) -> None:
        checkpoint = newest(self.store, self.control, lambda _: None)
        assert checkpoint is not None
        load(checkpoint, self.into)

    def save_dcp(self) -> None:
        """Each rank saves by itself, so that DCP exchanges no pickles between ranks."""
        with without_dcp_warning():
            state_dict_saver.save(
                dict(self.plain), storage_writer=FileSystemWriter(self.dcp, overwrite=True), no_dist=True
            )

    def load_dcp(self) -> None:
        """DCP unpickles: these are files that this process has just written, in a directory of its user alone."""
        with without_dcp_warning():
            state_dict_loader.load(dict(self.plain), storage_reader=FileSystemReader(self.dcp), no_dist=True)

    def save_torch(self) -> None:
        torch.save(self.plain, self.torch)
        sync(self.torch)

    def load_torch(self) -> None:
        for name, tensor in torch.load(self.torch, weights_only=True).items():
            self.plain[name].copy_(tensor)


@contextmanager
def without_dcp_warning() -> Iterator[None]:
    """Suppress DCP's warning that there is no process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# ---- recovery rank --------------------------------------------------------------------------------------------------
# One rank of `fivefold bench checkpoint --recovery`.


def _with_memory(rank: Rank, job: Job, directory: str, memory: str) -> Checkpoints:
    os.environ[MEMORY_DIR_ENV] = memory
    return _checkpoints(rank, job, Path(directory) / "checkpoints")


def lose(
    rank: Rank, job: Job, directory: str, memory: str, rounds: int, plain_steps: int
) -> tuple[int, list[float], list[float], list[float]]:
    """Take steps and snapshots into memory, and save the last step on disk; then the ranks end as if lost.
    Returns the bytes of a checkpoint, and by round the numbers of `Steps.beside`."""
    checkpoints = _with_memory(rank, job, directory, memory)
    checkpoints.restore()
    steps = Steps(checkpoints.trainer)
    for _ in range(3):  # each rank creates its three files with its first snapshots
        steps.take()
        checkpoints.save_to_memory(steps.trainer.done)
    costs: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        checkpoints.memory.finish()
        costs.append(steps.beside(checkpoints.save_to_memory, plain_steps))
    checkpoints.save_to_memory(steps.trainer.done)
    checkpoints.save(steps.trainer.done)
    checkpoints.memory.finish()
    checkpoints.ensure()
    size = sum(checkpoints.control.all_gather_values(total(checkpoints.shards()), int))
    usual, blocked, lost = map(list, zip(*costs, strict=True))
    return size, usual, blocked, lost


def find(rank: Rank, job: Job, directory: str, memory: str, tier: str, asked: float) -> tuple[float, float, float]:
    """Restore a new start, asked for at the time `asked`. Returns the seconds until it has a model, those to load the
    state, and those to write the model's weights from it."""
    checkpoints = _with_memory(rank, job, directory, memory if tier == "memory" else f"{memory}-none")
    if rank.world > 1:
        dist.barrier()
    begun = time.time() - asked
    checkpoints.restore()
    assert checkpoints.resumed_from.startswith("memory") == (tier == "memory"), checkpoints.resumed_from
    checkpoints.close()
    return begun, checkpoints.read_seconds, checkpoints.restore_seconds - checkpoints.read_seconds
