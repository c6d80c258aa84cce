"""A rank's part of snapshots in memory: its pieces are copied right into a file that outlives the process.

writer = SnapshotWriter(nodes, device)
copied = writer.start(pieces, manifest)    # parameters may change from there on; on a GPU, behind this event
...
writer.finish()                            # waits for the one under way, and says why it was not taken, if it was not

A rank has up to three files: those of the two newest snapshots, and the one being filled. They are reused, because
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

from fivefold.checkpoint.memory import KEPT, NODE, free, made_at
from fivefold.checkpoint.memory_peers import Nodes, wait
from fivefold.checkpoint.save import BackgroundSaver, Saving, Written, agreed, together
from fivefold.checkpoint.shards import Pieces
from fivefold.checkpoint.staging import Snapshot, Staging, extent, starts
from fivefold.checkpoint.store import MANIFEST, Manifest, Store
from fivefold.checkpoint.tensors import TABLE, segment_sum, segments, total
from fivefold.launch import faults, heartbeat
from fivefold.launch.host import for_files, side_by_side
from fivefold.support.files import File
from fivefold.support.text import bytes_text

_SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, not one after the other


def new_memory(path: Path, size: int) -> mmap.mmap:
    """A new file, mapped, with all pages allocated: one missing later would kill the process (SIGBUS)."""
    if (room := free(path.parent)) < size:
        raise OSError(f"it takes {bytes_text(size)}, and {path.parent} has {bytes_text(max(0, room))} to spare")
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
    """One file of this rank's. It lies in a snapshot, or next to all of them."""

    spare: Path
    name: str  # in a snapshot
    memory: mmap.mmap
    staging: Staging
    inside: Path | None = None

    def enter(self, snapshot: Path) -> None:
        snapshot.mkdir(mode=0o700, exist_ok=True)
        self.spare.rename(snapshot / self.name)
        self.inside = snapshot

    def leave(self) -> None:
        if self.inside is not None:
            (self.inside / self.name).rename(self.spare)
            self.inside = None


class SnapshotWriter(BackgroundSaver):
    what, failed = "snapshot", "no snapshot was taken into memory after step {step}"

    def __init__(self, nodes: Nodes, device: torch.device):
        super().__init__()
        self.nodes, self.device, self.store = nodes, device, Store(nodes.snapshot_dir)
        self.slots: list[SnapshotSlot] = []
        self.filling: SnapshotSlot | None = None  # by the snapshot under way
        self.refused: OSError | None = None  # why there is no slot for it
        self.count = 0  # of snapshots begun: all ranks count the same
        self.taken: list[Path] = []  # those of this start, the newest last

    def start(
        self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Collective. An earlier one must be finished."""
        assert self.saving is None
        self.filling, self.refused, snapshot = None, None, Snapshot({}, self.device, after)
        try:
            if pieces:
                self.filling = self._slot(pieces)
                snapshot = self.filling.staging.take(pieces, after)
        except OSError as error:
            self.refused = error
        self.count += 1
        return self._begin(manifest, snapshot, self._write)

    def forget(self, step: int | None = None) -> None:
        """Collective: no snapshot after a step counts any more; without one, none at all, and all memory is given
        back. None may be under way."""
        if step is None:
            if self.nodes.first:
                shutil.rmtree(self.nodes.snapshot_dir, ignore_errors=True)
            return
        if self.nodes.first:
            for snapshot in self.store.complete():
                if snapshot.step > step:
                    (self.nodes.snapshot_dir / snapshot.path.name / MANIFEST).unlink(missing_ok=True)
        self.nodes.control.all_gather_values(None, None)
        self._free([path for path in self.taken if (path / MANIFEST).exists()])

    def _slot(self, pieces: Pieces) -> SnapshotSlot:
        for slot in self.slots:
            if slot.inside is None:
                return slot
        spare = self.nodes.snapshot_dir / f"rank-{self.nodes.rank}.{len(self.slots)}.slot"
        memory = new_memory(spare, extent(pieces))
        staging = Staging(self.device)
        staging.prepare(pieces, memory)
        self.slots.append(SnapshotSlot(spare, f"rank-{self.nodes.rank}.tensors", memory, staging))
        return self.slots[-1]

    def _path(self, step: int) -> Path:
        """Of the snapshot under way."""
        return self.nodes.snapshot_dir / f"step-{step:08d}.{self.nodes.start + self.count}"

    def _after(self, saving: Saving) -> None:
        if saving.error is None:
            self._free([*self.taken, self._path(saving.manifest.step)][-KEPT:])
        elif self.filling is not None:
            self.filling.leave()

    def _free(self, kept: list[Path]) -> None:
        self.taken = kept
        for slot in self.slots:
            if slot.inside not in kept:
                slot.leave()

    def _write(self, manifest: Manifest, pieces: Pieces) -> None:
        control, nodes, path = self.nodes.control, self.nodes, self._path(manifest.step)
        local = agreed(control, lambda: self._checksum_own_file(path, pieces))
        written = control.gather_values(local, Written)
        tables = agreed(control, lambda: _tables(manifest, written) if control.rank == 0 else [b"", b""])
        if nodes.group is not None:
            of_first = tables
            tables = agreed(control, lambda: nodes.broadcast(of_first, 0))
            self._copy_to_peers(path, msgspec.json.decode(tables[1], type=Manifest))
        agreed(control, lambda: self._commit(path, tables, manifest.step) if nodes.first else None)

    def _checksum_own_file(self, path: Path, pieces: Pieces) -> Written:
        """Move this rank's file into the snapshot, and checksum it."""
        if self.refused is not None:
            raise self.refused
        if (slot := self.filling) is None:
            return Written([], {})
        slot.enter(path)
        data, begins = memoryview(slot.memory), starts(pieces)

        def read(start: int, size: int) -> memoryview:
            heartbeat.beat()
            return data[start : start + size]

        parts = segments((start, pieces[name].nbytes) for name, start in begins.items())
        sums = side_by_side(lambda part: segment_sum(part, read), parts, for_files())
        tensors = {name: pieces[name].stored(slot.name, start) for name, start in begins.items()}
        return Written([File(slot.name, len(data), total(sums))], tensors)

    def _copy_to_peers(self, path: Path, manifest: Manifest) -> None:
        """Collective: send this rank's file to a rank of the next node, and receive those sent to this one."""
        nodes, sizes = self.nodes, {file.name: file.bytes for file in manifest.files}
        sources = {rank: f"rank-{rank}.tensors" for rank, to in nodes.to.items() if to == nodes.rank}
        path.mkdir(mode=0o700, exist_ok=True)
        received = agreed(
            nodes.control,
            lambda: {rank: new_memory(path / name, sizes[name]) for rank, name in sources.items() if name in sizes},
        )

        def exchange() -> None:
            works = nodes.send(tensor_of(self.filling.memory), nodes.to[nodes.rank]) if self.filling is not None else []
            for rank, memory in received.items():
                works += nodes.receive(tensor_of(memory), rank)
            wait(works)

        agreed(nodes.control, exchange)

    def _commit(self, path: Path, tables: list[bytes], step: int) -> None:
        """By the first rank of a node: make the snapshot valid there, and invalidate all but the newest."""
        path.mkdir(mode=0o700, exist_ok=True)
        partial = path / f"{MANIFEST}.half"
        place = msgspec.json.encode((self.nodes.node, len(self.nodes.nodes)))
        for file, content in ((path / TABLE, tables[0]), (path / NODE, place), (partial, tables[1])):
            file.write_bytes(content)
        faults.strike("memory", step=step)
        for old in self.store.incomplete():
            if old != path:
                self.store.storage.delete(old)
        partial.rename(path / MANIFEST)
        for snapshot in sorted(self.store.complete(), key=lambda snapshot: made_at(snapshot.path.name))[:-KEPT]:
            os.unlink(self.nodes.snapshot_dir / snapshot.path.name / MANIFEST)


def _tables(manifest: Manifest, written: list[Written]) -> list[bytes]:
    """What lies where, and the manifest, as files."""
    tensors, files = together(written)
    table = msgspec.json.encode(tensors)
    files.append(File(TABLE, len(table), hashlib.sha256(table).hexdigest()))
    return [table, msgspec.structs.replace(manifest, files=files).text()]
