"""Snapshots in host memory that outlives the ranks: their files, their run, and which of them can be loaded.

    /dev/shm/fivefold-1000/                   private to this user; FIVEFOLD_MEMORY names another directory
        4f1d.../                              a run, by a random id that the run's directory has
            step-00000020.1767225600000/      a snapshot, in the format of a checkpoint; the suffix grows with time:
                                              when the start began, in ms since the epoch, plus the
                                              snapshot's number within that start
                manifest.json, tensors.json   on every node, written last
                rank-0.tensors ...            of this node's ranks, and copies of the previous node's rank files
                node.json                     the number of this node, and how many there were
            rank-0.1.slot                     the second (0, 1, 2) of rank 0's files, while no snapshot uses it

A node is a host and the directory of snapshots there, so two such directories on one machine are two nodes. The module
imports no torch: commands list snapshots without it.
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

from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Damaged
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.support.storage_place import Place

MEMORY_DIR_ENV = "FIVEFOLD_MEMORY"
ID_FILE, STARTS_FILE = "memory-id", "memory-starts.json"  # in the run's directory
NODE_FILE = "node.json"  # in a snapshot
KEEP_LAST = 2  # snapshots
_MAX_STARTS = 64  # that are listed, the last ones
_MAX_ID_BYTES, _MAX_STARTS_BYTES, _MAX_NODE_BYTES = 1000, 1 << 16, 1000  # of the three files: none is as long
_ID = re.compile(r"[0-9a-f]{32}")


# ---- the directory and the run ---------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """Identifies a run's directory. A copy of the directory has another inode, and so is another run."""

    id: str
    inode: int


def memory_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where this user's snapshots are on this node, of all runs."""
    return Path(env.get(MEMORY_DIR_ENV) or f"/dev/shm/fivefold-{os.geteuid()}")


def ensure_private_dir(path: Path, *, make: bool = False) -> Path:
    """The path itself; OSError unless it is a directory private to this user, and not a link. `make`: if missing."""
    if make:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, f"{path} is not a directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, f"{path} is not this user's alone: it must be theirs, with mode 0700")
    return path


def snapshot_dir(run_id: str, *, make: bool = False) -> Path:
    """The directory of a run's snapshots on this node."""
    return ensure_private_dir(ensure_private_dir(memory_dir(), make=make) / run_id, make=make)


def existing_id(run_dir: Place) -> str:
    """The id of a run's snapshots in memory; empty if it has none."""
    try:
        identity = msgspec.json.decode(storage_of(run_dir).read(run_dir / ID_FILE, _MAX_ID_BYTES), type=Identity)
    except (OSError, *PARSE_ERRORS):
        return ""
    return identity.id if _ID.fullmatch(identity.id) and identity.inode == _inode(run_dir) else ""


def get_or_create_id(run_dir: Place) -> str:
    """The id of a run's snapshots in memory; writes a new one if it has none."""
    if existing := existing_id(run_dir):
        return existing
    new = Identity(secrets.token_hex(16), _inode(run_dir))
    storage_of(run_dir).put(run_dir / ID_FILE, msgspec.json.encode(new) + b"\n")
    return new.id


def _inode(run_dir: Place) -> int:
    return run_dir.stat().st_ino if isinstance(run_dir, Path) else 0


# ---- earlier starts --------------------------------------------------------------------------------------------------
# A start that resumes from an earlier step than a snapshot's puts the run on another branch: the snapshot's steps are
# computed again, with other weights, and it must not be resumed from later. So a run's directory lists its starts.


class RunStart(msgspec.Struct, frozen=True):
    """One start of the run."""

    at: int  # when it began, in ms since the epoch: the names of its snapshots end with larger numbers
    step: int  # the step after which it resumed


class RunStarts(msgspec.Struct, frozen=True):
    """The last starts of a run, in order, as the file has them."""

    starts: list[RunStart]
    seal: str  # sha256 of `starts`: a damaged number could make an abandoned snapshot count, or hide a good one

    @classmethod
    def of(cls, starts: list[RunStart]) -> "RunStarts":
        return cls(starts, hashlib.sha256(msgspec.json.encode(starts)).hexdigest())


def read_starts(run_dir: Place) -> list[RunStart]:
    """The last starts of a run; raises Damaged if the list cannot be read."""
    file = run_dir / STARTS_FILE
    try:
        content = storage_of(run_dir).read(file, _MAX_STARTS_BYTES)
        stored = msgspec.json.decode(content, type=RunStarts | list[RunStart])
    except FileNotFoundError:
        return []
    except (OSError, *PARSE_ERRORS) as error:
        why = getattr(error, "strerror", None) or error
        raise Damaged(f"{file} cannot be read: {why}", "checkpoint.damaged") from None
    if isinstance(stored, list):  # of earlier releases, without a seal
        return stored
    if stored != RunStarts.of(stored.starts):
        raise Damaged(f"{file} is damaged: its checksum does not match", "checkpoint.damaged")
    return stored.starts


def record_start(run_dir: Place, earlier: Sequence[RunStart], at: int, step: int) -> None:
    """Adds a start to the list of `earlier` ones; errors are ignored, and then old snapshots count as before."""
    with suppress(OSError):
        last = [*earlier, RunStart(at, step)][-_MAX_STARTS:]
        storage_of(run_dir).put(run_dir / STARTS_FILE, msgspec.json.encode(RunStarts.of(last)) + b"\n")


def is_abandoned(name: str, step: int, starts: Sequence[RunStart]) -> bool:
    """True if a later start resumed from before this step, so the snapshot is on a discarded branch."""
    return any(made_at(name) < start.at and step > start.step for start in starts)


def made_at(name: str) -> int:
    """The number at the end of a snapshot's name, which grows with time."""
    return int(name.rpartition(".")[2])


# ---- snapshots on this node ------------------------------------------------------------------------------------------


def local_snapshots(run_dir: Place) -> list[Checkpoint]:
    """The snapshots of a run whose manifest is on this node, the newest first."""
    if not (run_id := existing_id(run_dir)):
        return []
    try:
        return Store(snapshot_dir(run_id)).complete()
    except OSError:
        return []


def local_bytes(snapshot: Checkpoint) -> int:
    """Bytes that a snapshot takes on this node."""
    assert isinstance(snapshot.path, Path)
    return sum(file.stat().st_size for file in snapshot.path.iterdir() if file.is_file())


class NodeFiles(msgspec.Struct, frozen=True):
    """The part of a snapshot that one node has: an undamaged manifest, and some of the files."""

    name: str
    step: int
    samples: int
    seal: str  # of the manifest
    node: int  # the number of this node when the snapshot was made
    node_count: int  # how many nodes there were
    files: list[str]  # all files of the snapshot
    present: list[str]  # those that this node has, with the right sizes


class Listing(msgspec.Struct, frozen=True):
    """The snapshots of one node."""

    snapshots: list[NodeFiles] = []
    problems: list[str] = []


def delete_leftovers(directory: Path) -> None:
    """Deletes what an earlier start left that is not a complete snapshot, and files that no snapshot uses."""
    with suppress(OSError):
        ensure_private_dir(directory)
        for path in Store(directory).incomplete():
            with suppress(OSError):  # the others are deleted all the same
                storage_of(path).delete(path)
        for spare in directory.glob("*.slot"):
            with suppress(OSError):
                spare.unlink()


def list_snapshots(directory: Path) -> Listing:
    """The snapshots in a directory that have their manifest, and the problems of those that cannot be read."""
    snapshots, problems = [], []
    try:
        ensure_private_dir(directory)
        for snapshot in Store(directory).complete():
            try:
                snapshots.append(_files_of(snapshot))
            except UserError as error:
                problems += error.problems
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{directory} cannot be used: {error.strerror or error}")
    return Listing(snapshots, problems)


def _files_of(snapshot: Checkpoint) -> NodeFiles:
    path, manifest = snapshot.path, snapshot.manifest
    assert isinstance(path, Path)
    names = [file.name for file in manifest.files]
    sizes = snapshot.storage.sizes(path, names)
    present = [file.name for file in manifest.files if sizes[file.name] == file.bytes]
    try:
        content = read_regular(path / NODE_FILE, _MAX_NODE_BYTES)
        node, node_count = msgspec.json.decode(content, type=tuple[int, int])
    except (OSError, *PARSE_ERRORS) as error:
        raise Damaged(f"{path / NODE_FILE} is damaged: {error}", "checkpoint.damaged") from None
    return NodeFiles(path.name, manifest.step, manifest.samples, manifest.seal, node, node_count, names, present)


# ---- snapshots of all nodes ------------------------------------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True):
    """A snapshot that all nodes together may have. Nodes are numbered as they are now."""

    name: str
    step: int
    samples: int
    node_count: int  # on how many nodes it was made
    manifest_nodes: list[int]  # the nodes that have its manifest
    files: dict[str, list[int]]  # {file: the nodes that have it}

    @property
    def missing(self) -> list[str]:
        """The files that no node has."""
        return [name for name, holders in self.files.items() if not holders]

    def without_damaged(self, damaged: Sequence[tuple[int, str]]) -> "Candidate":
        """The snapshot without damaged copies; `damaged` has (node, file) of each.

        A node whose manifest is damaged has nothing of the snapshot that could be trusted.
        """
        distrusted = {node for node, name in damaged if name == MANIFEST}
        files = {
            name: [node for node in holders if (node, name) not in damaged and node not in distrusted]
            for name, holders in self.files.items()
        }
        manifest_nodes = [node for node in self.manifest_nodes if node not in distrusted]
        return msgspec.structs.replace(self, manifest_nodes=manifest_nodes, files=files)

    @property
    def availability(self) -> str:
        """How many nodes of those that made it have it, where it was several; else an empty text."""
        return f"{len(self.manifest_nodes)} of {self.node_count} nodes" if self.node_count > 1 else ""


def candidates(by_node: Sequence[Sequence[NodeFiles]]) -> list[Candidate]:
    """The snapshots whose manifest is on any node, the newest step first, then the one made last.

    `by_node`: the files of each node.
    """
    by_seal: dict[tuple[str, str], Candidate] = {}
    for node, snapshots in enumerate(by_node):
        for found in snapshots:
            empty = Candidate(
                found.name, found.step, found.samples, found.node_count, [], {name: [] for name in found.files}
            )
            candidate = by_seal.setdefault((found.name, found.seal), empty)
            candidate.manifest_nodes.append(node)
            for name in found.present:
                candidate.files[name].append(node)
    return sorted(by_seal.values(), key=lambda candidate: (candidate.step, made_at(candidate.name)), reverse=True)


# ---- placement and free space ----------------------------------------------------------------------------------------


def node_id() -> tuple[str, str]:
    """(host, directory of snapshots there), which identify this rank's node."""
    return platform.node(), str(memory_dir())


def ranks_by_node(node_ids: Sequence[tuple[str, str]]) -> list[list[int]]:
    """The ranks of each node, by the node ids of all ranks. Nodes are in the order of their first ranks."""
    by_id: dict[tuple[str, str], list[int]] = {}
    for rank, its_node in enumerate(node_ids):
        by_id.setdefault(its_node, []).append(rank)
    return list(by_id.values())


def copy_targets(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """{rank: the rank of the next node to which it sends a copy of its file}; empty if there is one node.

    `nodes` has the ranks of each.
    """
    if len(nodes) < 2:
        return {}
    pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return {rank: peers[index % len(peers)] for ranks, peers in pairs for index, rank in enumerate(ranks)}


def free_bytes(directory: Path) -> int:
    """What a snapshot may take: the file system's free space, and at most MemAvailable less 1/16 of MemTotal."""
    available = shutil.disk_usage(directory).free
    with suppress(OSError, ValueError, IndexError):
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        memory_total, memory_free = (1024 * int(meminfo[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
        available = min(available, memory_free - memory_total // 16)
    return available
