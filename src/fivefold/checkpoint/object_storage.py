"""Checkpoints on object storage, through fsspec and its drivers, which only this file uses.

An object exists in full or not at all, and has no name but its key: there are no directories to make, sync or rename.
A folder that is set aside therefore stays where it is, and an empty object next to it, its mark, has the new name:

    checkpoints/step-00000012/manifest.json
    checkpoints/step-00000012.damaged             the mark: `folders` gives the checkpoint this name

Drivers may retry; no call waits longer than `_TIMEOUT`. Their exceptions, of whatever class, become an OSError with one
sentence, without credentials. No torch.
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
from fivefold.support.storage_place import RemotePlace
from fivefold.support.text import bytes_text

T = TypeVar("T")
_CALL_TIMEOUT = 180.0  # seconds for a call, with all retries of a driver
_PART_BYTES = 1 << 26  # bytes sent at a time: S3 takes 10,000 parts of a file
_MAX_RANGE_BYTES = 1 << 24  # bytes read at a time
_READ_AHEAD_BYTES = 1 << 20  # bytes read at least: small tensors are next to each other
# Credentials, regions and endpoints are read by the drivers: AWS_PROFILE, AWS_ENDPOINT_URL and so on.
_DRIVER_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 2}},
        "fixed_upload_size": True,  # parts of one size, as some S3-compatible servers demand
    },
    "file": {"auto_mkdir": True},
}
_SECRET_NAME = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING", re.IGNORECASE)

_NO_BUCKET = re.compile("(bucket|container) does not exist|NoSuchBucket", re.IGNORECASE)


def object_storage_of(place: RemotePlace) -> "ObjectStorage":
    return _object_storage_of(
        f"{place.protocol}://{place.path.partition('/')[0]}", os.getpid()
    )  # a fork loses drivers' threads


@cache
def _object_storage_of(root: str, _: int) -> "ObjectStorage":
    return ObjectStorage(root)


class ObjectStorage:
    """A bucket. Places in it are passed as URLs, which all drivers accept."""

    def __init__(self, root: str):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        options = {"use_listings_cache": False, "skip_instance_cache": True} | _DRIVER_OPTIONS.get(
            root.partition(":")[0], {}
        )
        self.driver: Any = call_driver(lambda: url_to_fs(root, **options)[0])

    def read(self, place: RemotePlace, max_bytes: int) -> bytes:
        with self.open(place) as stream:
            if stream.size > max_bytes:
                message = f"it has {bytes_text(stream.size)}, and at most {bytes_text(max_bytes)} are read"
                raise OSError(errno.EFBIG, message)
            content = bytearray(stream.size)
            stream.fill(memoryview(content), 0)
        return bytes(content)

    def open(self, place: RemotePlace) -> "Download":
        entry = call_driver(lambda: self.driver.info(str(place)))
        if entry["type"] != "file":
            raise OSError(errno.ENOENT, "there is no such object")
        return Download(self.driver, str(place), int(entry["size"]))

    def sizes(self, folder: RemotePlace, names: Iterable[str]) -> dict[str, int | OSError]:
        """The sizes, by one request however many files there are."""
        entries = self._list(folder)
        missing = FileNotFoundError(errno.ENOENT, "there is no such object")
        return {name: int(entries[name]["size"]) if name in entries else missing for name in names}

    def file_exists(self, place: RemotePlace) -> bool:
        try:
            return bool(call_driver(lambda: self.driver.info(str(place)))["type"] == "file")
        except FileNotFoundError:
            return False

    def folder_exists(self, folder: RemotePlace) -> bool:
        return bool(self._list(folder))

    def folders(self, directory: RemotePlace) -> list[RemotePlace]:
        entries = self._list(directory)
        marks = {name.rpartition(".")[0]: name for name, entry in entries.items() if entry["type"] == "file"}
        return [directory / marks.get(name, name) for name, entry in entries.items() if entry["type"] == "directory"]

    def _list(self, folder: RemotePlace) -> dict[str, dict[str, Any]]:
        """{name: the driver's entry} of what is directly in a folder; empty where there is none."""
        try:
            entries = call_driver(lambda: self.driver.ls(str(folder), detail=True))
        except FileNotFoundError:
            return {}
        prefix = self.driver._strip_protocol(str(folder)).strip("/") + "/"
        paths = [(entry["name"].strip("/"), entry) for entry in entries]
        return {path[len(prefix) :]: entry for path, entry in paths if path.startswith(prefix)}

    def create(self, place: RemotePlace, progress: Progress) -> HashedFile:
        return Upload(self.driver, place, progress)

    def put(self, place: RemotePlace, content: bytes) -> None:
        call_driver(lambda: self.driver.pipe_file(str(place), content))

    def commit(
        self, place: RemotePlace, content: bytes, others: Iterable[str], before_rename: Callable[[], object]
    ) -> None:
        before_rename()
        self.put(place, content)

    def make_folder(self, folder: RemotePlace) -> None:
        """Only checks: a folder comes into being with its first file. FileExistsError if it exists."""
        if folder.name in self._list(folder.parent):
            raise FileExistsError(errno.EEXIST, "it already exists")

    def rename(self, folder: RemotePlace, to: RemotePlace) -> None:
        assert to.parent == folder.parent
        assert to.name.rpartition(".")[0] == folder.name
        self.put(to, b"")

    def delete(self, folder: RemotePlace) -> None:
        with suppress(OSError):
            is_mark = self._list(folder.parent).get(folder.name, {}).get("type") == "file"
            real = folder.with_name(folder.name.rpartition(".")[0]) if is_mark else folder
            with suppress(FileNotFoundError):
                call_driver(lambda: self.driver.rm(str(real), recursive=True))
            if is_mark:
                call_driver(lambda: self.driver.rm_file(str(folder)))

    def link_latest(self, directory: RemotePlace, name: str | None) -> None:
        pass

    def free_bytes(self, directory: RemotePlace) -> None:
        return None


class Download:
    """An open object, which is read in ranges."""

    def __init__(self, driver: Any, url: str, size: int):
        self.driver, self.url, self.size = driver, url, size
        self.position = 0  # of `read`
        self.buffer, self.buffer_start = b"", 0  # the last range that was read, and its first byte

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *_: object) -> None:
        self.buffer = b""

    def read(self, count: int, /) -> bytes:
        data = bytearray(max(0, min(count, self.size - self.position)))
        self.fill(memoryview(data), self.position)
        self.position += len(data)
        return bytes(data)

    def fill(self, into: memoryview, start: int, progress: Progress = lambda _: None, /) -> None:
        done = 0
        while done < len(into):
            position = start + done
            if not self.buffer_start <= position < self.buffer_start + len(self.buffer):
                self.buffer, self.buffer_start = (
                    self._range(position, min(max(len(into) - done, _READ_AHEAD_BYTES), _MAX_RANGE_BYTES)),
                    position,
                )
            data = memoryview(self.buffer)[position - self.buffer_start :][: len(into) - done]
            into[done : done + len(data)] = data
            done += len(data)
            progress(len(data))

    def _range(self, start: int, count: int) -> bytes:
        end = min(start + count, self.size)
        data: bytes = call_driver(lambda: self.driver.cat_file(self.url, start=start, end=end)) if start < end else b""
        if not data or len(data) != end - start:
            raise OSError(errno.ENOENT, "it is shorter than it was")
        return data


class Upload(HashedFile):
    """A new object, sent in parts and hashed on the way. It exists when `finish` has returned, and not before."""

    def __init__(self, driver: Any, place: RemotePlace, progress: Progress):
        self._start(place.name, _Parts(driver, place), progress)

    def finish(self) -> File:
        with self:
            self._raw.commit()
        return self.file


class _Parts:
    """fsspec's file. Closing it would make an object of what was written so far, so it is closed after all parts."""

    def __init__(self, driver: Any, place: RemotePlace):
        self.file: Any = call_driver(lambda: driver.open(str(place), "wb", block_size=_PART_BYTES))

    def write(self, data: memoryview) -> int:
        return int(call_driver(lambda: self.file.write(data)))

    def commit(self) -> None:
        file, self.file = self.file, None
        try:
            call_driver(file.close)
        except OSError:
            file.closed = True  # else its destructor would try again
            raise

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            with suppress(OSError):
                call_driver(getattr(file, "discard", file.close))
            with suppress(AttributeError):  # a local file has no such attribute
                file.closed = True


def call_driver(call: Callable[[], T]) -> T:
    """The result of a driver's call, in a thread; TimeoutError after `_TIMEOUT`, OSError for what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="object storage", daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive() and waited < _CALL_TIMEOUT:
        thread.join(1.0)
        waited += 1.0
        beat()  # waiting for an answer counts as progress, since it ends by itself
    if errors:
        raise as_os_error(errors[0]) from None
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, f"the storage has not answered for {_CALL_TIMEOUT:.0f} s")
    return results[0]


def as_os_error(error: BaseException) -> OSError:
    """An OSError with a sentence, for anything that a driver raised, without credentials."""
    message = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8:
            message = message.replace(value, "***")
    message = re.sub(r"//[^/@\s]*@", "//", message)[:500]
    if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(message):
        return FileNotFoundError(errno.ENOENT, "there is no such object")
    if isinstance(error, PermissionError) or "redentials" in message:
        return PermissionError(errno.EACCES, f"access is denied ({message}); credentials come from the environment")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return OSError(errno.ENOSPC, message)
    return OSError(errno.EREMOTEIO, message)
