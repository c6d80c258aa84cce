"""Writing a rank's pieces: DCP's files, hashed on their way, several at a time where the machine has cores for it.

writer = Writer(path, threads=for_files())
save(pieces, storage_writer=writer, planner=SavePlan())
writer.files                                  # with their sums: nothing is read again
"""

import io
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

from fivefold.launch import faults
from fivefold.launch.cores import side_by_side
from fivefold.support.errors import UserError
from fivefold.support.files import File, HashedFile
from fivefold.support.formatting import bytes_text

LEAST = 1 << 28  # bytes: what is smaller than two of these is not worth a second file


class Writer(FileSystemWriter):
    """DCP's, with threads and words of its own.

    DCP's threads lose what goes wrong in them, and the file with it; torch's words speak of positions in an archive.
    """

    def __init__(self, path: Path, threads: int = 1):
        super().__init__(path, overwrite=False, per_thread_copy_ahead=0)  # no copies: what comes is in host memory
        self.directory, self.threads = path, threads
        self.fs = self._hashing = _Hashing()

    @property
    def files(self) -> list[File]:
        """Of pieces, whole and synced; a rank without any has an empty one."""
        return sorted(self._hashing.written, key=lambda file: file.name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        faults.strike("write")
        write, parts = super().write_data, divide(plan, self.threads)
        try:
            written = side_by_side(lambda part: write(part, planner).wait(), parts, self.threads)
        except UserError:  # of a piece that could not be made
            raise
        except Exception as error:
            raise OSError(_why(error, self.directory, planned(plan))) from None
        whole: Future[Any] = Future()
        whole.set_result([result for of_part in written for result in of_part])
        return whole


def planned(plan: SavePlan) -> int:
    """Bytes of the tensors of a plan."""
    return sum(map(_bytes, plan.items))


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def divide(plan: SavePlan, most: int) -> list[SavePlan]:
    """A plan for each file: about as many bytes in each, none of them small."""
    count = max(1, min(most, planned(plan) // LEAST, len(plan.items)))
    if count == 1:
        return [plan]
    items: list[list[WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(plan.items, key=_bytes, reverse=True):
        least = sizes.index(min(sizes))
        items[least].append(item)
        sizes[least] += _bytes(item)
    prefix = plan.storage_data.prefix
    names = [replace(plan.storage_data, prefix=f"{prefix}{number}_") for number in range(count)]
    return [replace(plan, items=some, storage_data=name) for some, name in zip(items, names, strict=True)]


class _Hashing(FileSystem):
    """DCP's view of a directory; keeps the sum of what goes through it."""

    def __init__(self) -> None:
        self.written: list[File] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb" or not str(path).endswith(".distcp"):
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with HashedFile(Path(path)) as stream:
            yield stream
        self.written.append(stream.file)


def _why(error: BaseException, directory: Path, needed: int) -> str:
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    free = shutil.disk_usage(directory).free
    said = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = f", files may have {bytes_text(limit)}" if limit != resource.RLIM_INFINITY else ""
    return f"{said}: {bytes_text(needed)} go into {directory}, {bytes_text(free)} are free there{allowed}"
