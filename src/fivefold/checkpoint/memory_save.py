"""Writes snapshots in memory: a rank copies its shards into a file in host memory that outlives the process.

writer = SnapshotWriter(nodes, device)
copied = writer.start(shards, manifest)    # then parameters may change; on a GPU, after this event
...
writer.finish()                            # waits for the one under way, and returns why it failed, else None

A rank has up to three files: two in the newest two snapshots, and one being filled. They are reused, because
resident pages are written at memory speed. A snapshot loses its manifest before its files are reused.
"""

import hashlib
import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fivefold.checkpoint.async_save import BackgroundSaver, Saving, run_on_all_ranks
from fivefold.checkpoint.checksums import checksum_of_sums, segment_sum, segments
from fivefold.checkpoint.manifest import MANIFEST, Manifest
from fivefold.checkpoint.memory_peers import Nodes, wait
from fivefold.checkpoint.memory_snapshots import KEEP_LAST, NODE_FILE, free_bytes, made_at
from fivefold.checkpoint.save import Written, merge_written
from fivefold.checkpoint.shards import Shards
from fivefold.checkpoint.staging import Snapshot, Staging, extent, starts
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import TABLE_FILE
from fivefold.launch import faults, heartbeat
from fivefold.launch.host import for_files, side_by_side
from fivefold.support.files import File
from fivefold.support.text import bytes_text

_SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once


def new_memory(path: Path, size: int) -> mmap.mmap:
    """A new file, mapped, with all pages allocated: a missing page would later kill the process (SIGBUS)."""
    if (available := free_bytes(path.parent)) < size:
        raise OSError(f"it takes {bytes_text(size)}, and {path.parent} has {bytes_text(max(0, available))} to spare")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size, flags=_SHARED)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(handle)


def tensor_of(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class SnapshotSlot:
    """One of this rank's files: in a snapshot, or, while no snapshot uses it, next to them."""

    spare: Path  # its path while no snapshot uses it
    name: str  # its name in a snapshot
    memory: mmap.mmap
    staging: Staging
    snapshot: Path | None = None  # the directory of the snapshot that uses it

    def enter(self, snapshot: Path) -> None:
        snapshot.mkdir(mode=0o700, exist_ok=True)
        self.spare.rename(snapshot / self.name)
        self.snapshot = snapshot

    def leave(self) -> None:
        if self.snapshot is not None:
            (self.snapshot / self.name).rename(self.spare)
            self.snapshot = None


class SnapshotWriter(BackgroundSaver):
    what, failed = "snapshot", "no snapshot was taken into memory after step {step}"

    def __init__(self, nodes: Nodes, device: torch.device):
        super().__init__()
        self.nodes, self.device, self.store = nodes, device, Store(nodes.snapshot_dir)
        self.slots: list[SnapshotSlot] = []
        self.current_slot: SnapshotSlot | None = None  # of the snapshot under way
        self.slot_error: OSError | None = None  # why there is no slot for it
        self.count = 0  # of snapshots begun, the same on all ranks
        self.snapshots: list[Path] = []  # the valid ones of this start, the newest last

    def start(
        self, shards: Shards, manifest: Manifest, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Starts a snapshot, after an earlier one is finished; see `MemoryCheckpointer.start`. Collective."""
        assert self.saving is None
        self.current_slot, self.slot_error, snapshot = None, None, Snapshot({}, self.device, after)
        try:
            if shards:
                self.current_slot = self._slot(shards)
                snapshot = self.current_slot.staging.take(shards, after)
        except OSError as error:
            self.slot_error = error
        self.count += 1
        return self._begin(manifest, snapshot, self._write)

    def forget(self, step: int | None = None) -> None:
        """Invalidates the snapshots after `step`; with None deletes all, and frees the memory. Collective.

        None may be under way.
        """
        if step is None:
            if self.nodes.first:
                shutil.rmtree(self.nodes.snapshot_dir, ignore_errors=True)
            return
        if self.nodes.first:
            for snapshot in self.store.complete():
                if snapshot.step > step:
                    (self.nodes.snapshot_dir / snapshot.path.name / MANIFEST).unlink(missing_ok=True)
        self.nodes.control.all_gather_values(None, None)
        self._free([path for path in self.snapshots if (path / MANIFEST).exists()])

    def _slot(self, shards: Shards) -> SnapshotSlot:
        """A slot that no snapshot uses, or a new one."""
        for slot in self.slots:
            if slot.snapshot is None:
                return slot
        spare = self.nodes.snapshot_dir / f"rank-{self.nodes.rank}.{len(self.slots)}.slot"
        memory = new_memory(spare, extent(shards))
        staging = Staging(self.device)
        staging.prepare(shards, memory)
        self.slots.append(SnapshotSlot(spare, f"rank-{self.nodes.rank}.tensors", memory, staging))
        return self.slots[-1]

    def _path(self, step: int) -> Path:
        """The directory of the snapshot under way."""
        return self.nodes.snapshot_dir / f"step-{step:08d}.{self.nodes.start + self.count}"

    def _after(self, saving: Saving) -> None:
        if saving.error is None:
            self._free([*self.snapshots, self._path(saving.manifest.step)][-KEEP_LAST:])
        elif self.current_slot is not None:
            self.current_slot.leave()

    def _free(self, kept: list[Path]) -> None:
        """Takes the slots out of all snapshots but those that are kept."""
        self.snapshots = kept
        for slot in self.slots:
            if slot.snapshot not in kept:
                slot.leave()

    def _write(self, manifest: Manifest, shards: Shards) -> None:
        control, nodes, path = self.nodes.control, self.nodes, self._path(manifest.step)
        local = run_on_all_ranks(control, lambda: self._checksum_own_file(path, shards))
        written = control.gather_values(local, Written)
        tables = run_on_all_ranks(control, lambda: _tables(manifest, written) if control.rank == 0 else [b"", b""])
        if nodes.group is not None:
            own_tables = tables
            tables = run_on_all_ranks(control, lambda: nodes.broadcast(own_tables, 0))
            self._copy_to_peers(path, msgspec.json.decode(tables[1], type=Manifest))
        run_on_all_ranks(control, lambda: self._commit(path, tables, manifest.step) if nodes.first else None)

    def _checksum_own_file(self, path: Path, shards: Shards) -> Written:
        """Moves this rank's file into the snapshot, and computes its checksum."""
        if self.slot_error is not None:
            raise self.slot_error
        if (slot := self.current_slot) is None:
            return Written([], {})
        slot.enter(path)
        data, offsets = memoryview(slot.memory), starts(shards)

        def read(start: int, size: int) -> memoryview:
            heartbeat.beat()
            return data[start : start + size]

        parts = segments((start, shards[name].nbytes) for name, start in offsets.items())
        sums = side_by_side(lambda part: segment_sum(part, read), parts, for_files())
        tensors = {name: shards[name].stored(slot.name, start) for name, start in offsets.items()}
        return Written([File(slot.name, len(data), checksum_of_sums(sums))], tensors)

    def _copy_to_peers(self, path: Path, manifest: Manifest) -> None:
        """Sends this rank's file to a rank of the next node, and receives those sent to this one. Collective."""
        nodes, sizes = self.nodes, {file.name: file.bytes for file in manifest.files}
        sources = {rank: f"rank-{rank}.tensors" for rank, to in nodes.copy_to.items() if to == nodes.rank}
        path.mkdir(mode=0o700, exist_ok=True)
        received = run_on_all_ranks(
            nodes.control,
            lambda: {rank: new_memory(path / name, sizes[name]) for rank, name in sources.items() if name in sizes},
        )

        def exchange() -> None:
            works = (
                nodes.send(tensor_of(self.current_slot.memory), nodes.copy_to[nodes.rank])
                if self.current_slot is not None
                else []
            )
            for rank, memory in received.items():
                works += nodes.receive(tensor_of(memory), rank)
            wait(works)

        run_on_all_ranks(nodes.control, exchange)

    def _commit(self, path: Path, tables: list[bytes], step: int) -> None:
        """Makes the snapshot valid on this node, and invalidates all but the newest; on the first rank of a node."""
        path.mkdir(mode=0o700, exist_ok=True)
        partial = path / f"{MANIFEST}.half"
        node = msgspec.json.encode((self.nodes.node, len(self.nodes.nodes)))
        for file, content in ((path / TABLE_FILE, tables[0]), (path / NODE_FILE, node), (partial, tables[1])):
            file.write_bytes(content)
        faults.strike("memory", step=step)
        for old in self.store.incomplete():
            if old != path:
                self.store.storage.delete(old)
        partial.rename(path / MANIFEST)
        for snapshot in sorted(self.store.complete(), key=lambda snapshot: made_at(snapshot.path.name))[:-KEEP_LAST]:
            os.unlink(self.nodes.snapshot_dir / snapshot.path.name / MANIFEST)


def _tables(manifest: Manifest, written: list[Written]) -> list[bytes]:
    """The contents of [tensors.json, manifest.json]."""
    tensors, files = merge_written(written)
    table = msgspec.json.encode(tensors)
    files.append(File(TABLE_FILE, len(table), hashlib.sha256(table).hexdigest()))
    return [table, msgspec.structs.replace(manifest, files=files).text()]
