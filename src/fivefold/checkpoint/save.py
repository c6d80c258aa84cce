"""Saves checkpoints: a snapshot at once, its files in the background, and a manifest when every rank's are there.

saver = Saver(store, control, config, device)
copied = saver.start(shards, manifest)     # then parameters may change; on a GPU, after this event
...
saver.finish()                             # waits for the one under way, and returns why it failed, else None
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

from fivefold.checkpoint.filesystem import storage_of
from fivefold.checkpoint.manifest import VERSION, Manifest
from fivefold.checkpoint.retention import retain
from fivefold.checkpoint.shards import Shard, Shards, raw
from fivefold.checkpoint.staging import Snapshot, Staging
from fivefold.checkpoint.store import Store
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
# Writes a rank's shards, hashed on the way, in several files at a time where the machine has cores for it.
#
# written = write_shards(path, rank, shards, threads=for_files())
# written.files                                 # with their hashes: nothing is read again
# written.tensors                               # the place of each shard in them


LEAST = 1 << 28  # bytes of a file, at least, where shards are divided over several


class Written(msgspec.Struct, frozen=True):
    """Files that are complete and synced, and the tensors in them."""

    files: list[File]
    tensors: Tensors


def write_shards(directory: Place, rank: int, shards: Shards, threads: int = 1) -> Written:
    """Writes one file or more, named by the rank; none where there are no shards."""
    parts = divide(shards, threads)
    suffixes = [f".{number}" for number in range(len(parts))] if len(parts) > 1 else [""]
    paths = [directory / f"rank-{rank}{suffix}.tensors" for suffix in suffixes]
    try:
        written = side_by_side(lambda part: _write_file(*part), list(zip(paths, parts, strict=False)), threads)
    except OSError as error:
        raise OSError(_write_error(error, directory, total(shards))) from None
    return Written([file for file, _ in written], merged([tensors for _, tensors in written]))


def _write_file(path: Place, shards: Shards) -> tuple[File, Tensors]:
    tensors: Tensors = {}
    with storage_of(path).create(path, beat) as stream:
        for name, shard in shards.items():
            tensor = shard.make().detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (shard.sizes, shard.dtype), name
            tensors[name] = shard.stored(path.name, stream.tell())
            stream.write(raw(tensor))
        return stream.finish(), tensors


def total(shards: Shards) -> int:
    """The bytes of the shards."""
    return sum(shard.nbytes for shard in shards.values())


def divide(shards: Shards, max_files: int) -> list[Shards]:
    """The shards of each file: about as many bytes in each, and none small."""
    count = max(1, min(max_files, total(shards) // LEAST, len(shards)))
    if count == 1:
        return [shards] if shards else []
    parts: list[dict[str, Shard]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, shard in sorted(shards.items(), key=lambda item: item[1].nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = shard
        sizes[smallest] += shard.nbytes
    return list(parts)


def _write_error(error: OSError, directory: Place, needed: int) -> str:
    """The sentence of an error in writing, with the bytes that were needed and those that are free."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    try:
        free_bytes = storage_of(directory).free(directory)
        free = f"{bytes_text(free_bytes)} are free there" if free_bytes is not None else ""
    except OSError as access_error:
        free = f"it cannot be accessed: {access_error.strerror}"
    if not free:  # object storage, whose errors have the server's own words
        return f"{error.strerror or error}: {bytes_text(needed)} go into {directory}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit_text = f", files may have {bytes_text(limit)}" if limit != resource.RLIM_INFINITY else ""
    return f"{reason}: {bytes_text(needed)} go into {directory}, {free}{limit_text}"


# ---- save -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class NotSaved(Exception):
    """A checkpoint was not written, which all ranks know. The run can go on."""


@dataclass
class Saving:
    """A save that is under way or has ended."""

    manifest: Manifest
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    last_good: str = ""  # after an error: a text on the last good checkpoint


class BackgroundSaver:
    """Saves in a thread, one at a time. The shards are copied first, and then may change."""

    what, failed = "", ""  # the noun for a save, and the start of the sentence for a failed one, with "{step}"

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.thread = threading.Thread()

    def _begin(
        self, manifest: Manifest, snapshot: Snapshot, write: Callable[[Manifest, Shards], object]
    ) -> torch.cuda.Event | None:
        self.saving = Saving(manifest)
        arguments = (self.saving, snapshot, write)
        self.thread = threading.Thread(target=self._run, args=arguments, name=self.what, daemon=True)
        self.thread.start()
        return snapshot.copied

    def _run(self, saving: Saving, snapshot: Snapshot, write: Callable[[Manifest, Shards], object]) -> None:
        """Writes the snapshot; runs in the thread."""
        heartbeat.enter(f"the {self.what} of step {saving.manifest.step}")
        try:
            snapshot.wait()
            write(saving.manifest, snapshot.shards)
        except BaseException as error:
            saving.error = error
        finally:
            heartbeat.enter("")
        self._after(saving)

    def _after(self, saving: Saving) -> None:
        """Called in the thread when the save is written or has failed."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the save under way, if there is one, has ended on this rank, well or badly."""
        return not self.thread.is_alive()

    def finish(self) -> str | None:
        """Waits for the save under way, if there is one; returns why it failed, the same on all ranks, else None.

        Raises TrainingError if a peer was lost in it.
        """
        if self.saving is None:
            return None
        self.thread.join()
        saving, self.saving = self.saving, None
        if saving.error is None:
            return None
        if isinstance(saving.error, TrainingError):
            raise saving.error
        message = f"{self.failed.format(step=saving.manifest.step)}: {saving.error}"
        message += f"; {saving.last_good}" if saving.last_good else ""
        if not isinstance(saving.error, NotSaved):
            raise TrainingError(message) from saving.error
        return message


class Saver(BackgroundSaver):
    """Saves checkpoints to disk or object storage."""

    what, failed = "checkpoint", "the checkpoint of step {step} was not written"

    def __init__(self, store: Store, control: Control, config: CheckpointConfig, device: torch.device):
        super().__init__()
        self.store, self.control, self.config = store, control, config
        self.staging = Staging(device)

    def start(
        self, shards: Shards, manifest: Manifest, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Starts a save, after an earlier one is finished. Collective.

        Returns when the shards are copied, or on a GPU an event behind the copies. `after`: the event of other copies,
        for which that one waits, too.
        """
        assert self.saving is None
        return self._begin(manifest, self.staging.take(shards, after), self._write)

    def _write(self, manifest: Manifest, shards: Shards) -> None:
        write(self.store, self.control, shards, manifest)

    def _after(self, saving: Saving) -> None:
        if saving.error is not None:
            saving.last_good = self._last_good()
        elif self.control.rank == 0:
            with suppress(OSError):  # the next save tries again
                retain(self.store, self.config.keep, self.config.keep_every)

    def _last_good(self) -> str:
        try:
            last = next((checkpoint for checkpoint in self.store.complete() if not checkpoint.misfits()), None)
        except OSError as error:
            return f"{self.store.directory} cannot be listed: {error.strerror}"
        return f"the last good one is {last.path.name}" if last else "there is none before it"


def write(store: Store, control: Control, shards: Shards, manifest: Manifest) -> Place:
    """Writes every rank's shards into a checkpoint, which is complete once it has its manifest. Collective."""
    needed, first = sum(control.all_gather_values(total(shards), int)), control.rank == 0
    name = agreed(control, lambda: _new_directory(store, manifest.step, needed).name if first else "")
    path = store.directory / control.broadcast_value(name, str)
    with _deleted_on_failure(store, path) if first else nullcontext():
        local = agreed(control, lambda: _write_local(path, control.rank, shards, manifest.step))
        written = control.gather_values(local, Written)
        agreed(control, lambda: _commit(store, path, manifest, written) if first else None)
    return path


def _write_local(path: Place, rank: int, shards: Shards, step: int) -> Written:
    faults.strike("write", step=step)
    return write_shards(path, rank, shards, for_files())


def merge_written(written: list[Written]) -> tuple[Tensors, list[File]]:
    """The tensors and files of all ranks; ValueError unless every element was written once."""
    tensors = merged([part.tensors for part in written])
    files = [file for part in written for file in part.files]
    check(tensors, {file.name: file.bytes for file in files})
    return tensors, files


def _commit(store: Store, path: Place, manifest: Manifest, written: list[Written]) -> None:
    tensors, files = merge_written(written)
    with store.storage.create(path / TABLE, heartbeat.beat) as table:
        table.write(msgspec.json.encode(tensors))
        files.append(table.finish())
    store.commit(path, msgspec.structs.replace(manifest, version=VERSION, files=files))


@contextmanager
def _deleted_on_failure(store: Store, path: Place) -> Iterator[None]:
    """Deletes an incomplete checkpoint if its writing fails; the next save tries again where that fails, too."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            store.discard(path)
        raise


def write_alone(
    store: Store, parts: Sequence[Shards], manifest: Manifest, progress: Progress = lambda _: None
) -> Place:
    """Writes a checkpoint in this process alone, one part after the other, as if by a rank for each of the `parts`.

    Only one part is in memory at a time. `progress` is called with the bytes that have been written.
    """
    path = _new_directory(store, manifest.step, sum(map(total, parts)))
    with _deleted_on_failure(store, path):
        written = []
        for rank, part in enumerate(parts):
            written.append(write_shards(path, rank, part))
            progress(total(part))
        _commit(store, path, manifest, written)
    return path


def _new_directory(store: Store, step: int, needed: int) -> Place:
    """A new directory for a checkpoint; OSError if fewer bytes are free than it takes."""
    path = store.new(step)
    free = store.storage.free(store.directory)
    if free is not None and free < needed:
        store.discard(path)
        raise OSError(f"it takes {bytes_text(needed)}, and {store.directory} has {bytes_text(free)} left")
    return path


def agreed(control: Control, do: Callable[[], T]) -> T:
    """Calls `do`, and returns this rank's result; if it failed on any rank, all raise NotSaved. Collective."""
    problem = ""
    try:
        result = do()
    except Exception as error:
        who = f"rank {control.rank}: " if control.size > 1 else ""
        why = error.strerror if isinstance(error, OSError) else None
        problem = f"{who}{why or str(error) or type(error).__name__}"
    if why := next(filter(None, control.all_gather_values(problem, str)), ""):
        raise NotSaved(why)
    return result
