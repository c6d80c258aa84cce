"""Which files of text are read, in which order, and how far the reading is."""

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
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import irregular, open_regular
from fivefold.support.parsing import path_of
from fivefold.support.text import either, nearest

Kind = Literal["text", "jsonl", "parquet"]

_KIND_BY_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Read as text these would be noise that trains without complaint.
_ARCHIVE_SUFFIXES = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z")


@dataclass(frozen=True)
class TextSource:
    """A file of documents."""

    path: Path
    kind: Kind
    packed: bool  # gzip
    size: int  # bytes on disk


def find_sources(inputs: Sequence[Path], leave_out: Path) -> list[TextSource]:
    """The files behind the inputs: a file is itself, a directory is all its files in the order of their paths.

    Inside a directory, hidden files and directories are passed over, and so are directories of prepared tokens and
    `leave_out`, where the tokens will go.
    """
    if not inputs:
        raise UserError("no input was given; name at least one file or directory of text", "prepare.input.missing")
    problems: list[str] = []
    sources: list[TextSource] = []
    for given in inputs:
        try:
            given = path_of(given)
            if not given.exists():
                problems.append(_missing(given))
                continue
            files = list(_walk(given, leave_out.absolute())) if given.is_dir() else [given]
        except UserError as error:
            problems += error.coded
            continue
        except OSError as error:  # a directory that may not be looked into: what is in it would be missing silently
            problems.append(Problem("file.read", f"{error.filename} cannot be read: {error.strerror}"))
            continue
        for path in files:
            source = _source(path)
            if isinstance(source, Problem):
                problems.append(source)
            else:
                sources.append(source)
    if any(source.kind == "parquet" for source in sources) and find_spec("pyarrow") is None:
        how = 'pip install "fivefold[parquet]"'
        problems.append(Problem("install.pyarrow", f"parquet files need pyarrow, which is not installed: {how}"))
    if not problems and not sources:
        nothing = f"no files in {either(inputs)}: hidden files are skipped, and there is nothing else"
        problems.append(Problem("prepare.input.empty", nothing))
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


def _source(path: Path) -> TextSource | Problem:
    suffix = path.suffix.lower()
    if suffix in _ARCHIVE_SUFFIXES:
        other = f"{path} is compressed ({suffix}), which is not supported; decompress it, or compress it as .gz"
        return Problem("prepare.input.packed", other)
    packed = suffix == ".gz"
    kind = _KIND_BY_SUFFIX.get(Path(path.stem).suffix.lower() if packed else suffix, "text")
    if packed and kind == "parquet":
        twice = f"{path} is a compressed parquet file; decompress it (parquet compresses its own columns)"
        return Problem("prepare.input.packed", twice)
    try:
        status = path.stat()
        if problem := irregular(status.st_mode):
            return Problem("file.read", f"{path} cannot be read: {problem}")
        return TextSource(path, kind, packed, status.st_size)
    except OSError as error:  # a dangling link in a walked directory
        return Problem("file.read", f"{path} cannot be read: {error.strerror}")


def _missing(path: Path) -> Problem:
    parent = path.parent
    if not parent.is_dir():
        hint = f", and neither does the directory {parent}"
    else:
        hits = nearest(path.name, [entry.name for entry in parent.iterdir()])
        hint = f"; did you mean {parent / hits[0]}?" if hits else ""
    return Problem("prepare.input.missing", f"{path} does not exist{hint}")


class Meter:
    """Counts bytes read from disk (so packed ones, of packed files) without a call per document."""

    def __init__(self) -> None:
        self._before = 0  # of the files that are done
        self.position: Callable[[], int] = int  # of the file that is open
        self.empty = 0  # documents that held no text

    def read(self) -> int:
        return self._before + self.position()

    @contextmanager
    def file(self, source: TextSource) -> Iterator[None]:
        """Count a file whose reader sets `position`."""
        try:
            yield
        finally:
            self.position = int
            self._before += source.size

    @contextmanager
    def open(self, source: TextSource) -> Iterator[IO[bytes]]:
        """The file's bytes, unpacked."""
        with self.file(source), open_regular(source.path, links=True) as raw:
            self.position = raw.tell
            # GzipFile reads lines in Python; behind a BufferedReader they are read in C.
            inner = gzip.GzipFile(fileobj=raw, mode="rb") if source.packed else raw
            with io.BufferedReader(inner, 1 << 20) as stream:
                yield stream
