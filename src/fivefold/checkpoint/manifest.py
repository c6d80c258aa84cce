"""One checkpoint: its manifest, and the check of its files against it. No torch: hashing needs none.

The manifest is the last file that a save writes. It lists the other files with their hashes, and has a hash of itself
(`seal`).
"""

import errno
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from fivefold.checkpoint.checksums import CHECKSUM_PREFIX, checksum_of_chunks, extents, short_hash
from fivefold.checkpoint.storage import FileReader, Storage, storage_of
from fivefold.checkpoint.tensors import MAX_TABLE_BYTES, TABLE_FILE, Tensors, check
from fivefold.launch.host import for_files, side_by_side
from fivefold.support.errors import UserError
from fivefold.support.files import File, Progress, digest_of, plain_name
from fivefold.support.storage_place import Place
from fivefold.version import __version__

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_MAX_MANIFEST = 1 << 26  # bytes
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)
# Errors that mean that a file is missing, is not a regular one, or cannot be read any more: damage.
_DAMAGE_ERRNOS = {errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EFBIG, errno.EIO}
STEP_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
Count = Annotated[int, Meta(ge=0, le=1 << 56)]


def step_name(step: int, number: int = 1) -> str:
    """The name of a save's directory; `number` counts the saves of the same step, from 1."""
    return f"step-{step:08d}" + (f".{number}" if number > 1 else "")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a checkpoint except the tensors."""

    version: int = FORMAT_VERSION
    fivefold: str = __version__  # the release that wrote it
    torch: str = field(default_factory=lambda: version("torch"))
    step: Count  # steps that are done
    samples: Count  # samples of the data order used so far, and the number of the next one
    updates: Count  # of the optimizer: steps whose batch carried any loss
    optimizer: bool  # whether the optimizer's states are saved; imported weights have none
    data: str  # the data's fingerprint, empty where there was none
    job: dict[str, dict[str, Any]]  # resolved; its seeds are the only source of randomness
    watched: dict[str, Any] = {}  # the state of the spike policy, which the trainer reads
    files: list[File] = []
    seal: str = ""  # sha256 of this manifest with an empty seal

    @property
    def states_of(self) -> str:
        """The name of the optimizer whose states it has; empty where there are none."""
        return str(self.job.get("optimizer", {}).get("name", "adamw")) if self.optimizer else ""

    def sealed(self) -> "Manifest":
        return msgspec.structs.replace(self, seal=_seal(msgspec.to_builtins(self)))

    def text(self) -> bytes:
        """The contents of manifest.json, with the seal."""
        return msgspec.json.format(msgspec.json.encode(self.sealed())) + b"\n"


def _seal(table: dict[str, Any]) -> str:
    """The seal of a manifest of any version."""
    return hashlib.sha256(msgspec.json.encode(table | {"seal": ""})).hexdigest()


class Damaged(UserError):
    """A file is not what was written. (Files that cannot be opened, or are of another release, raise UserError.)"""


@dataclass(frozen=True)
class Checkpoint:
    path: Place

    @property
    def storage(self) -> Storage[Any]:
        return storage_of(self.path)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest; Damaged if it cannot be decoded. The seal is checked before any field, the version too."""
        place = self.path / MANIFEST
        try:
            table = msgspec.json.decode(self._bytes(MANIFEST, _MAX_MANIFEST))
            if not isinstance(table, dict) or _seal(table) != table.get("seal"):
                raise ValueError("its checksum does not match")
            version = table.get("version")
            if type(version) is int and version != FORMAT_VERSION:
                message = (
                    f"{self.path} has version {version} of the format, and this release reads version {FORMAT_VERSION}"
                )
                if version < FORMAT_VERSION:
                    message += "; an earlier release reads both, and its `fivefold checkpoint reshard` writes version 2"
                raise UserError(message, "checkpoint.version")
            manifest = msgspec.convert(table, Manifest)
            names = [file.name for file in manifest.files]
            if bad_names := [name for name in names if not plain_name(name)]:
                raise ValueError(f"it names the file {bad_names[0][:200]!r}, which is not one of its directory")
            if len(set(names)) < len(names) or TABLE_FILE not in names:
                raise ValueError(f"it names a file twice, or no {TABLE_FILE}")
        except _DECODE_ERRORS as error:
            raise Damaged(f"{place} is damaged: {error}", "checkpoint.damaged") from None
        return manifest

    @cached_property
    def tensors(self) -> Tensors:
        """The place of every tensor in the files, checked against the files' sizes before anything is read by it."""
        expected = next(file.sha256 for file in self.manifest.files if file.name == TABLE_FILE)
        data = self._bytes(TABLE_FILE, MAX_TABLE_BYTES)
        try:
            if hashlib.sha256(data).hexdigest() != expected:
                raise ValueError("the manifest promises other bytes")
            tensors = msgspec.json.decode(data, type=Tensors)
            check(tensors, {file.name: file.bytes for file in self.manifest.files})
        except _DECODE_ERRORS as error:
            raise Damaged(f"{self.path / TABLE_FILE} is damaged: {error}", "checkpoint.damaged") from None
        return tensors

    def _bytes(self, name: str, max_bytes: int) -> bytes:
        try:
            return self.storage.read(self.path / name, max_bytes)
        except OSError as error:
            error_type = Damaged if error.errno in _DAMAGE_ERRNOS else UserError
            raise error_type(f"cannot read {self.path / name}: {error.strerror}", "file.read") from None

    @property
    def step(self) -> int:
        return step_and_number(self.path)[0]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files)

    def misfits(self) -> list[str]:
        """A sentence for each file that is missing or has another size. Reads no file."""
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
        if size == file.bytes:
            return None
        comparison = "short" if size < file.bytes else "too long"
        return f"{place} is {comparison}: {size} bytes, and the manifest promises {file.bytes}"

    def damage(self, files: Iterable[File] | None = None, progress: Progress | None = None) -> list[str]:
        """Reads every byte of `files` (None: all), and returns a sentence for each damaged file.

        Raises UserError if one cannot be opened.
        """
        checked = self.manifest.files if files is None else list(files)
        sizes = self._sizes(checked)
        problems = side_by_side(lambda file: self._damage(file, sizes[file.name], progress), checked, for_files())
        return list(dict.fromkeys(problem for problem in problems if problem))  # a bad table is the same for all files

    def _damage(self, file: File, size: int | OSError, progress: Progress | None) -> str | None:
        place = self.path / file.name
        try:
            if misfit := self._misfit(file, size):
                return misfit
            with self.storage.open(place) as stream:
                if (digest := self._digest(file, stream, progress)) != file.sha256:
                    return altered_message(place, digest, file)
                if file.name == TABLE_FILE:
                    _ = self.tensors  # raises Damaged if it is inconsistent
        except Damaged as error:
            return str(error)
        except OSError as error:
            message = f"{place} cannot be read: {error.strerror}"
            if error.errno in _DAMAGE_ERRNOS:
                return message
            raise UserError(message, "file.read") from None
        return None

    def _digest(self, file: File, stream: FileReader, progress: Progress | None) -> str:
        """The hash of a file's bytes, of the kind that the manifest has: sha256, or the checksum of `checksums.py`."""
        if not file.sha256.startswith(CHECKSUM_PREFIX):
            return digest_of(stream, progress)

        def read(start: int, size: int) -> memoryview:
            part = memoryview(bytearray(size))
            stream.fill(part, start, progress or (lambda _: None))
            return part

        return checksum_of_chunks(extents(self.tensors, file.name), read)


def altered_message(place: Place, digest: str, file: File) -> str:
    """The sentence for a file whose hash differs from the manifest's."""
    expected = file.sha256.rpartition(":")[2][:16]
    return f"{place} is damaged: its {short_hash(digest)}, and the manifest promises {expected}..."


def step_and_number(path: Place) -> tuple[int, int]:
    """(the step of a save, its number among the saves of that step)."""
    match = STEP_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 1)
