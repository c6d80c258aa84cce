"""Which files are read, in which order, and how far the reading is."""

import gzip
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

from fivefold.data.index import is_prepared
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.support.files import irregular, open_regular
from fivefold.support.formatting import either, nearest

Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Read as text these would be noise that trains without complaint.
_PACKED = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z")


@dataclass(frozen=True)
class Source:
    """A file of documents."""

    path: Path
    kind: Kind
    packed: bool  # gzip
    size: int  # bytes on disk


def find_sources(inputs: Sequence[Path], leave_out: Path) -> list[Source]:
    """The files behind the inputs: a file is itself, a directory is all its files in the order of their paths.

    Inside a directory, hidden files and directories are passed over, and so are directories of prepared tokens and
    `leave_out`, where the tokens will go.
    """
    if not inputs:
        raise UserError("no input was given; name at least one file or directory of text")
    problems: list[str] = []
    sources: list[Source] = []
    for given in inputs:
        try:
            given = path_of(given)
            if not given.exists():
                problems.append(_missing(given))
                continue
            found = list(_walk(given, leave_out.absolute())) if given.is_dir() else [given]
        except UserError as error:
            problems += error.problems
            continue
        except OSError as error:  # a directory that may not be looked into: what is in it would be missing silently
            problems.append(f"{error.filename} cannot be read: {error.strerror}")
            continue
        for path in found:
            source = _source(path)
            if isinstance(source, str):
                problems.append(source)
            else:
                sources.append(source)
    if any(source.kind == "parquet" for source in sources) and find_spec("pyarrow") is None:
        problems.append('parquet files need pyarrow, which is not installed: pip install "fivefold[parquet]"')
    if not problems and not sources:
        problems.append(f"no files in {either(inputs)}: hidden files are passed over, and nothing else is there")
    if problems:
        raise UserError(problems)
    return sources


def _walk(root: Path, leave_out: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root, onerror=_raise):
        here = Path(place)
        # Sorted in place: os.walk goes on in this order, so that the same tree gives the same documents everywhere.
        passed = {
            f for f in folders if f.startswith(".") or (here / f).absolute() == leave_out or is_prepared(here / f)
        }
        folders[:] = sorted(set(folders) - passed)
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _source(path: Path) -> Source | str:
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        return f"{path} is packed ({suffix}), which is not read here; unpack it, or pack it as .gz"
    packed = suffix == ".gz"
    kind = _KINDS.get(Path(path.stem).suffix.lower() if packed else suffix, "text")
    if packed and kind == "parquet":
        return f"{path} is a packed parquet file; unpack it (parquet compresses its own columns)"
    try:
        found = path.stat()
        problem = irregular(found.st_mode)
        return f"{path} cannot be read: {problem}" if problem else Source(path, kind, packed, found.st_size)
    except OSError as error:  # a dangling link in a walked directory
        return f"{path} cannot be read: {error.strerror}"


def _missing(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"{path} does not exist, and neither does the directory {parent}"
    hits = nearest(path.name, [entry.name for entry in parent.iterdir()])
    return f"{path} does not exist" + (f"; did you mean {parent / hits[0]}?" if hits else "")


class Meter:
    """Counts bytes read from disk (so packed ones, of packed files) without a call per document."""

    def __init__(self) -> None:
        self._before = 0  # of the files that are done
        self.position: Callable[[], int] = int  # of the file that is open
        self.empty = 0  # documents that held no text

    def read(self) -> int:
        return self._before + self.position()

    @contextmanager
    def file(self, source: Source) -> Iterator[None]:
        """Count a file whose reader sets `position`."""
        try:
            yield
        finally:
            self.position = int
            self._before += source.size

    @contextmanager
    def open(self, source: Source) -> Iterator[IO[bytes]]:
        """The file's bytes, unpacked."""
        with self.file(source), open_regular(source.path, links=True) as raw:
            self.position = raw.tell
            # GzipFile reads lines in Python; behind a BufferedReader they are read in C.
            inner = gzip.GzipFile(fileobj=raw, mode="rb") if source.packed else raw
            with io.BufferedReader(inner, 1 << 20) as stream:
                yield stream
