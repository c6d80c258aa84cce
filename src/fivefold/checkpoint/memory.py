"""Snapshots in host memory that outlives the ranks: their files, their run, and which of them can be loaded.

    /dev/shm/fivefold-1000/                   private to this user; FIVEFOLD_MEMORY names another place
        4f1d.../                              a run, by a random id that the run's directory has
            step-00000020.1767225600000/      a snapshot, in the format of a checkpoint; the number is a time in ms
                manifest.json, tensors.json   on every node, written last
                rank-0.tensors ...            of the ranks of this node, and copies of another node's
                node.json                     the number of this node, and how many there were
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

from fivefold.checkpoint.filesystem import storage_of
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Damaged
from fivefold.checkpoint.store import Store
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import BROKEN
from fivefold.support.places import Place

PLACE = "FIVEFOLD_MEMORY"  # an environment variable
ID, STARTS = "memory-id", "memory-starts.json"  # files in the run's directory
NODE = "node.json"
KEPT = 2  # the number of snapshots that are kept
_MAX_STARTS = 64  # the last ones, which are listed
_ID = re.compile(r"[0-9a-f]{32}")


class Identity(msgspec.Struct, frozen=True):
    """Identifies a run's directory. A copy of the directory has another inode, and so is another run."""

    id: str
    inode: int


def root(env: Mapping[str, str] = os.environ) -> Path:
    return Path(env.get(PLACE) or f"/dev/shm/fivefold-{os.geteuid()}")


def private(path: Path, make: bool = False) -> Path:
    """The directory itself; OSError unless it is private to this user and not a link. `make`: make it if missing."""
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
    """The directory of a run's snapshots on this node."""
    return private(private(root(), make) / run, make)


def known(run: Place) -> str:
    """The id of a run's snapshots in memory; empty if it has none."""
    try:
        identity = msgspec.json.decode(storage_of(run).read(run / ID, 1000), type=Identity)
    except (OSError, *BROKEN):
        return ""
    return identity.id if _ID.fullmatch(identity.id) and identity.inode == _inode(run) else ""


def new_id(run: Place) -> str:
    """The id of a run's snapshots in memory; writes a new one if it has none."""
    if existing := known(run):
        return existing
    new = Identity(secrets.token_hex(16), _inode(run))
    storage_of(run).put(run / ID, msgspec.json.encode(new) + b"\n")
    return new.id


class RunStart(msgspec.Struct, frozen=True):
    """One start of the run."""

    at: int  # the time of its start in ms, from which the numbers in its snapshots' names count
    step: int  # the step after which it began


class RunStarts(msgspec.Struct, frozen=True):
    """The last starts of a run, in order."""

    starts: list[RunStart]
    seal: str  # their sha256: a damaged number could make an abandoned snapshot count, or hide a good one

    @classmethod
    def of(cls, starts: list[RunStart]) -> "RunStarts":
        return cls(starts, hashlib.sha256(msgspec.json.encode(starts)).hexdigest())


def starts(run: Place) -> list[RunStart]:
    """The last starts of a run; raises Damaged if the list cannot be read."""
    place = run / STARTS
    try:
        stored = msgspec.json.decode(storage_of(run).read(place, 1 << 16), type=RunStarts | list[RunStart])
    except FileNotFoundError:
        return []
    except (OSError, *BROKEN) as error:
        why = getattr(error, "strerror", None) or error
        raise Damaged(f"{place} cannot be read: {why}", "checkpoint.damaged") from None
    if isinstance(stored, list):  # of earlier releases, without a seal
        return stored
    if stored != RunStarts.of(stored.starts):
        unsealed = "its checksum does not match"
        raise Damaged(f"{place} is damaged: {unsealed}", "checkpoint.damaged")
    return stored.starts


def begin(run: Place, earlier: Sequence[RunStart], at: int, step: int) -> None:
    """Adds a start to the list of `earlier` ones; errors are ignored, and then old snapshots count as before."""
    with suppress(OSError):
        last = [*earlier, RunStart(at, step)][-_MAX_STARTS:]
        storage_of(run).put(run / STARTS, msgspec.json.encode(RunStarts.of(last)) + b"\n")


def abandoned(name: str, step: int, starts: Sequence[RunStart]) -> bool:
    """Whether a later start continued from an earlier step than the snapshot's, because its node was missing: then the
    run has other weights since."""
    return any(made_at(name) < start.at and step > start.step for start in starts)


def _inode(run: Place) -> int:
    return run.stat().st_ino if isinstance(run, Path) else 0


def node_id() -> tuple[str, str]:
    """(host, place of snapshots there), which identify this rank's node."""
    return platform.node(), str(root())


def in_memory(run: Place) -> list[Checkpoint]:
    """The snapshots of a run whose manifest is on this node, the newest first."""
    if not (run_id := known(run)):
        return []
    try:
        return Store(snapshot_dir(run_id)).complete()
    except OSError:
        return []


def size_here(checkpoint: Checkpoint) -> int:
    """Bytes that a snapshot takes on this node."""
    assert isinstance(checkpoint.path, Path)
    return sum(file.stat().st_size for file in checkpoint.path.iterdir() if file.is_file())


class NodeFiles(msgspec.Struct, frozen=True):
    """The part of a snapshot that one node has: an undamaged manifest, and some of the files."""

    name: str
    step: int
    samples: int
    seal: str
    node: int  # the number of this node when the snapshot was made
    nodes: int  # how many nodes there were
    files: list[str]  # all files of the snapshot
    present: list[str]  # those that this node has, with the right sizes


class Listing(msgspec.Struct, frozen=True):
    """The snapshots of one node."""

    snapshots: list[NodeFiles] = []
    problems: list[str] = []


def clear(place: Path) -> None:
    """Deletes what an earlier start left that is not a complete snapshot, and unused memory."""
    with suppress(OSError):
        for path in Store(private(place)).incomplete():
            storage_of(path).delete(path)
        for spare in place.glob("*.slot"):
            spare.unlink()


def listing(place: Path) -> Listing:
    """The snapshots in a place that have their manifest, and the problems of those that cannot be read."""
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
    """A snapshot that all nodes together may have."""

    name: str
    step: int
    samples: int
    nodes: int  # on how many it was made
    manifests: list[int]  # the numbers of the present nodes that have its manifest
    files: dict[str, list[int]]  # {file: numbers of the present nodes that have it}

    @property
    def missing(self) -> list[str]:
        """The files that no node has."""
        return [name for name, nodes in self.files.items() if not nodes]

    def without(self, bad: Sequence[tuple[int, str]]) -> "Candidate":
        """The snapshot without damaged copies; `bad` has (node, file) of each."""
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
    """The snapshots of which any node has a manifest, newest first; of equal steps the one that was made last."""
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
    """The number in the name of a snapshot, which grows with time."""
    return int(name.rpartition(".")[2])


def nodes_of(ranks: Sequence[tuple[str, str]]) -> list[list[int]]:
    """The ranks of each node; `ranks` has the `node_id()` of each. Nodes are in the order of their first ranks."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(ranks):
        by_place.setdefault(place, []).append(rank)
    return list(by_place.values())


def copies(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """{rank: the rank of the next node to which it sends a copy of its file}; empty if there is one node."""
    if len(nodes) < 2:
        return {}
    pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return {rank: peers[index % len(peers)] for node, peers in pairs for index, rank in enumerate(node)}


def free(place: Path) -> int:
    """The bytes that a snapshot may take: what the file system has, and the machine's memory without a sixteenth."""
    available = shutil.disk_usage(place).free
    with suppress(OSError, ValueError, IndexError):
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        memory_total, memory_free = (1024 * int(meminfo[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
        available = min(available, memory_free - memory_total // 16)
    return available
