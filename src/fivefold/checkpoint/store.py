"""A run's checkpoints on disk. No torch: listing and hashing them needs none.

checkpoints/step-00000012/       one save, in a directory of its own: two saves never mix
    manifest.json                written last and renamed into place: without it the save is incomplete
    tensors.json                 what lies where (`tensors.py`)
    rank-0.tensors ...           the numbers, one file or more of each rank
checkpoints/step-00000012.2/     the same step saved once more
checkpoints/latest               a link to the newest complete one
checkpoints/*.incomplete, *.damaged    set aside, never read again: of the incomplete the newest stays, the damaged all
"""

import errno
import hashlib
import io
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from fivefold import __version__
from fivefold.checkpoint import version1
from fivefold.checkpoint.tensors import MOST, TABLE, Chunk, Tensors, check
from fivefold.launch import faults
from fivefold.launch.cores import for_files, side_by_side
from fivefold.support.errors import UserError
from fivefold.support.files import File, Progress, digest_of, open_regular, plain_name, read_regular, sync

MANIFEST = "manifest.json"
VERSION = 2
_TABLES = {1: version1.TABLE, VERSION: TABLE}  # of the versions that are read
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
_ASIDE = re.compile(r"\.(incomplete|damaged)(-\d+)?$")
_DELETING = ".deleting"


Count = Annotated[int, Meta(ge=0, le=1 << 56)]


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
    files: list[File] = []
    seal: str = ""  # sha256 of all of this with an empty seal

    @property
    def table(self) -> str:
        """The file that says what lies where."""
        return _TABLES[self.version]

    def sealed(self) -> "Manifest":
        return msgspec.structs.replace(self, seal=_seal(msgspec.to_builtins(self)))


def _seal(table: dict[str, Any]) -> str:
    """Of a manifest of any version."""
    return hashlib.sha256(msgspec.json.encode(table | {"seal": ""})).hexdigest()


class Damaged(UserError):
    """Not what was written. (What cannot be opened, or is of another release, may be.)"""


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @cached_property
    def manifest(self) -> Manifest:
        """The seal comes first: without it no number counts, that of the version neither."""
        place = self.path / MANIFEST
        try:
            table = msgspec.json.decode(self._bytes(MANIFEST, _LONGEST))
            if not isinstance(table, dict) or _seal(table) != table.get("seal"):
                raise ValueError("its numbers are not those that it was sealed with")
            if type(found := table.get("version")) is int and found not in _TABLES:
                known = " and ".join(map(str, _TABLES))
                raise UserError(f"{self.path} has version {found} of the format, and this release reads {known}")
            manifest = msgspec.convert(table, Manifest)
            names = [file.name for file in manifest.files]
            if strange := [name for name in names if not plain_name(name)]:
                raise ValueError(f"it names the file {strange[0][:200]!r}, which is not one of its directory")
            if len(set(names)) < len(names) or manifest.table not in names:
                raise ValueError(f"it names a file twice, or no {manifest.table}")
        except _NO_DATA as error:
            raise Damaged(f"{place} is damaged: {error}") from None
        return manifest

    @cached_property
    def tensors(self) -> Tensors:
        """What lies where, checked against itself and the files' sizes before anything is read by it."""
        table = self.manifest.table
        promised = next(file.sha256 for file in self.manifest.files if file.name == table)
        data = self._bytes(table, MOST)
        try:
            if hashlib.sha256(data).hexdigest() != promised:
                raise ValueError("the manifest promises other bytes")
            old = self.manifest.version == 1
            tensors = version1.read_table(data) if old else msgspec.json.decode(data, type=Tensors)
            check(tensors, {file.name: file.bytes for file in self.manifest.files}, archived=old)
        except _NO_DATA as error:
            raise Damaged(f"{self.path / table} is damaged: {error}") from None
        return tensors

    def _bytes(self, name: str, most: int) -> bytes:
        try:
            return read_regular(self.path / name, most)
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
        except UserError as error:
            return error.problems
        return [problem for file in files if (problem := self._misfit(file))]

    def _misfit(self, file: File) -> str | None:
        place = self.path / file.name
        try:
            found = place.lstat()
        except FileNotFoundError:
            return f"{place} is missing: the manifest promises {file.bytes} bytes"
        except OSError as error:
            return f"{place} cannot be looked at: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{place} is no regular file"
        word = "short" if found.st_size < file.bytes else "too long"
        said = f"{place} is {word}: {found.st_size} bytes, and the manifest promises {file.bytes}"
        return None if found.st_size == file.bytes else said

    def damage(self, files: Iterable[File] | None = None, progress: Progress | None = None) -> list[str]:
        """What is wrong with some of its files (all), every byte read. UserError where one cannot be opened."""
        chosen = self.manifest.files if files is None else list(files)
        found = side_by_side(lambda file: self._damage(file, progress), chosen, for_files())
        return list(dict.fromkeys(problem for problem in found if problem))  # a bad table is one for all its files

    def _damage(self, file: File, progress: Progress | None) -> str | None:
        place = self.path / file.name
        try:
            if misfit := self._misfit(file):
                return misfit
            with open_regular(place) as stream:
                found, promised = digest_of(stream, progress), f"the manifest promises {file.sha256[:16]}..."
                if found != file.sha256:
                    return f"{place} is damaged: its sha256 is {found[:16]}..., and {promised}"
                if file.name == self.manifest.table:
                    _ = self.tensors  # Damaged, if it is not what it should be
                for name, chunk in self._archives.get(file.name, ()):
                    self.numbers_at(stream, name, chunk)
        except Damaged as error:
            return str(error)
        except OSError as error:
            said = f"{place} cannot be read: {error.strerror}"
            if error.errno in _NO_FILE:
                return said
            raise UserError(said) from None
        return None

    @cached_property
    def _archives(self) -> dict[str, list[tuple[str, Chunk]]]:
        """By file, the chunks that have listings of their own."""
        found: dict[str, list[tuple[str, Chunk]]] = {}
        for name, stored in self.tensors.items() if self.manifest.version == 1 else ():
            for chunk in stored.chunks:
                found.setdefault(chunk.file, []).append((name, chunk))
        return found

    def numbers_at(self, stream: io.FileIO, name: str, chunk: Chunk) -> int:
        """The first byte of a chunk's numbers in its file."""
        if self.manifest.version > 1:
            return chunk.start
        try:
            return version1.numbers_at(stream, chunk, self.tensors[name].dtype)
        except ValueError as error:
            raise Damaged(f"{self.path / chunk.file} is damaged: {name} at {list(chunk.offsets)}: {error}") from None


class Store:
    """The directory of a run's checkpoints. One process at a time changes it: the run's first rank."""

    def __init__(self, directory: Path):
        self.directory = directory

    def complete(self) -> list[Checkpoint]:
        """Those whose manifest is in place, the newest first; what their files hold is not looked at."""
        found = [path for path in self._named() if _has_manifest(path)]
        return [Checkpoint(path) for path in sorted(found, key=_parts, reverse=True)]

    def incomplete(self) -> list[Path]:
        return [path for path in self._named() if not _has_manifest(path)]

    def aside(self) -> list[Path]:
        """Set aside earlier."""
        return sorted(path for path in self._inside() if _ASIDE.search(path.name))

    def _named(self) -> list[Path]:
        return [path for path in self._inside() if _NAME.fullmatch(path.name)]

    def _inside(self) -> Iterable[Path]:
        return self.directory.iterdir() if self.directory.is_dir() else ()

    def new(self, step: int) -> Path:
        """An empty directory of its own for a save of this step."""
        self.directory.mkdir(exist_ok=True)  # not its parents: a run's directory that is gone is not made again
        number = 1
        while True:
            path = self.directory / (f"step-{step:08d}" + (f".{number}" if number > 1 else ""))
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1

    def commit(self, path: Path, manifest: Manifest) -> Checkpoint:
        """The moment at which a save becomes a checkpoint."""
        for file in manifest.files:
            sync(path / file.name)
        half = path / f"{MANIFEST}.half"
        half.write_bytes(msgspec.json.format(msgspec.json.encode(manifest.sealed())) + b"\n")
        sync(half)
        faults.strike("commit", step=manifest.step)
        half.rename(path / MANIFEST)
        sync(path)
        sync(self.directory)
        self._point_at(path)
        return Checkpoint(path)

    def _point_at(self, path: Path) -> None:
        """For people: a checkpoint is one without it, where links cannot be made or `latest` is something else."""
        with suppress(OSError):
            link = self.directory / "latest.half"
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.rename(self.directory / "latest")

    def set_aside(self, path: Path, how: str) -> Path:
        """Out of the way, and not deleted: 'step-00000012.damaged'."""
        number = 1
        while (to := path.with_name(f"{path.name}.{how}" + (f"-{number}" if number > 1 else ""))).exists():
            number += 1
        path.rename(to)
        self._repoint()
        return to

    def _repoint(self) -> None:
        link = self.directory / "latest"
        if link.is_symlink() and not link.exists():
            link.unlink()
        if newest := self.complete()[:1]:
            self._point_at(newest[0].path)

    def retain(self, keep: int, every: int) -> list[Path]:
        """Delete complete checkpoints but the newest `keep` good ones and each whose step is a multiple of `every`.

        Half saves go too, but for the newest that was set aside. Nothing may be under way.
        """
        self.prune()
        good = [one for one in self.complete() if not one.misfits()]
        old = [one.path for one in good[keep:] if not (every and one.step % every == 0)]
        for path in [*self.incomplete(), *old]:
            hidden = path.with_name(path.name + _DELETING)  # first out of sight, in one piece
            path.rename(hidden)
            faults.strike("retain")
            shutil.rmtree(hidden, ignore_errors=True)  # what is left of it goes the next time
        return old

    def prune(self) -> None:
        """Delete what is half deleted, and what was set aside as incomplete, but for the newest of those."""
        halves = [(path, match) for path in self._inside() if (match := _HALF.fullmatch(path.name))]
        halves.sort(key=lambda half: [int(number or 1) for number in half[1].groups()])
        for gone in [*self.directory.glob(f"step-*{_DELETING}"), *(path for path, _ in halves[:-1])]:
            shutil.rmtree(gone, ignore_errors=True)


def _has_manifest(path: Path) -> bool:
    """What cannot be looked at may have one: reading it says why it cannot."""
    try:
        (path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _parts(path: Path) -> tuple[int, int]:
    """Step, and which save of it."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 1)
