"""Saving: a snapshot at once, its files in the background, and a manifest when every rank's are there.

saver = Saver(store, control, config, device)
copied = saver.start(pieces, manifest)     # parameters may change from there on; on a GPU, behind this event
...
saver.finish()                             # waits for the one under way, and raises what went wrong with it
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from fivefold.checkpoint.host_staging import Snapshot, Staging
from fivefold.checkpoint.pieces import Pieces, SavePlan, quietly
from fivefold.checkpoint.store import MANIFEST, Manifest, Store
from fivefold.checkpoint.writer import Writer, planned
from fivefold.job.config import CheckpointConfig
from fivefold.launch.cores import for_files
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError
from fivefold.support.files import File, Progress, hashed
from fivefold.support.formatting import bytes_text

T = TypeVar("T")


@dataclass
class Saving:
    """A save that is under way or over."""

    manifest: Manifest
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None


class Saver:
    def __init__(self, store: Store, control: Control, config: CheckpointConfig, device: torch.device):
        self.store, self.control, self.config = store, control, config
        self.saving: Saving | None = None
        self.thread = threading.Thread()
        self.staging = Staging(device)

    def start(self, pieces: Pieces, manifest: Manifest) -> torch.cuda.Event | None:
        """Collective. Takes the snapshot; waits first for an earlier save, so that one at most is under way."""
        self.finish()
        snapshot = self.staging.take(pieces)
        self.saving = Saving(manifest)
        self.thread = threading.Thread(target=self._write, args=(self.saving, snapshot), name="checkpoint", daemon=True)
        self.thread.start()
        return snapshot.copied

    @property
    def failed(self) -> bool:
        """Whether the save under way has ended, on this rank, and badly; `finish` says how, on all ranks alike."""
        return self.saving is not None and self.saving.error is not None

    def finish(self) -> None:
        """Wait for the save under way, if there is one, and raise what went wrong with it."""
        if self.saving is None:
            return
        self.thread.join()
        saving, self.saving = self.saving, None
        if saving.error is not None:
            last = next((one for one in self.store.complete() if not one.misfits()), None)
            kept = f"; the last good one is {last.path.name}" if last else ""
            raise TrainingError(f"the checkpoint of step {saving.manifest.step} was not written: {saving.error}{kept}")

    def _write(self, saving: Saving, snapshot: Snapshot) -> None:
        """In the background."""
        try:
            snapshot.arrive()
            write(self.store, self.control, snapshot.pieces, saving.manifest)
        except BaseException as error:
            saving.error = error
            return
        if self.control.rank == 0:
            with suppress(OSError):  # what cannot be deleted now is tried again after the next save
                self.store.retain(self.config.keep, self.config.keep_every)


def write(store: Store, control: Control, pieces: Pieces, manifest: Manifest) -> Path:
    """Collective: every rank's pieces into a checkpoint, which exists from the moment its manifest does."""
    needed = sum(piece.nbytes for piece in pieces.values())
    path = together(control, lambda: _room(store, manifest.step, sum(control.from_all(needed)), control.rank))[0]
    assert path is not None
    with _complete_or_gone(path) if control.rank == 0 else nullcontext():
        mine = _dcp(path, control, pieces)
        files = together(control, lambda: [hashed(path / ".metadata"), *mine] if control.rank == 0 else mine)
        whole = msgspec.structs.replace(manifest, files=[file for of_rank in files for file in of_rank])
        together(control, lambda: store.commit(path, whole) if control.rank == 0 else None)
    return path


@contextmanager
def _complete_or_gone(path: Path) -> Iterator[None]:
    """Delete half a save where it fails. What has its manifest is whole, whatever went wrong afterwards."""
    try:
        yield
    except BaseException:
        if not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)
        raise


def write_alone(store: Store, parts: Sequence[Pieces], manifest: Manifest, progress: Progress = lambda _: None) -> Path:
    """What `parts` ranks would write, by this process alone, one part after the other: only one is in memory at a time.

    `progress` is told of the bytes that have been written.
    """
    path = _room(store, manifest.step, sum(piece.nbytes for part in parts for piece in part.values()), 0)
    assert path is not None
    with _complete_or_gone(path):
        planners, writers, plans = [SavePlan() for _ in parts], [Writer(path) for _ in parts], []
        for rank, (planner, writer, part) in enumerate(zip(planners, writers, parts, strict=True)):
            planner.set_up_planner(dict(part), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writers[0].prepare_global_plan(plans)
        results = []
        for planner, writer, plan in zip(planners, writers, plans, strict=True):
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
            progress(planned(plan))
        writers[0].finish(metadata, results)
        files = [*(file for writer in writers for file in writer.files), hashed(path / ".metadata")]
        store.commit(path, msgspec.structs.replace(manifest, files=files))
    return path


def _room(store: Store, step: int, needed: int, rank: int) -> Path | None:
    if rank:
        return None
    store.directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store.directory).free
    if free < needed:
        raise OSError(f"it takes {bytes_text(needed)}, and {store.directory} has {bytes_text(free)} left")
    return store.new(step)


def together(control: Control, do: Callable[[], T]) -> list[T]:
    """What every rank got by doing it; if one failed, all do, and say why."""
    done, problem = None, ""
    try:
        done = do()
    except OSError as error:
        problem = error.strerror or str(error)
    found = control.from_all((done, problem))
    if why := next(filter(None, (other for _, other in found)), ""):
        raise OSError(why)
    return [cast(T, value) for value, _ in found]


def _dcp(path: Path, control: Control, pieces: Pieces) -> list[File]:
    """This rank's files."""
    writer, alone = Writer(path, for_files()), control.size == 1
    try:
        with quietly():
            save(dict(pieces), storage_writer=writer, planner=SavePlan(), process_group=control.group, no_dist=alone)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise OSError(str(failure) if alone else f"rank {rank}: {failure}") from None
    return writer.files
