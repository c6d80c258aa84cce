"""Restores from snapshots in memory: finds those that all nodes together have, and loads them into any layout.

    memory = MemoryCheckpointer(control, say)
    memory.enter(mesh, run, enabled=True)                  # does nothing where no snapshot is to be taken or found
    memory.load(memory.find(usable), shards_of)            # loads the newest that is undamaged
    memory.start(shards, manifest)                         # takes the next one
    memory.close()

A rank reads files of its own node directly, and asks one rank of another node for the rest. One rank of its node hashes
every file that is read, block by block, while it is copied and still in the cache. So damage is known before anybody
trains on it.
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

from fivefold.checkpoint.async_save import NotSaved, run_on_all_ranks
from fivefold.checkpoint.checksums import Extent, checksum_of_sums, extents, segment_sum, segments
from fivefold.checkpoint.load import RowOverlap, Say, overlaps
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Manifest, altered_message
from fivefold.checkpoint.memory_peers import Nodes, wait
from fivefold.checkpoint.memory_save import SnapshotWriter
from fivefold.checkpoint.memory_snapshots import (
    NODE_FILE,
    Candidate,
    Listing,
    candidates,
    delete_leftovers,
    existing_id,
    get_or_create_id,
    list_snapshots,
)
from fivefold.checkpoint.shards import Shards, raw
from fivefold.checkpoint.tensors import TABLE_FILE
from fivefold.launch import faults
from fivefold.launch.heartbeat import beat
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.files import File, Regular, open_regular, plain_name, read_regular
from fivefold.support.storage_place import Place

_RANK_FILE = re.compile(r"rank-(\d+)\.")


class CorruptFile(msgspec.Struct, frozen=True):
    """A node's copy of a file is damaged or cannot be read."""

    node: int
    file: str
    why: str


class ByteRequest(msgspec.Struct, frozen=True, array_like=True):
    """A range of bytes that a rank asks another for."""

    file: str
    start: int
    bytes: int


def _find(nodes: Nodes, say: Say, usable: Callable[[Candidate], bool]) -> list[Candidate]:
    """The complete snapshots that are `usable`, newest first; rank 0 prints which are not complete. Collective."""
    by_rank = nodes.control.gather_values(list_snapshots(nodes.snapshot_dir) if nodes.first else Listing(), Listing)
    complete: list[Candidate] = []
    if nodes.rank == 0:
        by_node = [by_rank[ranks[0]] for ranks in nodes.nodes]
        for problem in (problem for node in by_node for problem in node.problems):
            say(f"{problem}; snapshots there are not used")
        for candidate in filter(usable, candidates([node.snapshots for node in by_node])):
            if missing := candidate.missing:
                names = ", ".join(missing[:4]) + f" and {len(missing) - 4} more" * (len(missing) > 4)
                problem = f"no node has {names} of {candidate.name}"
                say(f"step {candidate.step} in memory is not whole: {problem}; it is not used")
            else:
                complete.append(candidate)
    return nodes.control.broadcast_value(complete, list[Candidate])


def _open(nodes: Nodes, snapshot: Candidate) -> Checkpoint:
    """Opens a snapshot, after sending its tables to nodes that have nothing of it. Collective."""
    path = nodes.snapshot_dir / snapshot.name
    if nodes.group is None or len(snapshot.manifest_nodes) == len(nodes.nodes):
        return Checkpoint(path)
    source = nodes.nodes[snapshot.manifest_nodes[0]][0]
    names, parts = (TABLE_FILE, NODE_FILE, MANIFEST), [b"", b"", b""]
    if nodes.rank == source:
        with suppress(OSError):  # `_load` reports what is missing
            parts = [read_regular(path / name, 1 << 40) for name in names]
    parts = nodes.broadcast(parts, source)
    if nodes.first and nodes.node not in snapshot.manifest_nodes:
        with suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            for name, part in zip(names, parts, strict=True):
                (path / name).write_bytes(part)
    nodes.control.all_gather_values(None, None)
    return Checkpoint(path)


class ReadPlan(NamedTuple):
    """The files and ranges of a snapshot that one rank reads."""

    local_files: list[str]  # of this node, with overlaps for this rank
    remote: dict[int, list[RowOverlap]]  # overlaps that other nodes have, by the rank that sends them
    hashed_files: list[str]  # of this node, which this rank hashes


def hashing_rank(file: str, ranks: list[int]) -> int:
    """The rank of a node that hashes a file and sends it to other nodes: if possible the one that wrote it."""
    match = _RANK_FILE.match(file)
    number = int(match[1]) if match else 0
    return number if number in ranks else ranks[number % len(ranks)]


ShardsOf = Callable[[Checkpoint], Shards]  # the shards that a rank loads from a checkpoint of its model


def _load(
    nodes: Nodes, snapshot: Candidate, checkpoint: Checkpoint, shards_of: ShardsOf, *, full: bool
) -> list[CorruptFile]:
    """Loads the shards, and returns the corrupt files, the same on all ranks. `full`: hashes all files. Collective."""
    faults.strike("read")
    overlaps_by_file, corrupt = dict[str, list[RowOverlap]](), list[CorruptFile]()
    manifest_files = dict[str, File]()
    try:
        manifest_files, _ = {file.name: file for file in checkpoint.manifest.files}, checkpoint.tensors
    except UserError as error:
        corrupt = [CorruptFile(nodes.node, MANIFEST, str(error))]
    else:
        overlaps_by_file = overlaps(checkpoint, shards_of(checkpoint))
    plan = _plan(nodes, snapshot, overlaps_by_file, full=full)
    files = _Files(nodes.snapshot_dir / snapshot.name)
    works, received = _exchange(nodes, plan, files)
    for file in dict.fromkeys((*plan.hashed_files, *plan.local_files)) if not corrupt else ():
        place, hashed = checkpoint.path / file, file in plan.hashed_files
        chunks = extents(checkpoint.tensors, file) if hashed else []
        try:
            checksum = _read(files[file], overlaps_by_file.get(file, []), chunks)
        except OSError as error:
            corrupt.append(CorruptFile(nodes.node, file, f"{place} cannot be read: {error.strerror or error}"))
            continue
        if hashed and checksum != manifest_files[file].sha256:
            corrupt.append(CorruptFile(nodes.node, file, altered_message(place, checksum, manifest_files[file])))
    if nodes.group is not None:
        run_on_all_ranks(nodes.control, lambda: wait(works))
        for overlap, rows in received:
            overlap.put(rows)
    by_rank = nodes.control.all_gather_values(corrupt, list[CorruptFile])
    return list(dict.fromkeys(file for files in by_rank for file in files))


def _plan(nodes: Nodes, snapshot: Candidate, overlaps_by_file: dict[str, list[RowOverlap]], *, full: bool) -> ReadPlan:
    """Divides the reading and the hashing of a snapshot over the ranks. Collective."""
    local_files = [file for file in overlaps_by_file if nodes.node in snapshot.files[file]]
    remote: dict[int, list[RowOverlap]] = {}
    for file, file_overlaps in overlaps_by_file.items():
        if file not in local_files:
            sources = snapshot.files[file]
            source = sources[nodes.node % len(sources)]  # so that nodes ask different ones
            remote.setdefault(hashing_rank(file, nodes.nodes[source]), []).extend(file_overlaps)
    ranks = nodes.nodes[nodes.node]
    if nodes.group is None or full:
        used = {file for file, sources in snapshot.files.items() if file != TABLE_FILE and nodes.node in sources}
    else:
        reads = [(rank, file) for rank, rest in remote.items() for file in {overlap.chunk.file for overlap in rest}]
        reads += [(nodes.rank, file) for file in local_files]
        by_rank = nodes.control.all_gather_values(reads, list[tuple[int, str]])  # (the rank that has it, file)
        used = {file for rank_reads in by_rank for rank, file in rank_reads if rank in ranks}
    hashed_files = [file for file in snapshot.files if file in used and hashing_rank(file, ranks) == nodes.rank]
    return ReadPlan(local_files, remote, hashed_files)


class _Files(dict[str, Regular]):
    """The files of a snapshot on this node, opened at first use."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def __missing__(self, file: str) -> Regular:
        self[file] = open_regular(self.path / file)
        return self[file]


def _exchange(nodes: Nodes, plan: ReadPlan, files: _Files) -> tuple[list[Any], list[tuple[RowOverlap, Tensor]]]:
    """Starts to send what other nodes ask for, and to receive what this rank asks for. Collective.

    Returns (works to wait for, the overlaps with the rows that are received for them).
    """
    works, received = list[Any](), list[tuple[RowOverlap, Tensor]]()
    if nodes.group is None:
        return works, received
    requests = [
        [ByteRequest(overlap.chunk.file, overlap.start, overlap.nbytes) for overlap in plan.remote.get(rank, [])]
        for rank in range(nodes.control.size)
    ]
    requests_to_this = nodes.all_to_all([msgspec.msgpack.encode(rank_requests) for rank_requests in requests])
    for rank, data in enumerate(requests_to_this):
        for request in msgspec.msgpack.decode(data, type=list[ByteRequest]):
            works += nodes.send(_bytes_of(files, request), rank)
    for rank, remote_overlaps in sorted(plan.remote.items()):
        for overlap in remote_overlaps:
            rows = torch.empty(overlap.shape, dtype=overlap.dtype)
            works += nodes.receive(rows.reshape(-1).view(torch.uint8), rank)
            received.append((overlap, rows))
    return works, received


def _bytes_of(files: _Files, request: ByteRequest) -> Tensor:
    """The bytes of a request; zeros where the file cannot be read, which the rank that hashes it reports."""
    data = torch.zeros(request.bytes, dtype=torch.uint8)
    with suppress(OSError):
        if plain_name(request.file):
            files[request.file].fill(raw(data), request.start)
    return data


def _read(stream: Regular, overlaps: list[RowOverlap], chunks: list[Extent]) -> str:
    """Reads the overlaps into their tensors, and returns the checksum of the chunks.

    A chunk that is read in full and in place is read once, and hashed while the cache has it; threads share the work.
    """
    entire = [overlap for overlap in overlaps if chunks and overlap.in_place and overlap.nbytes == overlap.chunk.bytes]
    destinations = {overlap.start: raw(overlap.destination.detach()) for overlap in entire}  # by start in the file
    starts = sorted(destinations)

    def hash_extents(ranges: list[Extent]) -> bytes:
        buffer = memoryview(bytearray(max(size for _, size in ranges)))

        def read(start: int, size: int) -> memoryview:
            number = bisect(starts, start) - 1  # of the destination that begins last before `start`
            into = destinations[starts[number]][start - starts[number] :][:size] if number >= 0 else buffer[:0]
            into = into if len(into) == size else buffer[:size]
            stream.fill(into, start, beat)
            return into

        return segment_sum(ranges, read)

    threads = for_files()
    sums = side_by_side(hash_extents, segments(chunks), threads)
    rest = [overlap for overlap in overlaps if overlap.chunk.start not in destinations]
    side_by_side(lambda overlap: overlap.read(stream), rest, threads)
    return checksum_of_sums(sums)


class MemoryCheckpointer:
    """Takes and restores a trainer's snapshots in memory. Does nothing where none are taken or found.

    Its methods are collective.
    """

    def __init__(self, control: Control, say: Say):
        self.control, self.say = control, say
        self.nodes: Nodes | None = None
        self.writer: SnapshotWriter | None = None
        self.failure_reported = False  # whether a failed snapshot has been reported
        self.checked: dict[Place, Candidate] = {}  # snapshots that `first_undamaged` has returned

    def enter(self, mesh: Mesh, run_dir: Place, *, enabled: bool) -> None:
        """Joins the nodes, before anything else. `enabled`: snapshots are taken; else existing ones can be loaded."""
        run_id, problem = "", ""
        if self.control.rank == 0:
            try:
                run_id = get_or_create_id(run_dir) if enabled else existing_id(run_dir)
            except OSError as error:
                problem = f"{run_dir} cannot be written to: {error.strerror or error}"
        decided = run_id, problem, int(1000 * time.time())
        run_id, problem, start = self.control.broadcast_value(decided, tuple[str, str, int])
        if run_id:
            nodes = Nodes(Control(mesh, self.control.timeout), run_id, start, make=enabled)
            if nodes.first and not nodes.problem:
                delete_leftovers(nodes.snapshot_dir)
            problem = nodes.problem
            if not problem:
                self.nodes, self.writer = nodes, SnapshotWriter(nodes, mesh.device)
                return
            nodes.control.close()
        if problem and enabled and self.control.rank == 0:
            self.say(f"in-memory snapshots disabled: {problem}; training continues, checkpoints still go to disk")

    def find(self, usable: Callable[[Candidate], bool]) -> list[Candidate]:
        """The complete snapshots that are `usable`, newest first."""
        return _find(self.nodes, self.say, usable) if self.nodes is not None else []

    def load(
        self, snapshots: list[Candidate], shards_of: ShardsOf, *, full: bool = False
    ) -> tuple[Candidate, Checkpoint] | None:
        """Loads the first snapshot that is undamaged, and prints what is wrong with those before it.

        `full`: also checks the files that no rank needs.
        """
        for number, snapshot in enumerate(snapshots):
            assert self.nodes is not None
            checkpoint = _open(self.nodes, snapshot)
            problems = self._fill(snapshot, checkpoint, shards_of, full=full)
            if not problems:
                return snapshot, checkpoint
            fallback = f"step {snapshots[number + 1].step} in memory" if number + 1 < len(snapshots) else "disk"
            if self.control.rank == 0:
                for problem in problems:
                    self.say(problem)
                self.say(f"skipping step {snapshot.step} in memory; trying {fallback}")
        return None

    def _fill(
        self, snapshot: Candidate, checkpoint: Checkpoint, shards_of: ShardsOf, *, full: bool = False
    ) -> list[str]:
        """Loads the shards, or returns the problems for which the snapshot cannot be used.

        If a copy of a file is damaged, it reads an undamaged copy of another node, if there is one.
        """
        assert self.nodes is not None
        problems: list[str] = []
        while True:
            try:
                corrupt = _load(self.nodes, snapshot, checkpoint, shards_of, full=full)
            except NotSaved as error:
                corrupt = [CorruptFile(-1, MANIFEST, str(error))]
            if not corrupt:
                for problem in problems if self.control.rank == 0 else ():
                    self.say(f"{problem}; another node's copy is read")
                return []
            problems = list(dict.fromkeys([*problems, *(file.why for file in corrupt)]))
            rest = snapshot.without_damaged([(file.node, file.file) for file in corrupt])
            if rest.missing or rest.files == snapshot.files:
                return problems
            snapshot = rest

    def first_undamaged(self, snapshots: list[Candidate]) -> Checkpoint | None:
        """The first snapshot whose files are all undamaged. Loads nothing."""
        loaded = self.load(snapshots, lambda _: {}, full=True)
        if loaded is None:
            return None
        snapshot, checkpoint = loaded
        self.checked[checkpoint.path] = snapshot
        return checkpoint

    def load_checked(self, checkpoint: Checkpoint, shards: Shards) -> bool:
        """Loads a checkpoint that `first_undamaged` has returned; returns False for any other."""
        snapshot = self.checked.pop(checkpoint.path, None)
        if snapshot is None:
            return False
        if problems := self._fill(snapshot, checkpoint, lambda _: shards):
            raise TrainingError(f"step {snapshot.step} in memory was complete, but no longer is: {problems[0]}")
        return True

    def start(self, shards: Shards, manifest: Manifest, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Starts a snapshot. Returns when the shards are copied; on a GPU, returns an event recorded after the copies.

        `after`: an event of other copies, which must also be complete before the returned one.
        """
        if self.writer is None:
            return after
        self.finish()
        return self.writer.start(shards, manifest, after)

    def finish(self) -> None:
        """Waits for the snapshot under way, if there is one. Prints why it failed, but only for the first failure."""
        problem = self.writer.finish() if self.writer is not None else None
        if problem and not self.failure_reported:
            self.failure_reported = True
            self.say(f"{problem}; training continues, checkpoints still go to disk")

    def forget(self, after: int | None = None) -> None:
        """Invalidates the snapshots of steps after `after`; with None deletes all, and frees the memory."""
        if self.writer is not None:
            self.finish()
            self.writer.forget(after)

    def close(self) -> None:
        if self.nodes is not None:
            self.nodes.control.close()
