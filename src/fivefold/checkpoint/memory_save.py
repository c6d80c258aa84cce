"""Saving into memory: a rank's pieces are copied right into the file that outlives it; the rest is in the background.

keeper = Keeper(nodes, device)
copied = keeper.start(pieces, manifest)    # parameters may change from there on; on a GPU, behind this event
...
keeper.finish()                            # waits for the one under way, and says why it was not taken, if it was not

A rank has up to three files: those of the two newest snapshots, and the one that is being filled. They are used again,
as pages that are there take a copy at the pace of memory. A snapshot loses its manifest before its files are.
"""

import hashlib
import mmap
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fivefold.checkpoint.host_staging import Snapshot, Staging, extent, starts
from fivefold.checkpoint.memory import KEPT, NODE, made_at
from fivefold.checkpoint.memory_nodes import Nodes, new_memory, tensor_of, wait
from fivefold.checkpoint.pieces import Pieces, dtype_name
from fivefold.checkpoint.save import NotSaved, Saving, agreed
from fivefold.checkpoint.store import MANIFEST, Manifest, Store
from fivefold.checkpoint.sums import segment_sum, segments, total
from fivefold.checkpoint.tensors import TABLE, Chunk, Stored, check, merged
from fivefold.checkpoint.writer import Written
from fivefold.launch import faults, heartbeat
from fivefold.launch.cores import for_files, side_by_side
from fivefold.support.errors import TrainingError
from fivefold.support.files import File


class Part(msgspec.Struct, frozen=True):
    """What a rank has written, or why it has not."""

    written: Written = Written([], {})
    problem: str = ""


@dataclass
class Slot:
    """One file of this rank's. It lies in a snapshot, or beside all of them."""

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


class Keeper:
    def __init__(self, nodes: Nodes, device: torch.device):
        self.nodes, self.device, self.store = nodes, device, Store(nodes.home)
        self.slots: list[Slot] = []
        self.saving: Saving | None = None
        self.thread = threading.Thread()
        self.count = 0  # of snapshots begun: all ranks count the same
        self.taken: list[Path] = []  # those of this start, the newest last

    def start(
        self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Collective. An earlier one must be finished."""
        assert self.saving is None
        slot, problem, snapshot = None, "", Snapshot({}, self.device, after)
        try:
            slot = self._slot(pieces) if pieces else None
            snapshot = slot.staging.take(pieces, after) if slot else snapshot
        except OSError as error:
            problem = _why(error)
        self.saving, self.count = Saving(manifest), self.count + 1
        arguments = (self.saving, snapshot, slot, problem)
        self.thread = threading.Thread(target=self._write, args=arguments, name="memory", daemon=True)
        self.thread.start()
        return snapshot.copied

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def finish(self) -> str | None:
        """Wait for the one under way; all ranks get the same: why it was not taken, if it was not."""
        if self.saving is None:
            return None
        self.thread.join()
        saving, self.saving = self.saving, None
        if saving.error is None:
            return None
        if isinstance(saving.error, TrainingError):
            raise saving.error
        said = f"no snapshot was taken into memory after step {saving.manifest.step}: {saving.error}"
        if not isinstance(saving.error, NotSaved):
            raise TrainingError(said) from saving.error
        return said

    def forget(self, step: int | None = None) -> None:
        """Collective: no snapshot after a step counts any more; without one, none at all, and all memory is given
        back. None may be under way."""
        if step is None:
            if self.nodes.first:
                shutil.rmtree(self.nodes.home, ignore_errors=True)
            return
        if self.nodes.first:
            for one in self.store.complete():
                if one.step > step:
                    (self.nodes.home / one.path.name / MANIFEST).unlink(missing_ok=True)
        self.nodes.control.from_all(None, None)
        self._free([path for path in self.taken if (path / MANIFEST).exists()])

    def _slot(self, pieces: Pieces) -> Slot:
        for slot in self.slots:
            if slot.inside is None:
                return slot
        spare = self.nodes.home / f"rank-{self.nodes.rank}.{len(self.slots)}.slot"
        memory = new_memory(spare, extent(pieces))
        staging = Staging(self.device)
        staging.prepare(pieces, memory)
        self.slots.append(Slot(spare, f"rank-{self.nodes.rank}.tensors", memory, staging))
        return self.slots[-1]

    def _write(self, saving: Saving, snapshot: Snapshot, slot: Slot | None, problem: str) -> None:
        """In the background."""
        step = saving.manifest.step
        heartbeat.enter(f"the snapshot of step {step}")
        path = self.nodes.home / f"step-{step:08d}.{self.nodes.start + self.count}"
        try:
            snapshot.arrive()
            self._save(path, saving.manifest, snapshot, slot, problem)
        except BaseException as error:
            saving.error = error
            if slot is not None:
                slot.leave()
        else:
            self.taken.append(path)
            self._free(self.taken[-KEPT:])
        finally:
            heartbeat.enter("")

    def _free(self, kept: list[Path]) -> None:
        self.taken = kept
        for slot in self.slots:
            if slot.inside not in kept:
                slot.leave()

    def _save(self, path: Path, manifest: Manifest, snapshot: Snapshot, slot: Slot | None, problem: str) -> None:
        control, tables, said = self.nodes.control, [b"", b""], ""
        mine = self._own(path, snapshot, slot) if not problem else Part(problem=f"rank {self.nodes.rank}: {problem}")
        parts = control.to_first(mine, Part)
        if control.rank == 0:
            said = next((part.problem for part in parts if part.problem), "")
            try:
                tables = _tables(manifest, [part.written for part in parts]) if not said else tables
            except Exception as error:
                said = _why(error)
        if said := control.from_first(said, str):
            raise NotSaved(said)
        if self.nodes.group is not None:
            own = tables
            tables = agreed(control, lambda: self.nodes.broadcast(own, 0))
            self._copy(path, msgspec.json.decode(tables[1], type=Manifest), slot)
        agreed(control, lambda: self._commit(path, tables, manifest.step) if self.nodes.first else None)

    def _own(self, path: Path, snapshot: Snapshot, slot: Slot | None) -> Part:
        if slot is None:
            return Part()
        try:
            slot.enter(path)
            tensors = {}
            for name, start in starts(snapshot.pieces).items():
                piece = snapshot.pieces[name]
                chunk = Chunk(tuple(side.start for side in piece.box), piece.sizes, slot.name, start, piece.nbytes)
                tensors[name] = Stored(tuple(piece.shape), dtype_name(piece.dtype), (chunk,))
            whole = memoryview(slot.memory)

            def read(start: int, size: int) -> memoryview:
                heartbeat.beat()
                return whole[start : start + size]

            parts = segments((start, snapshot.pieces[name].nbytes) for name, start in starts(snapshot.pieces).items())
            sums = side_by_side(lambda part: segment_sum(part, read), parts, for_files())
            return Part(Written([File(slot.name, len(whole), total(sums))], tensors))
        except Exception as error:  # the others wait to hear of it
            return Part(problem=f"rank {self.nodes.rank}: {_why(error)}")

    def _copy(self, path: Path, manifest: Manifest, slot: Slot | None) -> None:
        """Collective: this rank's file to a rank of the next node, and those that others have for this one."""
        nodes, sizes = self.nodes, {file.name: file.bytes for file in manifest.files}
        sources = {rank: f"rank-{rank}.tensors" for rank, to in nodes.to.items() if to == nodes.rank}
        path.mkdir(mode=0o700, exist_ok=True)
        rooms = agreed(
            nodes.control,
            lambda: {rank: new_memory(path / name, sizes[name]) for rank, name in sources.items() if name in sizes},
        )

        def exchange() -> None:
            works = nodes.send(tensor_of(slot.memory), nodes.to[nodes.rank]) if slot is not None else []
            for rank, memory in rooms.items():
                works += nodes.receive(tensor_of(memory), rank)
            wait(works)

        agreed(nodes.control, exchange)

    def _commit(self, path: Path, tables: list[bytes], step: int) -> None:
        """By the first rank of a node: the snapshot counts there, and those before the last one no longer do."""
        path.mkdir(mode=0o700, exist_ok=True)
        half = path / f"{MANIFEST}.half"
        place = msgspec.json.encode((self.nodes.node, len(self.nodes.nodes)))
        for file, content in ((path / TABLE, tables[0]), (path / NODE, place), (half, tables[1])):
            file.write_bytes(content)
        faults.strike("memory", step=step)
        for old in self.store.incomplete():
            if old != path:
                self.store.storage.delete(old)
        half.rename(path / MANIFEST)
        for one in sorted(self.store.complete(), key=lambda one: made_at(one.path.name))[:-KEPT]:
            os.unlink(self.nodes.home / one.path.name / MANIFEST)


def _tables(manifest: Manifest, written: list[Written]) -> list[bytes]:
    """What lies where, and the manifest, as files."""
    tensors = merged([one.tensors for one in written])
    files = [file for one in written for file in one.files]
    check(tensors, {file.name: file.bytes for file in files})
    table = msgspec.json.encode(tensors)
    files.append(File(TABLE, len(table), hashlib.sha256(table).hexdigest()))
    return [table, msgspec.structs.replace(manifest, files=files).text()]


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
