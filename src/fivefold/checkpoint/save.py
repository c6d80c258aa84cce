"""Saving: a snapshot at once, its files in the background, and a manifest when every rank's are there.

saver = Saver(store, control, config, device)
copied = saver.start(pieces, manifest)     # parameters may change from there on; on a GPU, behind this event
...
saver.finish()                             # waits for the one under way, and says why it was not written, if it was not
"""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import torch

from fivefold.checkpoint.shards import Pieces, Shard, raw
from fivefold.checkpoint.staging import Snapshot, Staging
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import VERSION, Manifest, Store
from fivefold.checkpoint.tensors import TABLE, Tensors, check, merged
from fivefold.job.config import CheckpointConfig
from fivefold.launch import faults, heartbeat
from fivefold.launch.heartbeat import beat
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError
from fivefold.support.files import File, Progress
from fivefold.support.places import Place
from fivefold.support.text import bytes_text

# ---- writer ---------------------------------------------------------------------------------------------------------
# Writing a rank's pieces: bytes, hashed on their way, in several files at a time where the machine has cores for it.
#
# written = write_pieces(path, rank, pieces, threads=for_files())
# written.files                                 # with their sums: nothing is read again
# written.tensors                               # what lies where in them


LEAST = 1 << 28  # bytes: what is smaller than two of these is not worth a second file


class Written(msgspec.Struct, frozen=True):
    """Files, whole and synced, and the tensors in them."""

    files: list[File]
    tensors: Tensors


def write_pieces(directory: Place, rank: int, pieces: Pieces, threads: int = 1) -> Written:
    """One file or more, with names that no other rank has; none where there are no pieces."""
    parts = divide(pieces, threads)
    numbers = [f".{number}" for number in range(len(parts))] if len(parts) > 1 else [""]
    todo = [(directory / f"rank-{rank}{number}.tensors", part) for number, part in zip(numbers, parts, strict=False)]
    try:
        written = side_by_side(lambda part: _write(*part), todo, threads)
    except OSError as error:
        raise OSError(_why(error, directory, total(pieces))) from None
    return Written([file for file, _ in written], merged([tensors for _, tensors in written]))


def _write(path: Place, pieces: Pieces) -> tuple[File, Tensors]:
    tensors: Tensors = {}
    with storage_of(path).create(path, beat) as stream:
        for name, piece in pieces.items():
            tensor = piece.make().detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (piece.sizes, piece.dtype), name
            tensors[name] = piece.stored(path.name, stream.tell())
            stream.write(raw(tensor))
        return stream.finish(), tensors


def total(pieces: Pieces) -> int:
    """Bytes of the tensors."""
    return sum(piece.nbytes for piece in pieces.values())


def divide(pieces: Pieces, most: int) -> list[Pieces]:
    """Those of each file: about as many bytes in each, none of them small."""
    count = max(1, min(most, total(pieces) // LEAST, len(pieces)))
    if count == 1:
        return [pieces] if pieces else []
    parts: list[dict[str, Shard]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes, reverse=True):
        least = sizes.index(min(sizes))
        parts[least][name] = piece
        sizes[least] += piece.nbytes
    return list(parts)


def _why(error: OSError, directory: Place, needed: int) -> str:
    said = os.strerror(error.errno) if error.errno else str(error)
    try:
        room = storage_of(directory).free(directory)
        free = f"{bytes_text(room)} are free there" if room is not None else ""
    except OSError as other:
        free = f"it cannot be accessed: {other.strerror}"
    if not free:  # what a server says is not what this system calls it
        return f"{error.strerror or error}: {bytes_text(needed)} go into {directory}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = f", files may have {bytes_text(limit)}" if limit != resource.RLIM_INFINITY else ""
    return f"{said}: {bytes_text(needed)} go into {directory}, {free}{allowed}"


# ---- save -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class NotSaved(Exception):
    """All ranks know that a checkpoint was not written, and why. The run can go on."""


@dataclass
class Saving:
    """A save that is under way or over."""

    manifest: Manifest
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    kept: str = ""  # where there is an error: which checkpoint is the last good one


class BackgroundSaver:
    """Saves in a thread, one at a time. What is to be saved is copied first, and then may change."""

    what, failed = "", ""  # a save, and the sentence for one that was not written: "... step {step}"

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.thread = threading.Thread()

    def _begin(
        self, manifest: Manifest, snapshot: Snapshot, write: Callable[[Manifest, Pieces], object]
    ) -> torch.cuda.Event | None:
        self.saving = Saving(manifest)
        arguments = (self.saving, snapshot, write)
        self.thread = threading.Thread(target=self._run, args=arguments, name=self.what, daemon=True)
        self.thread.start()
        return snapshot.copied

    def _run(self, saving: Saving, snapshot: Snapshot, write: Callable[[Manifest, Pieces], object]) -> None:
        """In the background."""
        heartbeat.enter(f"the {self.what} of step {saving.manifest.step}")
        try:
            snapshot.arrive()
            write(saving.manifest, snapshot.pieces)
        except BaseException as error:
            saving.error = error
        finally:
            heartbeat.enter("")
        self._after(saving)

    def _after(self, saving: Saving) -> None:
        """In the background, when it is written or has failed."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the save under way, if there is one, has ended on this rank, well or badly."""
        return not self.thread.is_alive()

    def finish(self) -> str | None:
        """Wait for the save under way, if there is one; all ranks get the same: why it was not written, if it was not.

        A rank that has lost another in it raises that.
        """
        if self.saving is None:
            return None
        self.thread.join()
        saving, self.saving = self.saving, None
        if saving.error is None:
            return None
        if isinstance(saving.error, TrainingError):
            raise saving.error
        said = f"{self.failed.format(step=saving.manifest.step)}: {saving.error}"
        said += f"; {saving.kept}" if saving.kept else ""
        if not isinstance(saving.error, NotSaved):
            raise TrainingError(said) from saving.error
        return said


class Saver(BackgroundSaver):
    """Of checkpoints."""

    what, failed = "checkpoint", "the checkpoint of step {step} was not written"

    def __init__(self, store: Store, control: Control, config: CheckpointConfig, device: torch.device):
        super().__init__()
        self.store, self.control, self.config = store, control, config
        self.staging = Staging(device)

    def start(
        self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Collective. Takes the snapshot. An earlier save must be finished: one at most is under way. `after`: another
        copy that is."""
        assert self.saving is None
        return self._begin(manifest, self.staging.take(pieces, after), self._write)

    def _write(self, manifest: Manifest, pieces: Pieces) -> None:
        write(self.store, self.control, pieces, manifest)

    def _after(self, saving: Saving) -> None:
        if saving.error is not None:
            saving.kept = self._kept()
        elif self.control.rank == 0:
            with suppress(OSError):  # what cannot be deleted now is tried again after the next save
                self.store.retain(self.config.keep, self.config.keep_every)

    def _kept(self) -> str:
        try:
            last = next((checkpoint for checkpoint in self.store.complete() if not checkpoint.misfits()), None)
        except OSError as error:
            return f"{self.store.directory} cannot be listed: {error.strerror}"
        return f"the last good one is {last.path.name}" if last else "there is none before it"


def write(store: Store, control: Control, pieces: Pieces, manifest: Manifest) -> Place:
    """Collective: every rank's pieces into a checkpoint, which exists from the moment its manifest does."""
    needed, first = sum(control.all_gather_values(total(pieces), int)), control.rank == 0
    name = agreed(control, lambda: _room(store, manifest.step, needed).name if first else "")
    path = store.directory / control.broadcast_value(name, str)
    with _complete_or_gone(store, path) if first else nullcontext():
        local = agreed(control, lambda: _written(path, control.rank, pieces, manifest.step))
        written = control.gather_values(local, Written)
        agreed(control, lambda: _commit(store, path, manifest, written) if first else None)
    return path


def _written(path: Place, rank: int, pieces: Pieces, step: int) -> Written:
    faults.strike("write", step=step)
    return write_pieces(path, rank, pieces, for_files())


def together(written: list[Written]) -> tuple[Tensors, list[File]]:
    """What all ranks have written, checked before it counts: every element lies there once."""
    tensors = merged([part.tensors for part in written])
    files = [file for part in written for file in part.files]
    check(tensors, {file.name: file.bytes for file in files})
    return tensors, files


def _commit(store: Store, path: Place, manifest: Manifest, written: list[Written]) -> None:
    tensors, files = together(written)
    with store.storage.create(path / TABLE, heartbeat.beat) as table:
        table.write(msgspec.json.encode(tensors))
        files.append(table.finish())
    store.commit(path, msgspec.structs.replace(manifest, version=VERSION, files=files))


@contextmanager
def _complete_or_gone(store: Store, path: Place) -> Iterator[None]:
    """Delete half a save where it fails; what cannot be deleted now is by the next one."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            store.discard(path)
        raise


def write_alone(
    store: Store, parts: Sequence[Pieces], manifest: Manifest, progress: Progress = lambda _: None
) -> Place:
    """What `parts` ranks would write, by this process alone, one part after the other: only one is in memory at a time.

    `progress` is told of the bytes that have been written.
    """
    path = _room(store, manifest.step, sum(map(total, parts)))
    with _complete_or_gone(store, path):
        written = []
        for rank, part in enumerate(parts):
            written.append(write_pieces(path, rank, part))
            progress(total(part))
        _commit(store, path, manifest, written)
    return path


def _room(store: Store, step: int, needed: int) -> Place:
    path = store.new(step)
    free = store.storage.free(store.directory)
    if free is not None and free < needed:
        store.discard(path)
        raise OSError(f"it takes {bytes_text(needed)}, and {store.directory} has {bytes_text(free)} left")
    return path


def agreed(control: Control, do: Callable[[], T]) -> T:
    """Collective: what this rank got by doing it; if any rank failed, all raise NotSaved, and say why."""
    problem = ""
    try:
        done = do()
    except Exception as error:
        who = f"rank {control.rank}: " if control.size > 1 else ""
        why = error.strerror if isinstance(error, OSError) else None
        problem = f"{who}{why or str(error) or type(error).__name__}"
    if why := next(filter(None, control.all_gather_values(problem, str)), ""):
        raise NotSaved(why)
    return done
