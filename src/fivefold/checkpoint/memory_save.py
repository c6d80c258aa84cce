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
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint.memory import KEPT, NODE, copies, free, here, home, made_at, nodes_of
from fivefold.checkpoint.save import NotSaved, Saving, Written, agreed
from fivefold.checkpoint.shards import Pieces, dtype_name
from fivefold.checkpoint.staging import Snapshot, Staging, extent, starts
from fivefold.checkpoint.store import MANIFEST, Manifest, Store
from fivefold.checkpoint.tensors import TABLE, Chunk, Stored, check, merged, segment_sum, segments, total
from fivefold.launch import faults, heartbeat
from fivefold.launch.heartbeat import beat
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError
from fivefold.support.files import File
from fivefold.support.text import bytes_text

# ---- memory nodes ---------------------------------------------------------------------------------------------------
# The nodes on which a run's ranks are, and what they send each other of snapshots in memory.
#
# Copies travel over a gloo group of their own. The step's collectives have other groups, so that neither waits for the
# other whoever comes first; the store at which ranks met would carry all of it through one process. Where all ranks
# are on one node there is no such group, and nothing is sent.


_PIECE = 1 << 26  # bytes of a message
_SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, not one after the other


class Nodes:
    """All ranks make one together."""

    def __init__(self, control: Control, run: str, start: int, make: bool):
        """`start`: a number that is larger with every start of the run, and the same on all ranks."""
        self.control, self.rank, self.run, self.start = control, control.rank, run, start
        problem = ""
        try:
            self.home = home(run, make)
        except FileNotFoundError:  # nothing has been kept here
            self.home = Path(here()[1]) / run
            problem = f"{self.home.parent} cannot be made" if make else ""
        except OSError as error:
            problem = error.strerror or str(error)
        told = control.all_gather_values((*here(), problem), tuple[str, str, str])
        self.nodes = nodes_of([(host, place) for host, place, _ in told])
        self.node = next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)
        self.first = self.rank == self.nodes[self.node][0]
        self.problem = next((f"rank {rank}: {why}" for rank, (*_, why) in enumerate(told) if why), "")
        self.to = copies(self.nodes)
        self.group: Any = None
        if len(self.nodes) > 1 and not self.problem:
            self.problem = self._join()

    def _join(self) -> str:
        """Collective: the group of all ranks, or why there is none."""
        why = ""
        try:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.control.timeout))
        except RuntimeError as error:
            why = f"rank {self.rank} cannot reach the others over gloo: {str(error).splitlines()[0][:200]}"
        return next(filter(None, self.control.all_gather_values(why, str)), "")

    def broadcast(self, parts: list[bytes], source: int) -> list[bytes]:
        """Collective: the parts that `source` has, on every rank."""
        if self.group is None:
            return parts
        sizes = torch.tensor([len(part) for part in parts])
        dist.broadcast(sizes, source, group=self.group)
        data = _bytes(parts) if self.rank == source else torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.broadcast(data, source, group=self.group)
        return [bytes(part.numpy()) for part in data.split(sizes.tolist())]

    def all_to_all(self, parts: list[bytes]) -> list[bytes]:
        """Collective: a part for each rank; those that the ranks had for this one."""
        sent = torch.tensor([len(part) for part in parts])
        sizes = torch.empty_like(sent)
        dist.all_to_all_single(sizes, sent, group=self.group)
        found = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(found, _bytes(parts), sizes.tolist(), sent.tolist(), group=self.group)
        return [bytes(part.numpy()) for part in found.split(sizes.tolist())]

    def send(self, data: Tensor, to: int) -> list[Any]:
        """Begin to; each pair of ranks has one order of its messages."""
        return [dist.isend(piece, to, group=self.group) for piece in data.split(_PIECE)]

    def receive(self, into: Tensor, source: int) -> list[Any]:
        return [dist.irecv(piece, source, group=self.group) for piece in into.split(_PIECE)]


def _bytes(parts: list[bytes]) -> Tensor:
    whole = bytearray(b"".join(parts))
    return torch.frombuffer(whole or bytearray(1), dtype=torch.uint8)[: len(whole)]


def wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
        beat()


def new_memory(path: Path, size: int) -> mmap.mmap:
    """A new file, mapped. Its pages are there: one that is missing later would end the process."""
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


# ---- memory save ----------------------------------------------------------------------------------------------------


class WrittenPart(msgspec.Struct, frozen=True):
    """What a rank has written, or why it has not."""

    written: Written = Written([], {})
    problem: str = ""


@dataclass
class SnapshotSlot:
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


class SnapshotWriter:
    def __init__(self, nodes: Nodes, device: torch.device):
        self.nodes, self.device, self.store = nodes, device, Store(nodes.home)
        self.slots: list[SnapshotSlot] = []
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
        self.nodes.control.all_gather_values(None, None)
        self._free([path for path in self.taken if (path / MANIFEST).exists()])

    def _slot(self, pieces: Pieces) -> SnapshotSlot:
        for slot in self.slots:
            if slot.inside is None:
                return slot
        spare = self.nodes.home / f"rank-{self.nodes.rank}.{len(self.slots)}.slot"
        memory = new_memory(spare, extent(pieces))
        staging = Staging(self.device)
        staging.prepare(pieces, memory)
        self.slots.append(SnapshotSlot(spare, f"rank-{self.nodes.rank}.tensors", memory, staging))
        return self.slots[-1]

    def _write(self, saving: Saving, snapshot: Snapshot, slot: SnapshotSlot | None, problem: str) -> None:
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

    def _save(
        self, path: Path, manifest: Manifest, snapshot: Snapshot, slot: SnapshotSlot | None, problem: str
    ) -> None:
        control, tables, said = self.nodes.control, [b"", b""], ""
        mine = (
            self._own(path, snapshot, slot)
            if not problem
            else WrittenPart(problem=f"rank {self.nodes.rank}: {problem}")
        )
        parts = control.gather_values(mine, WrittenPart)
        if control.rank == 0:
            said = next((part.problem for part in parts if part.problem), "")
            try:
                tables = _tables(manifest, [part.written for part in parts]) if not said else tables
            except Exception as error:
                said = _why(error)
        if said := control.broadcast_value(said, str):
            raise NotSaved(said)
        if self.nodes.group is not None:
            own = tables
            tables = agreed(control, lambda: self.nodes.broadcast(own, 0))
            self._copy(path, msgspec.json.decode(tables[1], type=Manifest), slot)
        agreed(control, lambda: self._commit(path, tables, manifest.step) if self.nodes.first else None)

    def _own(self, path: Path, snapshot: Snapshot, slot: SnapshotSlot | None) -> WrittenPart:
        if slot is None:
            return WrittenPart()
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
            return WrittenPart(Written([File(slot.name, len(whole), total(sums))], tensors))
        except Exception as error:  # the others wait to hear of it
            return WrittenPart(problem=f"rank {self.nodes.rank}: {_why(error)}")

    def _copy(self, path: Path, manifest: Manifest, slot: SnapshotSlot | None) -> None:
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
