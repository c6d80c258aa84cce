"""Loading from memory: which snapshots all nodes together have, and their numbers into the ranks of any layout.

    found = find(nodes, say)                  # the newest first
    fetch(nodes, found[0])                    # its tables, onto every node
    harm = load(nodes, found[0], checkpoint, pieces)      # what was wrong; nothing: the pieces are filled

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
from fivefold.checkpoint.memory import NODE, Candidate, Listing, candidates, clear, known, listing, made
from fivefold.checkpoint.memory_save import Nodes, SnapshotWriter, wait
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


def find(
    nodes: Nodes, say: Callable[[str], None], usable: Callable[[Candidate], bool] = lambda _: True
) -> list[Candidate]:
    """Collective: all that are whole, the newest first. Rank 0 says which are not, and leaves out those that are not
    `usable`."""
    told = nodes.control.gather_values(listing(nodes.home) if nodes.first else Listing(), Listing)
    found: list[Candidate] = []
    if nodes.rank == 0:
        firsts = [told[ranks[0]] for ranks in nodes.nodes]
        for problem in (problem for one in firsts for problem in one.problems):
            say(f"{problem}; what memory has there is not used")
        for one in filter(usable, candidates([one.snapshots for one in firsts])):
            found += [one] if not one.missing else []
            if gone := one.missing:
                named = ", ".join(gone[:4]) + f" and {len(gone) - 4} more" * (len(gone) > 4)
                say(f"step {one.step} in memory is not whole: no node has {named} of {one.name}; it is not used")
    return nodes.control.broadcast_value(found, list[Candidate])


def fetch(nodes: Nodes, one: Candidate) -> None:
    """Collective: a node that has nothing of a snapshot gets its tables, and so can ask for the rest."""
    if nodes.group is None or len(one.manifests) == len(nodes.nodes):
        return
    source, path = nodes.nodes[one.manifests[0]][0], nodes.home / one.name
    names, parts = (TABLE, NODE, MANIFEST), [b"", b"", b""]
    if nodes.rank == source:
        with suppress(OSError):  # what is missing then is told where it is looked for
            parts = [read_regular(path / name, 1 << 40) for name in names]
    parts = nodes.broadcast(parts, source)
    if nodes.first and nodes.node not in one.manifests:
        with suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            for name, part in zip(names, parts, strict=True):
                (path / name).write_bytes(part)
    nodes.control.all_gather_values(None, None)


class SnapshotReading(NamedTuple):
    """What one rank does for a snapshot."""

    wanted: dict[str, list[RowOverlap]]  # by file
    near: list[str]  # of them those that lie on this node
    far: dict[int, list[RowOverlap]]  # the others, by whom they are asked of
    hashed: list[str]  # files of this node for whose bytes this rank answers


def answers(file: str, ranks: list[int]) -> int:
    """Which rank of a node hashes a file, and sends what other nodes ask for: if it can be, the one that wrote it."""
    match = _NUMBER.match(file)
    number = int(match[1]) if match else 0
    return number if number in ranks else ranks[number % len(ranks)]


Wanted = Callable[[Checkpoint], Pieces]  # what a rank fills from a checkpoint that is one of its model


def load(
    nodes: Nodes, one: Candidate, checkpoint: Checkpoint, pieces: Wanted, whole: bool = False
) -> list[CorruptFile]:
    """Collective: fill the pieces' memory; all ranks get the same list. `whole`: also what nobody wants is hashed."""
    faults.strike("read")
    wanted, harm = dict[str, list[RowOverlap]](), list[CorruptFile]()
    sizes = dict[str, File]()
    try:
        sizes, _ = {file.name: file for file in checkpoint.manifest.files}, checkpoint.tensors
    except UserError as error:
        harm = [CorruptFile(nodes.node, MANIFEST, str(error))]
    else:
        wanted = overlaps(checkpoint, pieces(checkpoint))
    reading = _divided(nodes, one, wanted, whole)
    files = _Files(nodes.home / one.name)
    works, rows = _exchange(nodes, reading, files)
    for file in dict.fromkeys((*reading.hashed, *reading.near)) if not harm else ():
        try:
            chunks = extents(checkpoint.tensors, file) if file in reading.hashed else []
            found = _read(files[file], wanted.get(file, []), chunks)
        except OSError as error:
            harm.append(
                CorruptFile(nodes.node, file, f"{checkpoint.path / file} cannot be read: {error.strerror or error}")
            )
            continue
        if file in reading.hashed and found != sizes[file].sha256:
            harm.append(CorruptFile(nodes.node, file, altered(checkpoint.path / file, found, sizes[file])))
    if nodes.group is not None:
        agreed(nodes.control, lambda: wait(works))
        for overlap, part in rows:
            overlap.put(part)
    told = nodes.control.all_gather_values(harm, list[CorruptFile])
    return list(dict.fromkeys(sentence for sentences in told for sentence in sentences))


def _divided(nodes: Nodes, one: Candidate, wanted: dict[str, list[RowOverlap]], whole: bool) -> SnapshotReading:
    """Collective: who reads what from where."""
    near = [file for file in wanted if nodes.node in one.files[file]]
    far: dict[int, list[RowOverlap]] = {}
    for file, found in wanted.items():
        if file not in near:
            holders = one.files[file]
            holder = holders[nodes.node % len(holders)]  # two nodes that ask may ask two
            far.setdefault(answers(file, nodes.nodes[holder]), []).extend(found)
    if nodes.group is None or whole:
        used = {file for file, holders in one.files.items() if file != TABLE and nodes.node in holders}
    else:
        asked = [(rank, file) for rank, found in far.items() for file in {overlap.file for overlap in found}]
        told = nodes.control.all_gather_values([*asked, *((nodes.rank, file) for file in near)], list[tuple[int, str]])
        here = nodes.nodes[nodes.node]
        used = {file for found in told for rank, file in found if rank in here}
    ranks = nodes.nodes[nodes.node]
    hashed = [file for file in one.files if file in used and answers(file, ranks) == nodes.rank]
    return SnapshotReading(wanted, near, far, hashed)


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
    asked = [
        [ByteRequest(one.file, one.chunk.start + one.start, one.nbytes) for one in reading.far.get(rank, [])]
        for rank in range(nodes.control.size)
    ]
    told = nodes.all_to_all([msgspec.msgpack.encode(one) for one in asked])
    for rank, data in enumerate(told):
        for one in msgspec.msgpack.decode(data, type=list[ByteRequest]):
            works += nodes.send(_range(files, one), rank)
    for rank, found in sorted(reading.far.items()):
        for overlap in found:
            part = torch.empty(overlap.shape, dtype=overlap.dtype)
            works += nodes.receive(part.reshape(-1).view(torch.uint8), rank)
            rows.append((overlap, part))
    return works, rows


def _range(files: _Files, one: ByteRequest) -> Tensor:
    """Of a file, or nothing but zeros where it cannot be read: whoever answers for it says so."""
    found = torch.zeros(one.bytes, dtype=torch.uint8)
    with suppress(OSError):
        if plain_name(one.file):
            files[one.file].fill(raw(found), one.start)
    return found


def _read(stream: Regular, wanted: list[RowOverlap], chunks: list[Extent]) -> str:
    """What is wanted, into its place, and the sum of these chunks. What goes straight there is summed there, piece by
    piece while the cache has it, and read once; segments are divided over the threads that there are."""
    straight = {one.chunk.start: one for one in wanted if one.straight and one.nbytes == one.chunk.bytes and chunks}
    places = {start: raw(one.place.detach()) for start, one in straight.items()}
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

    def fill(one: RowOverlap) -> None:
        into = one.place.detach() if one.straight else torch.empty(one.shape, dtype=one.dtype)
        stream.fill(raw(into), one.chunk.start + one.start, beat)
        if not one.straight:
            one.put(into)

    threads = for_files()
    sums = side_by_side(summed, segments(chunks), threads)
    side_by_side(fill, [one for one in wanted if one.chunk.start not in straight], threads)
    return total(sums)


# ---- memory tier ----------------------------------------------------------------------------------------------------
# A run's second tier of checkpoints: snapshots in memory, from whoever wrote them to whoever goes on.
#
# memory = Memory.of(control, mesh, run, wanted=True, say)      # None where there is nothing to keep or to find
# for one in memory.find(): ...                                 # the newest first
# memory.keeper.start(pieces, manifest)
# memory.close()


class Memory:
    def __init__(self, nodes: Nodes, mesh: Mesh, say: Say):
        self.nodes, self.say = nodes, say
        self.keeper = SnapshotWriter(nodes, mesh.device)

    @classmethod
    def of(cls, control: Control, mesh: Mesh, run: Place, wanted: bool, say: Say) -> "Memory | None":
        """Collective. `wanted`: snapshots are to be taken; else only those that are there count."""
        name, problem = "", ""
        if control.rank == 0:
            try:
                name = made(run) if wanted else known(run)
            except OSError as error:
                problem = f"{run} cannot be written to: {error.strerror or error}"
        told = name, problem, int(1000 * time.time())
        name, problem, start = control.broadcast_value(told, tuple[str, str, int])
        if name:
            nodes = Nodes(Control(mesh, control.timeout), name, start, wanted)
            if nodes.first and not nodes.problem:
                clear(nodes.home)
            problem = nodes.problem
            if not problem:
                return cls(nodes, mesh, say)
            nodes.control.close()
        if problem and wanted and control.rank == 0:
            say(f"no snapshots are kept in memory: {problem}; training goes on without, and disk is still there")
        return None

    def find(self, usable: Callable[[Candidate], bool] = lambda _: True) -> list[Candidate]:
        """Collective: snapshots that are whole, the newest first."""
        return find(self.nodes, self.say, usable)

    def open(self, one: Candidate) -> Checkpoint:
        """Collective: a snapshot whose tables are on every node."""
        fetch(self.nodes, one)
        return Checkpoint(self.nodes.home / one.name)

    def load(self, one: Candidate, checkpoint: Checkpoint, pieces: Wanted, whole: bool = False) -> list[str]:
        """Collective: fill the pieces, or say why they are not to be used. Where a copy of a file is damaged, and
        another node has one that is not, that one is read. `whole`: also what no piece needs is hashed."""
        said: list[str] = []
        while True:
            try:
                harm = load(self.nodes, one, checkpoint, pieces, whole)
            except NotSaved as error:
                harm = [CorruptFile(-1, MANIFEST, str(error))]
            if not harm:
                for sentence in said if self.nodes.rank == 0 else ():
                    self.say(f"{sentence}; another node's copy is read")
                return []
            said = list(dict.fromkeys([*said, *(bad.why for bad in harm)]))
            rest = one.without([(bad.node, bad.file) for bad in harm])
            if rest.missing or rest.files == one.files:
                return said
            one = rest

    def close(self) -> None:
        self.nodes.control.close()


# ---- remembering ----------------------------------------------------------------------------------------------------
# A trainer's snapshots in memory: when they are taken, and which one it goes on from.


class MemoryCheckpointer:
    """All ranks call the same of it; where nothing is kept in memory it does nothing."""

    def __init__(self, control: Control, say: Say):
        self.control, self.say = control, say
        self.memory: Memory | None = None
        self.told = False  # that one was not taken
        self.opened: dict[Place, Candidate] = {}

    def enter(self, mesh: Mesh, run: Place, wanted: bool) -> None:
        """Before anything else. `wanted`: snapshots are to be taken; else those that are there still count."""
        self.memory = Memory.of(self.control, mesh, run, wanted, self.say)

    def find(self, usable: Callable[[Candidate], bool]) -> list[Candidate]:
        """The newest first."""
        return self.memory.find(usable) if self.memory is not None else []

    def load(self, found: list[Candidate], wanted: Wanted, whole: bool = False) -> tuple[Candidate, Checkpoint] | None:
        """The first of them that is what its manifest says, loaded; of those before it, what is wrong is said. `whole`:
        what nobody wants must be so, too."""
        for number, one in enumerate(found):
            assert self.memory is not None
            checkpoint = self.memory.open(one)
            harm = self.memory.load(one, checkpoint, wanted, whole)
            if not harm:
                return one, checkpoint
            following = f"step {found[number + 1].step} in memory" if number + 1 < len(found) else "disk"
            if self.control.rank == 0:
                for problem in harm:
                    self.say(problem)
                self.say(f"step {one.step} in memory is not used; {following} is tried")
        return None

    def sound(self, found: list[Candidate]) -> Checkpoint | None:
        """The first of them that is what its manifest says, every byte of it; it is not loaded yet."""
        kept = self.load(found, lambda _: {}, whole=True)
        if kept is None:
            return None
        one, checkpoint = kept
        self.opened[checkpoint.path] = one
        return checkpoint

    def take(self, checkpoint: Checkpoint, pieces: Pieces) -> bool:
        """Whether it is one of `sound`, and is loaded."""
        one = self.opened.pop(checkpoint.path, None)
        if one is None or self.memory is None:
            return False
        if harm := self.memory.load(one, checkpoint, lambda _: pieces):
            raise TrainingError(f"step {one.step} in memory was whole, and is no more: {harm[0]}")
        return True

    def start(self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Take a snapshot; returns when it is taken, or under way: on a GPU, behind this event."""
        if self.memory is None:
            return after
        self.finish()
        return self.memory.keeper.start(pieces, manifest, after)

    def finish(self) -> None:
        """Wait for the snapshot under way, if there is one. The first that was not taken is told of."""
        problem = self.memory.keeper.finish() if self.memory is not None else None
        if problem and not self.told:
            self.told = True
            self.say(f"{problem}; training goes on without, and disk is still there")

    def forget(self, after: int | None = None) -> None:
        """No snapshot of a step after this one counts any more; without one, all memory is given back."""
        if self.memory is not None:
            self.finish()
            self.memory.keeper.forget(after)

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
