"""Checkpoints on object storage, through fsspec and its drivers. The rest of the house knows none of them.

An object is there whole or not at all, and has no name but its key: there are no directories to make, sync or rename.
What is set aside therefore stays where it is, and an empty object next to it carries the name that it has from then on:

    checkpoints/step-00000012/manifest.json
    checkpoints/step-00000012.damaged             the mark: `folders` gives the checkpoint this name

Drivers may ask again a few times; no question of ours waits longer than `_PATIENCE`. What they raise, of whatever
class, becomes an OSError with one sentence, without credentials. No torch.
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from fivefold.launch.heartbeat import beat
from fivefold.support.files import File, HashedFile, Progress
from fivefold.support.places import RemotePlace
from fivefold.support.text import bytes_text

T = TypeVar("T")
_PATIENCE = 180.0  # seconds for an answer, with all that a driver tries
_PART = 1 << 26  # bytes sent at a time: S3 takes 10,000 parts of a file
_PIECE = 1 << 24  # bytes asked for at a time
_AHEAD = 1 << 20  # bytes asked for at least: small tensors lie next to each other
# Credentials, regions and endpoints are the drivers' own matter: AWS_PROFILE, AWS_ENDPOINT_URL and so on.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 2}},
        "fixed_upload_size": True,  # parts of one size, as some S3-compatible servers demand
    },
    "file": {"auto_mkdir": True},
}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING", re.IGNORECASE)

_NO_BUCKET = re.compile("(bucket|container) does not exist|NoSuchBucket", re.IGNORECASE)


def objects(place: RemotePlace) -> "Objects":
    return _objects(f"{place.protocol}://{place.path.partition('/')[0]}", os.getpid())  # a fork has no threads


@cache
def _objects(root: str, _: int) -> "Objects":
    return Objects(root)


class Objects:
    """A bucket. Places in it are written out as URLs: that is what drivers agree on."""

    def __init__(self, root: str):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        options = {"use_listings_cache": False, "skip_instance_cache": True} | _OPTIONS.get(root.partition(":")[0], {})
        self.driver: Any = asked(lambda: url_to_fs(root, **options)[0])

    def read(self, place: RemotePlace, most: int) -> bytes:
        with self.open(place) as stream:
            if stream.size > most:
                said = f"it has {bytes_text(stream.size)}, and at most {bytes_text(most)} are read"
                raise OSError(errno.EFBIG, said)
            content = bytearray(stream.size)
            stream.fill(memoryview(content), 0)
        return bytes(content)

    def open(self, place: RemotePlace) -> "Download":
        entry = asked(lambda: self.driver.info(str(place)))
        if entry["type"] != "file":
            raise OSError(errno.ENOENT, "there is no such object")
        return Download(self.driver, str(place), int(entry["size"]))

    def sizes(self, folder: RemotePlace, names: Iterable[str]) -> dict[str, int | OSError]:
        """By one listing, however many files there are."""
        entries = self._inside(folder)
        missing = FileNotFoundError(errno.ENOENT, "there is no such object")
        return {name: int(entries[name]["size"]) if name in entries else missing for name in names}

    def exists(self, place: RemotePlace) -> bool:
        try:
            return bool(asked(lambda: self.driver.info(str(place)))["type"] == "file")
        except FileNotFoundError:
            return False

    def holds(self, folder: RemotePlace) -> bool:
        return bool(self._inside(folder))

    def folders(self, directory: RemotePlace) -> list[RemotePlace]:
        entries = self._inside(directory)
        marks = {name.rpartition(".")[0]: name for name, entry in entries.items() if entry["type"] == "file"}
        return [directory / marks.get(name, name) for name, entry in entries.items() if entry["type"] == "directory"]

    def _inside(self, folder: RemotePlace) -> dict[str, dict[str, Any]]:
        """What lies directly in a folder, by name; nothing where there is none."""
        try:
            entries = asked(lambda: self.driver.ls(str(folder), detail=True))
        except FileNotFoundError:
            return {}
        above = self.driver._strip_protocol(str(folder)).strip("/") + "/"
        paths = [(entry["name"].strip("/"), entry) for entry in entries]
        return {path[len(above) :]: entry for path, entry in paths if path.startswith(above)}

    def create(self, place: RemotePlace, progress: Progress) -> HashedFile:
        return Upload(self.driver, place, progress)

    def put(self, place: RemotePlace, content: bytes) -> None:
        asked(lambda: self.driver.pipe_file(str(place), content))

    def commit(self, place: RemotePlace, content: bytes, others: Iterable[str], before: Callable[[], object]) -> None:
        before()
        self.put(place, content)

    def make(self, folder: RemotePlace) -> None:
        """Nothing: a folder is there with the first file in it."""
        if folder.name in self._inside(folder.parent):
            raise FileExistsError(errno.EEXIST, "it is there already")

    def rename(self, folder: RemotePlace, to: RemotePlace) -> None:
        assert to.parent == folder.parent
        assert to.name.rpartition(".")[0] == folder.name
        self.put(to, b"")

    def delete(self, folder: RemotePlace) -> None:
        with suppress(OSError):
            mark = self._inside(folder.parent).get(folder.name, {}).get("type") == "file"
            real = folder.with_name(folder.name.rpartition(".")[0]) if mark else folder
            with suppress(FileNotFoundError):
                asked(lambda: self.driver.rm(str(real), recursive=True))
            if mark:
                asked(lambda: self.driver.rm_file(str(folder)))

    def point(self, directory: RemotePlace, name: str | None) -> None:
        pass

    def free(self, directory: RemotePlace) -> None:
        return None


class Download:
    """An object, read in ranges."""

    def __init__(self, driver: Any, url: str, size: int):
        self.driver, self.url, self.size = driver, url, size
        self.at = 0  # how far it was read from the beginning
        self.ahead, self.first = b"", 0  # bytes that are here, and where they begin

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *_: object) -> None:
        self.ahead = b""

    def read(self, count: int, /) -> bytes:
        data = bytearray(max(0, min(count, self.size - self.at)))
        self.fill(memoryview(data), self.at)
        self.at += len(data)
        return bytes(data)

    def fill(self, into: memoryview, start: int, progress: Progress = lambda _: None, /) -> None:
        done = 0
        while done < len(into):
            at = start + done
            if not self.first <= at < self.first + len(self.ahead):
                self.ahead, self.first = self._range(at, min(max(len(into) - done, _AHEAD), _PIECE)), at
            piece = memoryview(self.ahead)[at - self.first :][: len(into) - done]
            into[done : done + len(piece)] = piece
            done += len(piece)
            progress(len(piece))

    def _range(self, start: int, count: int) -> bytes:
        end = min(start + count, self.size)
        data: bytes = asked(lambda: self.driver.cat_file(self.url, start=start, end=end)) if start < end else b""
        if not data or len(data) != end - start:
            raise OSError(errno.ENOENT, "it is shorter than it was")
        return data


class Upload(HashedFile):
    """A new object, hashed on its way, in parts. It is there when `finish` has returned, and not before."""

    def __init__(self, driver: Any, place: RemotePlace, progress: Progress):
        self._start(place.name, _Parts(driver, place), progress)

    def finish(self) -> File:
        with self:
            self._raw.commit()
        return self.file


class _Parts:
    """fsspec's file. Closing it would keep what there is of it, so that it is closed when all is there only."""

    def __init__(self, driver: Any, place: RemotePlace):
        self.file: Any = asked(lambda: driver.open(str(place), "wb", block_size=_PART))

    def write(self, data: memoryview) -> int:
        return int(asked(lambda: self.file.write(data)))

    def commit(self) -> None:
        file, self.file = self.file, None
        try:
            asked(file.close)
        except OSError:
            file.closed = True  # or its destructor would try again
            raise

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            with suppress(OSError):
                asked(getattr(file, "discard", file.close))
            with suppress(AttributeError):  # that of a file of this machine
                file.closed = True


def asked(call: Callable[[], T]) -> T:
    """What a driver answers, in time."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="object storage", daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive() and waited < _PATIENCE:
        thread.join(1.0)
        waited += 1.0
        beat()  # it waits no longer than it may
    if errors:
        raise sentence(errors[0]) from None
    if not answers:
        raise TimeoutError(errno.ETIMEDOUT, f"the storage has not answered for {_PATIENCE:.0f} s")
    return answers[0]


def sentence(error: BaseException) -> OSError:
    """Of whatever a driver raised. What is damaged is for the caller to find: a server's failure is none."""
    said = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            said = said.replace(value, "***")
    said = re.sub(r"//[^/@\s]*@", "//", said)[:500]
    if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(said):
        return FileNotFoundError(errno.ENOENT, "there is no such object")
    if isinstance(error, PermissionError) or "redentials" in said:
        return PermissionError(errno.EACCES, f"access is denied ({said}); credentials come from the environment")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return OSError(errno.ENOSPC, said)
    return OSError(errno.EREMOTEIO, said)
