"""Snapshots in memory that outlives ranks: where they lie, whose they are, and which of them can be loaded.

    /dev/shm/fivefold-1000/                   of this user alone; FIVEFOLD_MEMORY names another place
        4f1d.../                              a run, by an id that nobody can guess; the run's directory knows it
            step-00000020.1767225600000/      a snapshot, in the format of a checkpoint; the number says when
                manifest.json, tensors.json   on every node, written last
                rank-0.tensors ...            of the ranks of this node, and copies of another node's
                node.json                     which node of how many this was
            rank-0.0.slot                     memory of a rank that no snapshot uses at present

A node is a host and a place there, so two places on one machine are two nodes. No torch.
"""

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import MANIFEST, Checkpoint, Damaged, Store
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import BROKEN
from fivefold.support.places import Place

PLACE = "FIVEFOLD_MEMORY"
ID = "memory-id"  # in the run's directory
STARTS = "memory-starts.json"  # likewise
NODE = "node.json"
KEPT = 2  # snapshots
_STARTS = 64
_ID = re.compile(r"[0-9a-f]{32}")


class Identity(msgspec.Struct, frozen=True):
    """Of a run. A directory that was copied is another one, and so has another number."""

    id: str
    inode: int


def root(env: Mapping[str, str] = os.environ) -> Path:
    return Path(env.get(PLACE) or f"/dev/shm/fivefold-{os.geteuid()}")


def private(path: Path, make: bool = False) -> Path:
    """The directory, which is of this user alone and no link; OSError where it is not."""
    if make:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, f"{path} is not a directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, f"{path} is not this user's alone: it must be theirs, with mode 0700")
    return path


def snapshot_dir(run: str, make: bool = False) -> Path:
    """Where a run's snapshots lie on this node."""
    return private(private(root(), make) / run, make)


def known(run: Place) -> str:
    """The id by which memory knows the run of this directory; empty where there is none."""
    try:
        identity = msgspec.json.decode(storage_of(run).read(run / ID, 1000), type=Identity)
    except (OSError, *BROKEN):
        return ""
    return identity.id if _ID.fullmatch(identity.id) and identity.inode == _inode(run) else ""


def new_id(run: Place) -> str:
    """The same, or a new one, which is stored."""
    if before := known(run):
        return before
    new = Identity(secrets.token_hex(16), _inode(run))
    storage_of(run).put(run / ID, msgspec.json.encode(new) + b"\n")
    return new.id


class Began(msgspec.Struct, frozen=True):
    """A start of the run, by the number that the names of its snapshots count from, and after which step it began."""

    at: int
    step: int


class Starts(msgspec.Struct, frozen=True):
    """Those that are remembered, the last one last."""

    starts: list[Began]
    seal: str  # sha256 of them: a damaged number would bring back what the run has left, or hide what it has

    @classmethod
    def of(cls, starts: list[Began]) -> "Starts":
        return cls(starts, hashlib.sha256(msgspec.json.encode(starts)).hexdigest())


def starts(run: Place) -> list[Began]:
    """Those that are remembered; Damaged where that cannot be known."""
    place = run / STARTS
    try:
        stored = msgspec.json.decode(storage_of(run).read(place, 1 << 16), type=Starts | list[Began])
    except FileNotFoundError:
        return []
    except (OSError, *BROKEN) as error:
        why = getattr(error, "strerror", None) or error
        raise Damaged(f"{place} cannot be read: {why}", "checkpoint.damaged") from None
    if isinstance(stored, list):  # of earlier releases, without a sum
        return stored
    if stored != Starts.of(stored.starts):
        unsealed = "its checksum does not match"
        raise Damaged(f"{place} is damaged: {unsealed}", "checkpoint.damaged")
    return stored.starts


def begin(run: Place, before: Sequence[Began], at: int, step: int) -> None:
    """Remember a start, with those before it. What it cannot write down leaves old snapshots as they were."""
    with suppress(OSError):
        last = [*before, Began(at, step)][-_STARTS:]
        storage_of(run).put(run / STARTS, msgspec.json.encode(Starts.of(last)) + b"\n")


def abandoned(name: str, step: int, began: Sequence[Began]) -> bool:
    """Whether a later start went on from an earlier step than a snapshot's: its node was away, and the run has taken
    another way since."""
    return any(made_at(name) < start.at and step > start.step for start in began)


def _inode(run: Place) -> int:
    return run.stat().st_ino if isinstance(run, Path) else 0


def node_id() -> tuple[str, str]:
    """Which node this rank is on: its host, and the place of snapshots there."""
    return platform.node(), str(root())


def in_memory(run: Place) -> list[Checkpoint]:
    """The snapshots of a run whose manifest is on this node, the newest first."""
    if not (name := known(run)):
        return []
    try:
        return Store(snapshot_dir(name)).complete()
    except OSError:
        return []


def size_here(checkpoint: Checkpoint) -> int:
    """Bytes that a snapshot takes on this node."""
    assert isinstance(checkpoint.path, Path)
    return sum(file.stat().st_size for file in checkpoint.path.iterdir() if file.is_file())


class NodeFiles(msgspec.Struct, frozen=True):
    """What one node has of a snapshot: a manifest that is whole, and some of its files, by their sizes."""

    name: str
    step: int
    samples: int
    seal: str
    node: int  # the number of this node when it was made
    nodes: int  # of so many
    files: list[str]  # all of them
    present: list[str]  # those that this node has


class Listing(msgspec.Struct, frozen=True):
    """Of one node."""

    snapshots: list[NodeFiles] = []
    problems: list[str] = []


def clear(place: Path) -> None:
    """What an earlier start left there that is no snapshot: it was never finished, or has begun to be deleted."""
    with suppress(OSError):
        for path in Store(private(place)).incomplete():
            storage_of(path).delete(path)
        for spare in place.glob("*.slot"):
            spare.unlink()


def listing(place: Path) -> Listing:
    """What is complete there."""
    snapshots, problems = [], []
    try:
        private(place)
        for snapshot in Store(place).complete():
            try:
                snapshots.append(_files_of(snapshot))
            except UserError as error:
                problems += error.problems
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{place} cannot be used: {error.strerror or error}")
    return Listing(snapshots, problems)


def _files_of(snapshot: Checkpoint) -> NodeFiles:
    path, manifest = snapshot.path, snapshot.manifest
    assert isinstance(path, Path)
    names = [file.name for file in manifest.files]
    sizes = snapshot.storage.sizes(path, names)
    present = [file.name for file in manifest.files if sizes[file.name] == file.bytes]
    try:
        node, nodes = msgspec.json.decode(read_regular(path / NODE, 1000), type=tuple[int, int])
    except (OSError, *BROKEN) as error:
        raise Damaged(f"{path / NODE} is damaged: {error}", "checkpoint.damaged") from None
    return NodeFiles(path.name, manifest.step, manifest.samples, manifest.seal, node, nodes, names, present)


class Candidate(msgspec.Struct, frozen=True):
    """A snapshot, as all nodes together have it."""

    name: str
    step: int
    samples: int
    nodes: int  # on which it was made
    manifests: list[int]  # nodes of today that have its manifest
    files: dict[str, list[int]]  # the nodes that have each of them

    @property
    def missing(self) -> list[str]:
        return [name for name, nodes in self.files.items() if not nodes]

    def without(self, bad: Sequence[tuple[int, str]]) -> "Candidate":
        """Some nodes' copies of some files are no good."""
        files = {
            name: [node for node in nodes if (node, name) not in bad and (node, MANIFEST) not in bad]
            for name, nodes in self.files.items()
        }
        return msgspec.structs.replace(self, files=files)

    @property
    def availability(self) -> str:
        """How many nodes of those that made it have it, where it was several; else an empty text."""
        return f"{len(self.manifests)} of {self.nodes} nodes" if self.nodes > 1 else ""


def candidates(nodes: Sequence[Sequence[NodeFiles]]) -> list[Candidate]:
    """Of what each node has, the newest first: of equal steps the one that was made last."""
    by_seal: dict[tuple[str, str], Candidate] = {}
    for number, snapshots in enumerate(nodes):
        for files in snapshots:
            empty = Candidate(
                files.name, files.step, files.samples, files.nodes, [], {name: [] for name in files.files}
            )
            snapshot = by_seal.setdefault((files.name, files.seal), empty)
            snapshot.manifests.append(number)
            for name in files.present:
                snapshot.files[name].append(number)
    return sorted(by_seal.values(), key=lambda snapshot: (snapshot.step, made_at(snapshot.name)), reverse=True)


def made_at(name: str) -> int:
    """The number in the name of a snapshot."""
    return int(name.rpartition(".")[2])


def nodes_of(ranks: Sequence[tuple[str, str]]) -> list[list[int]]:
    """The ranks of each node, by where each of them is; nodes in the order of their first ranks."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(ranks):
        by_place.setdefault(place, []).append(rank)
    return list(by_place.values())


def copies(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """To which rank each rank gives a copy of what it writes: one of the next node. None where there is one node."""
    if len(nodes) < 2:
        return {}
    pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return {rank: following[place % len(following)] for node, following in pairs for place, rank in enumerate(node)}


def free(place: Path) -> int:
    """Bytes that a snapshot may take: of the file system, and of the machine's memory, of which a sixteenth stays."""
    room = shutil.disk_usage(place).free
    with suppress(OSError, ValueError, IndexError):
        told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (1024 * int(told[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
        room = min(room, available - total // 16)
    return room
