"""A run's checkpoints, on disk or on object storage (`storage.py`). No torch: listing and hashing them needs none.

checkpoints/step-00000012/       one save, in a directory of its own: two saves never mix
    manifest.json                written last and renamed into place: without it the save is incomplete
    tensors.json                 what lies where (`tensors.py`)
    rank-0.tensors ...           the numbers, one file or more of each rank
checkpoints/step-00000012.2/     the same step saved once more
checkpoints/latest               a link to the newest complete one
checkpoints/*.incomplete, *.damaged, *.suspect    set aside, never read again: of the incomplete the newest stays, of
                                 the damaged, and of those that a watcher suspects, all
"""

import errno
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from fivefold.checkpoint.storage import FileReader, Storage, storage_of
from fivefold.checkpoint.tensors import MOST, PREFIX, TABLE, Tensors, check, extents, short, sum_of
from fivefold.launch import faults
from fivefold.launch.host import for_files, side_by_side
from fivefold.support.errors import UserError
from fivefold.support.files import File, Progress, digest_of, plain_name
from fivefold.support.places import Place
from fivefold.version import __version__

MANIFEST = "manifest.json"
VERSION = 2
_LONGEST = 1 << 26  # bytes of a manifest
_NO_DATA = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)  # what decoding may raise
_NO_FILE = {
    errno.ENOENT,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENXIO,
    errno.EFBIG,
    errno.EIO,
}  # no regular file, or none any more
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_HALF = re.compile(r"step-(\d{8,})(?:\.(\d+))?\.incomplete(?:-(\d+))?")
_ASIDE = re.compile(r"\.(incomplete|damaged|suspect)(-\d+)?$")
_DELETING = ".deleting"


Count = Annotated[int, Meta(ge=0, le=1 << 56)]


def step_name(step: int, number: int = 1) -> str:
    """The directory of a save; `number`: the how manieth of its step."""
    return f"step-{step:08d}" + (f".{number}" if number > 1 else "")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is: everything but the tensors."""

    version: int = VERSION
    fivefold: str = __version__  # the release that wrote it
    torch: str = field(default_factory=lambda: version("torch"))
    step: Count  # steps that are done
    samples: Count  # of the data order that have been trained on: the next one is this number
    updates: Count  # of the optimizer: steps whose batch carried any loss
    optimizer: bool  # whether its moments are in it; imported weights have none
    data: str  # the data's fingerprint, empty where there was none
    job: dict[str, dict[str, Any]]  # resolved; seeds are in it, and nothing else is random
    watched: dict[str, Any] = {}  # what the watchers of training know by then; it is the trainer's to read
    files: list[File] = []
    seal: str = ""  # sha256 of all of this with an empty seal

    @property
    def states_of(self) -> str:
        """The name of the optimizer whose states it has; empty where there are none."""
        return str(self.job.get("optimizer", {}).get("name", "adamw")) if self.optimizer else ""

    def sealed(self) -> "Manifest":
        return msgspec.structs.replace(self, seal=_seal(msgspec.to_builtins(self)))

    def text(self) -> bytes:
        """As a file, sealed."""
        return msgspec.json.format(msgspec.json.encode(self.sealed())) + b"\n"


def _seal(table: dict[str, Any]) -> str:
    """Of a manifest of any version."""
    return hashlib.sha256(msgspec.json.encode(table | {"seal": ""})).hexdigest()


class Damaged(UserError):
    """Not what was written. (What cannot be opened, or is of another release, may be.)"""


@dataclass(frozen=True)
class Checkpoint:
    path: Place

    @property
    def storage(self) -> Storage:
        return storage_of(self.path)

    @cached_property
    def manifest(self) -> Manifest:
        """The seal comes first: without it no number counts, that of the version neither."""
        place = self.path / MANIFEST
        try:
            table = msgspec.json.decode(self._bytes(MANIFEST, _LONGEST))
            if not isinstance(table, dict) or _seal(table) != table.get("seal"):
                raise ValueError("its checksum does not match")
            if type(stated := table.get("version")) is int and stated != VERSION:
                old = "; an earlier release reads both, and its `fivefold checkpoint reshard` writes version 2"
                said = f"{self.path} has version {stated} of the format, and this release reads version {VERSION}"
                raise UserError(said + (old if stated < VERSION else ""), "checkpoint.version")
            manifest = msgspec.convert(table, Manifest)
            names = [file.name for file in manifest.files]
            if strange := [name for name in names if not plain_name(name)]:
                raise ValueError(f"it names the file {strange[0][:200]!r}, which is not one of its directory")
            if len(set(names)) < len(names) or TABLE not in names:
                raise ValueError(f"it names a file twice, or no {TABLE}")
        except _NO_DATA as error:
            raise Damaged(f"{place} is damaged: {error}", "checkpoint.damaged") from None
        return manifest

    @cached_property
    def tensors(self) -> Tensors:
        """What lies where, checked against itself and the files' sizes before anything is read by it."""
        promised = next(file.sha256 for file in self.manifest.files if file.name == TABLE)
        data = self._bytes(TABLE, MOST)
        try:
            if hashlib.sha256(data).hexdigest() != promised:
                raise ValueError("the manifest promises other bytes")
            tensors = msgspec.json.decode(data, type=Tensors)
            check(tensors, {file.name: file.bytes for file in self.manifest.files})
        except _NO_DATA as error:
            raise Damaged(f"{self.path / TABLE} is damaged: {error}", "checkpoint.damaged") from None
        return tensors

    def _bytes(self, name: str, most: int) -> bytes:
        try:
            return self.storage.read(self.path / name, most)
        except OSError as error:
            kind = Damaged if error.errno in _NO_FILE else UserError
            raise kind(f"cannot read {self.path / name}: {error.strerror}") from None

    @property
    def step(self) -> int:
        return _parts(self.path)[0]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files)

    def misfits(self) -> list[str]:
        """Files that are missing or of another size: what a look at the directory shows, without reading them."""
        try:
            files = self.manifest.files
            sizes = self._sizes(files)
        except UserError as error:
            return error.problems
        return [problem for file in files if (problem := self._misfit(file, sizes[file.name]))]

    def _sizes(self, files: list[File]) -> dict[str, int | OSError]:
        try:
            return self.storage.sizes(self.path, [file.name for file in files])
        except OSError as error:
            raise UserError(f"{self.path} cannot be accessed: {error.strerror}", "file.read") from None

    def _misfit(self, file: File, size: int | OSError) -> str | None:
        place = self.path / file.name
        if isinstance(size, FileNotFoundError):
            return f"{place} is missing: the manifest promises {file.bytes} bytes"
        if isinstance(size, OSError):
            return f"{place} {'is' if size.errno == errno.EINVAL else 'cannot be looked at:'} {size.strerror}"
        word = "short" if size < file.bytes else "too long"
        said = f"{place} is {word}: {size} bytes, and the manifest promises {file.bytes}"
        return None if size == file.bytes else said

    def damage(self, files: Iterable[File] | None = None, progress: Progress | None = None) -> list[str]:
        """What is wrong with some of its files (all), every byte read. UserError where one cannot be opened."""
        chosen = self.manifest.files if files is None else list(files)
        sizes = self._sizes(chosen)
        problems = side_by_side(lambda file: self._damage(file, sizes[file.name], progress), chosen, for_files())
        return list(dict.fromkeys(problem for problem in problems if problem))  # a bad table is one for all its files

    def _damage(self, file: File, size: int | OSError, progress: Progress | None) -> str | None:
        place = self.path / file.name
        try:
            if misfit := self._misfit(file, size):
                return misfit
            with self.storage.open(place) as stream:
                if (digest := self._sum(file, stream, progress)) != file.sha256:
                    return altered(place, digest, file)
                if file.name == TABLE:
                    _ = self.tensors  # Damaged, if it is not what it should be
        except Damaged as error:
            return str(error)
        except OSError as error:
            said = f"{place} cannot be read: {error.strerror}"
            if error.errno in _NO_FILE:
                return said
            raise UserError(said, "file.read") from None
        return None

    def _sum(self, file: File, stream: FileReader, progress: Progress | None) -> str:
        """Of a file's bytes, of the kind that the manifest promises."""
        if not file.sha256.startswith(PREFIX):
            return digest_of(stream, progress)

        def read(start: int, size: int) -> memoryview:
            part = memoryview(bytearray(size))
            stream.fill(part, start, progress or (lambda _: None))
            return part

        return sum_of(extents(self.tensors, file.name), read)


def altered(place: Place, digest: str, file: File) -> str:
    """The sentence for a file whose sum is not the one that was promised."""
    promised = file.sha256.rpartition(":")[2][:16]
    return f"{place} is damaged: its {short(digest)}, and the manifest promises {promised}..."


class Store:
    """Where a run's checkpoints lie. One process at a time changes it: the run's first rank."""

    def __init__(self, directory: Place):
        self.directory = directory

    @property
    def storage(self) -> Storage:
        return storage_of(self.directory)

    def complete(self) -> list[Checkpoint]:
        """Those whose manifest is in place, the newest first; what their files hold is not looked at."""
        paths = [path for path in self._named() if self._has_manifest(path)]
        return [Checkpoint(path) for path in sorted(paths, key=_parts, reverse=True)]

    def incomplete(self) -> list[Place]:
        return [path for path in self._named() if not self._has_manifest(path)]

    def aside(self) -> list[Place]:
        """Set aside earlier."""
        paths = (path for path in self.storage.folders(self.directory) if _ASIDE.search(path.name))
        return sorted(paths, key=lambda path: path.name)

    def _named(self) -> list[Place]:
        return [path for path in self.storage.folders(self.directory) if _NAME.fullmatch(path.name)]

    def _has_manifest(self, path: Place) -> bool:
        return self.storage.exists(path / MANIFEST)

    def new(self, step: int) -> Place:
        """An empty directory of its own for a save of this step."""
        number = 1
        while True:
            path = self.directory / step_name(step, number)
            try:
                self.storage.make(path)
                return path
            except FileExistsError:
                number += 1

    def commit(self, path: Place, manifest: Manifest) -> Checkpoint:
        """The moment at which a save becomes a checkpoint."""
        files = [file.name for file in manifest.files]
        before = partial(faults.strike, "commit", step=manifest.step)
        self.storage.commit(path / MANIFEST, manifest.text(), files, before)
        self.storage.point(self.directory, path.name)
        return Checkpoint(path)

    def discard(self, path: Place) -> None:
        """Delete half a save, or what there is of it. What has its manifest is whole, and stays."""
        if not self._has_manifest(path):
            self.storage.delete(path)

    def set_aside(self, path: Place, how: str) -> Place:
        """Out of the way, and not deleted: 'step-00000012.damaged'."""
        taken, number = {other.name for other in self.storage.folders(self.directory)}, 1
        while (name := f"{path.name}.{how}" + (f"-{number}" if number > 1 else "")) in taken:
            number += 1
        to = path.with_name(name)
        self.storage.rename(path, to)
        self.storage.point(self.directory, next((checkpoint.path.name for checkpoint in self.complete()), None))
        return to

    def retain(self, keep: int, every: int) -> list[Place]:
        """Delete complete checkpoints but the newest `keep` good ones, each whose step is a multiple of `every`, and
        that of step 0: imported weights, which nothing else here can make again.

        Half saves go too, but for the newest that was set aside. Nothing may be under way.
        """
        self.prune()
        good = [save for save in self.complete() if not save.misfits()]
        old = [save.path for save in good[keep:] if save.step and not (every and save.step % every == 0)]
        self._delete([*self.incomplete(), *old])
        return old

    def undo(self, step: int) -> None:
        """Delete those of later steps than this one: the run has gone back to it, and they are not its own any more."""
        self._delete([checkpoint.path for checkpoint in self.complete() if checkpoint.step > step])
        self.storage.point(self.directory, next((checkpoint.path.name for checkpoint in self.complete()), None))

    def _delete(self, paths: list[Place]) -> None:
        for path in paths:
            hidden = path.with_name(path.name + _DELETING)  # first out of sight, in one piece
            self.storage.rename(path, hidden)
            faults.strike("retain")
            self.storage.delete(hidden)  # what is left of it goes the next time

    def prune(self) -> None:
        """Delete what is half deleted, and what was set aside as incomplete, but for the newest of those."""
        inside = self.storage.folders(self.directory)
        halves = [(path, match) for path in inside if (match := _HALF.fullmatch(path.name))]
        halves.sort(key=lambda half: [int(number or 1) for number in half[1].groups()])
        deleting = [path for path in inside if path.name.startswith("step-") and path.name.endswith(_DELETING)]
        for gone in [*deleting, *(path for path, _ in halves[:-1])]:
            self.storage.delete(gone)


def _parts(path: Place) -> tuple[int, int]:
    """Step, and which save of it."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 1)
