"""Writing a rank's pieces: bytes, hashed on their way, in several files at a time where the machine has cores for it.

written = write_pieces(path, rank, pieces, threads=for_files())
written.files                                 # with their sums: nothing is read again
written.tensors                               # what lies where in them
"""

import os
import resource

import msgspec

from fivefold.checkpoint.pieces import Piece, Pieces, dtype_name, raw
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.tensors import Chunk, Stored, Tensors, merged
from fivefold.launch.cores import side_by_side
from fivefold.launch.heartbeat import beat
from fivefold.support.files import File
from fivefold.support.formatting import bytes_text
from fivefold.support.places import Place

LEAST = 1 << 28  # bytes: what is smaller than two of these is not worth a second file


class Written(msgspec.Struct, frozen=True):
    """Files, whole and synced, and the tensors in them."""

    files: list[File]
    tensors: Tensors


def write_pieces(directory: Place, rank: int, pieces: Pieces, threads: int = 1) -> Written:
    """One file or more, with names that no other rank has; none where there are no pieces."""
    parts = divide(pieces, threads)
    numbers = [f".{number}" for number in range(len(parts))] if len(parts) > 1 else [""]
    todo = [(directory / f"rank-{rank}{number}.tensors", part) for number, part in zip(numbers, parts, strict=False)]
    try:
        written = side_by_side(lambda one: _write(*one), todo, threads)
    except OSError as error:
        raise OSError(_why(error, directory, total(pieces))) from None
    return Written([file for file, _ in written], merged([tensors for _, tensors in written]))


def _write(path: Place, pieces: Pieces) -> tuple[File, Tensors]:
    tensors: Tensors = {}
    with storage_of(path).create(path, beat) as stream:
        for name, piece in pieces.items():
            tensor = piece.make().detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (piece.sizes, piece.dtype), name
            chunk = Chunk(tuple(side.start for side in piece.box), piece.sizes, path.name, stream.tell(), piece.nbytes)
            stream.write(raw(tensor))
            tensors[name] = Stored(tuple(piece.shape), dtype_name(piece.dtype), (chunk,))
        return stream.finish(), tensors


def total(pieces: Pieces) -> int:
    """Bytes of the tensors."""
    return sum(piece.nbytes for piece in pieces.values())


def divide(pieces: Pieces, most: int) -> list[Pieces]:
    """Those of each file: about as many bytes in each, none of them small."""
    count = max(1, min(most, total(pieces) // LEAST, len(pieces)))
    if count == 1:
        return [pieces] if pieces else []
    parts: list[dict[str, Piece]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes, reverse=True):
        least = sizes.index(min(sizes))
        parts[least][name] = piece
        sizes[least] += piece.nbytes
    return list(parts)


def _why(error: OSError, directory: Place, needed: int) -> str:
    said = os.strerror(error.errno) if error.errno else str(error)
    try:
        room = storage_of(directory).free(directory)
        free = f"{bytes_text(room)} are free there" if room is not None else ""
    except OSError as other:
        free = f"it cannot be looked at: {other.strerror}"
    if not free:  # what a server says is not what this system calls it
        return f"{error.strerror or error}: {bytes_text(needed)} go into {directory}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = f", files may have {bytes_text(limit)}" if limit != resource.RLIM_INFINITY else ""
    return f"{said}: {bytes_text(needed)} go into {directory}, {free}{allowed}"
