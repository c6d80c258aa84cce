"""The restore: which snapshots all nodes together have, and their numbers into the ranks of any layout.

    memory = MemoryCheckpointer(control, say)
    memory.enter(mesh, run, wanted=True)                   # where there is nothing to keep or to find it does nothing
    memory.load(memory.find(usable), pieces)               # of the newest that is what its manifest says
    memory.start(pieces, manifest)                         # takes the next one
    memory.close()

A rank reads what lies on its own node from there, and asks one rank of another node for the rest. Every copy that is
read is hashed by one rank of its node, block by block, on the way: what is hashed is still in the cache when it is
copied. What is wrong is known before anybody trains on it.
"""

import re
import time
from bisect import bisect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fivefold.checkpoint.load import RowOverlap, Say, overlaps
from fivefold.checkpoint.memory import NODE, Candidate, Listing, candidates, clear, known, listing, new_id
from fivefold.checkpoint.memory_peers import Nodes, wait
from fivefold.checkpoint.memory_save import SnapshotWriter
from fivefold.checkpoint.save import NotSaved, agreed
from fivefold.checkpoint.shards import Pieces, raw
from fivefold.checkpoint.store import MANIFEST, Checkpoint, Manifest, altered
from fivefold.checkpoint.tensors import TABLE, Extent, extents, segment_sum, segments, total
from fivefold.launch import faults
from fivefold.launch.heartbeat import beat
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.files import File, Regular, open_regular, plain_name, read_regular
from fivefold.support.places import Place

_NUMBER = re.compile(r"rank-(\d+)\.")


class CorruptFile(msgspec.Struct, frozen=True):
    """Something wrong with a node's copy of a file."""

    node: int
    file: str
    why: str


class ByteRequest(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that another rank is asked for."""

    file: str
    start: int
    bytes: int


def _find(nodes: Nodes, say: Say, usable: Callable[[Candidate], bool]) -> list[Candidate]:
    """Collective: all that are whole, the newest first. Rank 0 says which are not, and leaves out those that are not
    `usable`."""
    by_rank = nodes.control.gather_values(listing(nodes.snapshot_dir) if nodes.first else Listing(), Listing)
    complete: list[Candidate] = []
    if nodes.rank == 0:
        by_node = [by_rank[ranks[0]] for ranks in nodes.nodes]
        for problem in (problem for node in by_node for problem in node.problems):
            say(f"{problem}; snapshots there are not used")
        for candidate in filter(usable, candidates([node.snapshots for node in by_node])):
            if gone := candidate.missing:
                named = ", ".join(gone[:4]) + f" and {len(gone) - 4} more" * (len(gone) > 4)
                lacks = f"no node has {named} of {candidate.name}"
                say(f"step {candidate.step} in memory is not whole: {lacks}; it is not used")
            else:
                complete.append(candidate)
    return nodes.control.broadcast_value(complete, list[Candidate])


def _open(nodes: Nodes, snapshot: Candidate) -> Checkpoint:
    """Collective: a node that has nothing of a snapshot gets its tables, and so can ask for the rest."""
    path = nodes.snapshot_dir / snapshot.name
    if nodes.group is None or len(snapshot.manifests) == len(nodes.nodes):
        return Checkpoint(path)
    source = nodes.nodes[snapshot.manifests[0]][0]
    names, parts = (TABLE, NODE, MANIFEST), [b"", b"", b""]
    if nodes.rank == source:
        with suppress(OSError):  # what is missing then is told where it is looked for
            parts = [read_regular(path / name, 1 << 40) for name in names]
    parts = nodes.broadcast(parts, source)
    if nodes.first and nodes.node not in snapshot.manifests:
        with suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            for name, part in zip(names, parts, strict=True):
                (path / name).write_bytes(part)
    nodes.control.all_gather_values(None, None)
    return Checkpoint(path)


class SnapshotReading(NamedTuple):
    """What one rank does for a snapshot."""

    near: list[str]  # files with what it wants that lie on this node
    far: dict[int, list[RowOverlap]]  # what it wants of others, by whom it is asked of
    hashed: list[str]  # files of this node for whose bytes this rank answers


def answers(file: str, ranks: list[int]) -> int:
    """Which rank of a node hashes a file, and sends what other nodes ask for: if it can be, the one that wrote it."""
    match = _NUMBER.match(file)
    number = int(match[1]) if match else 0
    return number if number in ranks else ranks[number % len(ranks)]


Wanted = Callable[[Checkpoint], Pieces]  # what a rank fills from a checkpoint that is one of its model


def _load(
    nodes: Nodes, snapshot: Candidate, checkpoint: Checkpoint, pieces: Wanted, *, full: bool
) -> list[CorruptFile]:
    """Collective: fill the pieces' memory; all ranks get the same list. `full`: also what nobody wants is hashed."""
    faults.strike("read")
    wanted, corrupt = dict[str, list[RowOverlap]](), list[CorruptFile]()
    promised = dict[str, File]()
    try:
        promised, _ = {file.name: file for file in checkpoint.manifest.files}, checkpoint.tensors
    except UserError as error:
        corrupt = [CorruptFile(nodes.node, MANIFEST, str(error))]
    else:
        wanted = overlaps(checkpoint, pieces(checkpoint))
    reading = _divided(nodes, snapshot, wanted, full=full)
    files = _Files(nodes.snapshot_dir / snapshot.name)
    works, rows = _exchange(nodes, reading, files)
    for file in dict.fromkeys((*reading.hashed, *reading.near)) if not corrupt else ():
        place, hashed = checkpoint.path / file, file in reading.hashed
        try:
            got = _read(files[file], wanted.get(file, []), extents(checkpoint.tensors, file) if hashed else [])
        except OSError as error:
            corrupt.append(CorruptFile(nodes.node, file, f"{place} cannot be read: {error.strerror or error}"))
            continue
        if hashed and got != promised[file].sha256:
            corrupt.append(CorruptFile(nodes.node, file, altered(place, got, promised[file])))
    if nodes.group is not None:
        agreed(nodes.control, lambda: wait(works))
        for overlap, part in rows:
            overlap.put(part)
    by_rank = nodes.control.all_gather_values(corrupt, list[CorruptFile])
    return list(dict.fromkeys(bad for rank in by_rank for bad in rank))


def _divided(nodes: Nodes, snapshot: Candidate, wanted: dict[str, list[RowOverlap]], *, full: bool) -> SnapshotReading:
    """Collective: who reads what from where."""
    near = [file for file in wanted if nodes.node in snapshot.files[file]]
    far: dict[int, list[RowOverlap]] = {}
    for file, of_file in wanted.items():
        if file not in near:
            holders = snapshot.files[file]
            holder = holders[nodes.node % len(holders)]  # two nodes that ask may ask two
            far.setdefault(answers(file, nodes.nodes[holder]), []).extend(of_file)
    ranks = nodes.nodes[nodes.node]
    if nodes.group is None or full:
        used = {file for file, holders in snapshot.files.items() if file != TABLE and nodes.node in holders}
    else:
        asked = [(rank, file) for rank, rest in far.items() for file in {overlap.chunk.file for overlap in rest}]
        asked += [(nodes.rank, file) for file in near]
        by_rank = nodes.control.all_gather_values(asked, list[tuple[int, str]])
        used = {file for of_rank in by_rank for rank, file in of_rank if rank in ranks}
    hashed = [file for file in snapshot.files if file in used and answers(file, ranks) == nodes.rank]
    return SnapshotReading(near, far, hashed)


class _Files(dict[str, Regular]):
    """Those of this node, opened when they are asked for."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def __missing__(self, file: str) -> Regular:
        self[file] = open_regular(self.path / file)
        return self[file]


def _exchange(
    nodes: Nodes, reading: SnapshotReading, files: _Files
) -> tuple[list[Any], list[tuple[RowOverlap, Tensor]]]:
    """Collective: begin to send what others ask for and to receive what they have; rows, which are full when all that
    has begun is over, and still to be put into their places."""
    works, rows = list[Any](), list[tuple[RowOverlap, Tensor]]()
    if nodes.group is None:
        return works, rows
    requests = [
        [ByteRequest(overlap.chunk.file, overlap.start, overlap.nbytes) for overlap in reading.far.get(rank, [])]
        for rank in range(nodes.control.size)
    ]
    asked = nodes.all_to_all([msgspec.msgpack.encode(of_rank) for of_rank in requests])
    for rank, data in enumerate(asked):
        for request in msgspec.msgpack.decode(data, type=list[ByteRequest]):
            works += nodes.send(_range(files, request), rank)
    for rank, wanted in sorted(reading.far.items()):
        for overlap in wanted:
            part = torch.empty(overlap.shape, dtype=overlap.dtype)
            works += nodes.receive(part.reshape(-1).view(torch.uint8), rank)
            rows.append((overlap, part))
    return works, rows


def _range(files: _Files, request: ByteRequest) -> Tensor:
    """Of a file, or nothing but zeros where it cannot be read: whoever answers for it says so."""
    data = torch.zeros(request.bytes, dtype=torch.uint8)
    with suppress(OSError):
        if plain_name(request.file):
            files[request.file].fill(raw(data), request.start)
    return data


def _read(stream: Regular, wanted: list[RowOverlap], chunks: list[Extent]) -> str:
    """What is wanted, into its place, and the sum of these chunks. What goes straight there is summed there, piece by
    piece while the cache has it, and read once; segments are divided over the threads that there are."""
    entire = [overlap for overlap in wanted if chunks and overlap.straight and overlap.nbytes == overlap.chunk.bytes]
    places = {overlap.start: raw(overlap.place.detach()) for overlap in entire}
    begins = sorted(places)

    def summed(pieces: list[Extent]) -> bytes:
        spare = memoryview(bytearray(max(size for _, size in pieces)))

        def read(start: int, size: int) -> memoryview:
            number = bisect(begins, start) - 1
            into = places[begins[number]][start - begins[number] :][:size] if number >= 0 else spare[:0]
            into = into if len(into) == size else spare[:size]
            stream.fill(into, start, beat)
            return into

        return segment_sum(pieces, read)

    threads = for_files()
    sums = side_by_side(summed, segments(chunks), threads)
    rest = [overlap for overlap in wanted if overlap.chunk.start not in places]
    side_by_side(lambda overlap: overlap.read(stream), rest, threads)
    return total(sums)


class MemoryCheckpointer:
    """A trainer's snapshots in memory: when they are taken, and which one it goes on from. All ranks call the same of
    it; where nothing is kept in memory it does nothing."""

    def __init__(self, control: Control, say: Say):
        self.control, self.say = control, say
        self.nodes: Nodes | None = None
        self.writer: SnapshotWriter | None = None
        self.reported = False  # that one was not taken
        self.opened: dict[Place, Candidate] = {}

    def enter(self, mesh: Mesh, run: Place, wanted: bool) -> None:
        """Before anything else. `wanted`: snapshots are to be taken; else those that are there still count."""
        name, problem = "", ""
        if self.control.rank == 0:
            try:
                name = new_id(run) if wanted else known(run)
            except OSError as error:
                problem = f"{run} cannot be written to: {error.strerror or error}"
        identity = name, problem, int(1000 * time.time())
        name, problem, start = self.control.broadcast_value(identity, tuple[str, str, int])
        if name:
            nodes = Nodes(Control(mesh, self.control.timeout), name, start, make=wanted)
            if nodes.first and not nodes.problem:
                clear(nodes.snapshot_dir)
            problem = nodes.problem
            if not problem:
                self.nodes, self.writer = nodes, SnapshotWriter(nodes, mesh.device)
                return
            nodes.control.close()
        if problem and wanted and self.control.rank == 0:
            self.say(f"in-memory snapshots disabled: {problem}; training continues, checkpoints still go to disk")

    def find(self, usable: Callable[[Candidate], bool]) -> list[Candidate]:
        """The newest first."""
        return _find(self.nodes, self.say, usable) if self.nodes is not None else []

    def load(
        self, snapshots: list[Candidate], wanted: Wanted, *, full: bool = False
    ) -> tuple[Candidate, Checkpoint] | None:
        """The first of them that is what its manifest says, loaded; of those before it, what is wrong is said. `full`:
        what nobody wants must be so, too."""
        for number, snapshot in enumerate(snapshots):
            assert self.nodes is not None
            checkpoint = _open(self.nodes, snapshot)
            problems = self._fill(snapshot, checkpoint, wanted, full=full)
            if not problems:
                return snapshot, checkpoint
            following = f"step {snapshots[number + 1].step} in memory" if number + 1 < len(snapshots) else "disk"
            if self.control.rank == 0:
                for problem in problems:
                    self.say(problem)
                self.say(f"skipping step {snapshot.step} in memory; trying {following}")
        return None

    def _fill(self, snapshot: Candidate, checkpoint: Checkpoint, pieces: Wanted, *, full: bool = False) -> list[str]:
        """Collective: fill the pieces, or say why they are not to be used. Where a copy of a file is damaged, and
        another node has one that is not, that one is read."""
        assert self.nodes is not None
        problems: list[str] = []
        while True:
            try:
                corrupt = _load(self.nodes, snapshot, checkpoint, pieces, full=full)
            except NotSaved as error:
                corrupt = [CorruptFile(-1, MANIFEST, str(error))]
            if not corrupt:
                for problem in problems if self.control.rank == 0 else ():
                    self.say(f"{problem}; another node's copy is read")
                return []
            problems = list(dict.fromkeys([*problems, *(bad.why for bad in corrupt)]))
            rest = snapshot.without([(bad.node, bad.file) for bad in corrupt])
            if rest.missing or rest.files == snapshot.files:
                return problems
            snapshot = rest

    def sound(self, snapshots: list[Candidate]) -> Checkpoint | None:
        """The first of them that is what its manifest says, every byte of it; it is not loaded yet."""
        kept = self.load(snapshots, lambda _: {}, full=True)
        if kept is None:
            return None
        snapshot, checkpoint = kept
        self.opened[checkpoint.path] = snapshot
        return checkpoint

    def take(self, checkpoint: Checkpoint, pieces: Pieces) -> bool:
        """Whether it is one of `sound`, and is loaded."""
        snapshot = self.opened.pop(checkpoint.path, None)
        if snapshot is None:
            return False
        if problems := self._fill(snapshot, checkpoint, lambda _: pieces):
            raise TrainingError(f"step {snapshot.step} in memory was complete, but no longer is: {problems[0]}")
        return True

    def start(self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Take a snapshot; returns when it is taken, or under way: on a GPU, behind this event."""
        if self.writer is None:
            return after
        self.finish()
        return self.writer.start(pieces, manifest, after)

    def finish(self) -> None:
        """Wait for the snapshot under way, if there is one. The first that was not taken is told of."""
        problem = self.writer.finish() if self.writer is not None else None
        if problem and not self.reported:
            self.reported = True
            self.say(f"{problem}; training continues, checkpoints still go to disk")

    def forget(self, after: int | None = None) -> None:
        """No snapshot of a step after this one counts any more; without one, all memory is given back."""
        if self.writer is not None:
            self.finish()
            self.writer.forget(after)

    def close(self) -> None:
        if self.nodes is not None:
            self.nodes.control.close()
