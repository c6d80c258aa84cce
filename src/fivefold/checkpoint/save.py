"""Saves checkpoints: copies the shards, writes their files in the background, then the manifest.

saver = Saver(store, control, config, device)
copied = saver.start(shards, manifest)     # then parameters may change; on a GPU, after this event
...
saver.finish()                             # waits for the one under way, and returns why it failed, else None
"""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import msgspec
import torch

from fivefold.checkpoint.async_save import BackgroundSaver, Saving, run_on_all_ranks
from fivefold.checkpoint.manifest import FORMAT_VERSION, Manifest
from fivefold.checkpoint.retention import retain
from fivefold.checkpoint.shards import Shard, Shards, raw
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import TABLE_FILE, Tensors, check, merge_tables
from fivefold.job.config import CheckpointConfig
from fivefold.launch import faults, heartbeat
from fivefold.launch.heartbeat import beat
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.support.files import File, Progress
from fivefold.support.storage_place import Place
from fivefold.support.text import bytes_text

MIN_FILE_BYTES = 1 << 28  # where a rank's shards are divided over several files


class Written(msgspec.Struct, frozen=True):
    """Files that are complete and synced, and the tensors in them."""

    files: list[File]
    tensors: Tensors


def write_shards(directory: Place, rank: int, shards: Shards, threads: int = 1) -> Written:
    """Writes a rank's shards into one file or, with several threads, more at a time. Hashes while it writes."""
    parts = divide(shards, threads)
    suffixes = [f".{number}" for number in range(len(parts))] if len(parts) > 1 else [""]
    paths = [directory / f"rank-{rank}{suffix}.tensors" for suffix in suffixes]
    try:
        written = side_by_side(lambda part: _write_file(*part), list(zip(paths, parts, strict=False)), threads)
    except OSError as error:
        raise OSError(_write_error(error, directory, total(shards))) from None
    return Written([file for file, _ in written], merge_tables([tensors for _, tensors in written]))


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
    """The shards of each file: about equal in bytes, and none small."""
    count = max(1, min(max_files, total(shards) // MIN_FILE_BYTES, len(shards)))
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
        free_bytes = storage_of(directory).free_bytes(directory)
        free = f"{bytes_text(free_bytes)} are free there" if free_bytes is not None else ""
    except OSError as access_error:
        free = f"it cannot be accessed: {access_error.strerror}"
    if not free:  # object storage, whose errors have the server's own words
        return f"{error.strerror or error}: {bytes_text(needed)} go into {directory}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit_text = f", files may have {bytes_text(limit)}" if limit != resource.RLIM_INFINITY else ""
    return f"{reason}: {bytes_text(needed)} go into {directory}, {free}{limit_text}"


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

        Returns when the shards are copied; on a GPU, returns an event recorded after the copies. `after`: an event of
        other copies, which must also be complete before the returned one.
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
    name = run_on_all_ranks(control, lambda: _new_directory(store, manifest.step, needed).name if first else "")
    path = store.directory / control.broadcast_value(name, str)
    with _deleted_on_failure(store, path) if first else nullcontext():
        local = run_on_all_ranks(control, lambda: _write_local(path, control.rank, shards, manifest.step))
        written = control.gather_values(local, Written)
        run_on_all_ranks(control, lambda: _commit(store, path, manifest, written) if first else None)
    return path


def _write_local(path: Place, rank: int, shards: Shards, step: int) -> Written:
    faults.strike("write", step=step)
    return write_shards(path, rank, shards, for_files())


def merge_written(written: list[Written]) -> tuple[Tensors, list[File]]:
    """The tensors and files of all ranks; ValueError unless every element was written once."""
    tensors = merge_tables([part.tensors for part in written])
    files = [file for part in written for file in part.files]
    check(tensors, {file.name: file.bytes for file in files})
    return tensors, files


def _commit(store: Store, path: Place, manifest: Manifest, written: list[Written]) -> None:
    tensors, files = merge_written(written)
    with store.storage.create(path / TABLE_FILE, heartbeat.beat) as table:
        table.write(msgspec.json.encode(tensors))
        files.append(table.finish())
    store.commit(path, msgspec.structs.replace(manifest, version=FORMAT_VERSION, files=files))


@contextmanager
def _deleted_on_failure(store: Store, path: Place) -> Iterator[None]:
    """Deletes an incomplete checkpoint if writing it fails; if that fails as well, the next save tries again."""
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
    free = store.storage.free_bytes(store.directory)
    if free is not None and free < needed:
        store.discard(path)
        raise OSError(f"it takes {bytes_text(needed)}, and {store.directory} has {bytes_text(free)} left")
    return path
