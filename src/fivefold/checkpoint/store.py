"""A run's checkpoints on disk. No torch: listing and hashing them needs none.

checkpoints/step-00000012/       one save, in a directory of its own: two saves never mix
    manifest.json                written last and renamed into place: without it the save is incomplete
    .metadata, __0_0.distcp ...  DCP's files
checkpoints/step-00000012.2/     the same step saved once more
checkpoints/latest               a link to the newest complete one
checkpoints/*.incomplete, *.damaged    set aside: never read again, and left for a person to look at
"""

import hashlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from fivefold import __version__
from fivefold.launch import faults
from fivefold.launch.cores import for_files, side_by_side
from fivefold.support.errors import UserError
from fivefold.support.files import File, Progress, digest, sync

MANIFEST = "manifest.json"
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_ASIDE = re.compile(r"\.(incomplete|damaged)(-\d+)?$")
_DELETING = ".deleting"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is: everything but the tensors."""

    version: int = VERSION
    fivefold: str = __version__  # the release that wrote it
    torch: str = field(default_factory=lambda: version("torch"))
    step: int  # steps that are done
    samples: int  # of the data order that have been trained on: the next one is this number
    updates: int  # of the optimizer: steps whose batch carried any loss
    optimizer: bool  # whether its moments are in it; imported weights have none
    data: str  # the data's fingerprint, empty where there was none
    job: dict[str, Any]  # resolved; seeds are in it, and nothing else is random
    files: list[File] = []
    seal: str = ""  # sha256 of all of this with an empty seal

    def sealed(self) -> "Manifest":
        bare = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=hashlib.sha256(msgspec.json.encode(bare)).hexdigest())


class Damaged(UserError):
    """A manifest that is not what was written. (One that cannot be opened, or is of another release, may be.)"""


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @cached_property
    def manifest(self) -> Manifest:
        try:
            text = (self.path / MANIFEST).read_bytes()
            manifest = msgspec.json.decode(text, type=Manifest)
        except OSError as error:
            raise UserError(f"cannot read {self.path / MANIFEST}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise Damaged(f"{self.path / MANIFEST} is damaged: {error}") from None
        if (found := manifest.version) != VERSION:
            raise UserError(f"{self.path} has version {found} of the format, and this release reads {VERSION}")
        if manifest.sealed().seal != manifest.seal:
            raise Damaged(f"{self.path / MANIFEST} is damaged: its numbers are not those that it was sealed with")
        return manifest

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
        if not place.is_file():
            return f"{place} is missing: the manifest promises {file.bytes} bytes"
        size = place.stat().st_size
        word = "short" if size < file.bytes else "too long"
        said = f"{place} is {word}: {size} bytes, and the manifest promises {file.bytes}"
        return None if size == file.bytes else said

    def damage(self, files: Iterable[File] | None = None, progress: Progress | None = None) -> list[str]:
        """What is wrong with some of its files (all), every byte read."""
        chosen = self.manifest.files if files is None else list(files)

        def wrong(file: File) -> str | None:
            if misfit := self._misfit(file):
                return misfit
            found, promised = digest(self.path / file.name, progress), f"the manifest promises {file.sha256[:16]}..."
            said = f"{self.path / file.name} is damaged: its sha256 is {found[:16]}..., and {promised}"
            return None if found == file.sha256 else said

        return [problem for problem in side_by_side(wrong, chosen, for_files()) if problem]


class Store:
    """The directory of a run's checkpoints. One process at a time changes it: the run's first rank."""

    def __init__(self, directory: Path):
        self.directory = directory

    def complete(self) -> list[Checkpoint]:
        """Those whose manifest is in place, the newest first; what their files hold is not looked at."""
        found = [path for path in self._named() if (path / MANIFEST).exists()]
        return [Checkpoint(path) for path in sorted(found, key=_parts, reverse=True)]

    def incomplete(self) -> list[Path]:
        return [path for path in self._named() if not (path / MANIFEST).exists()]

    def aside(self) -> list[Path]:
        """Set aside earlier."""
        return sorted(path for path in self._inside() if _ASIDE.search(path.name))

    def _named(self) -> list[Path]:
        return [path for path in self._inside() if _NAME.fullmatch(path.name)]

    def _inside(self) -> Iterable[Path]:
        return self.directory.iterdir() if self.directory.is_dir() else ()

    def new(self, step: int) -> Path:
        """An empty directory of its own for a save of this step."""
        self.directory.mkdir(parents=True, exist_ok=True)
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
        """Delete complete checkpoints but the newest `keep` good ones and each whose step is a multiple of `every`."""
        for half_gone in self.directory.glob(f"*{_DELETING}"):
            shutil.rmtree(half_gone, ignore_errors=True)
        good = [one for one in self.complete() if not one.misfits()]
        old = [one.path for one in good[keep:] if not (every and one.step % every == 0)]
        for path in old:
            hidden = path.with_name(path.name + _DELETING)  # first out of sight, in one piece
            path.rename(hidden)
            faults.strike("retain")
            shutil.rmtree(hidden)
        return old


def _parts(path: Path) -> tuple[int, int]:
    """Step, and which save of it."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 1)
