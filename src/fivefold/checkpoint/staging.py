"""Snapshots: a rank's pieces, copied into host memory that is made once and kept.

    staging.prepare(pieces)            # the room, made beside what comes next: locking gigabytes takes seconds
    snapshot = staging.take(pieces)    # on a GPU it returns at once, and the device copies while it computes
    engine.read = snapshot.read        # ... what it copies may change behind this
    snapshot.arrive()                  # in the thread that writes it

Locked memory is what a GPU copies into by itself, at its link's pace. PyTorch's own allocator of it rounds every tensor
up to a power of two, which for a vocabulary's table is nearly twice; so the pages are asked for and locked here.
"""

import mmap
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.checkpoint.pieces import Piece, Pieces
from fivefold.errors import TrainingError
from fivefold.words import bytes_text

PAGE = mmap.PAGESIZE
_FOR_ALL = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class Snapshot:
    pieces: Pieces
    read: torch.cuda.Event | None = None  # when the device has copied all of it; None: it has been copied

    def arrive(self) -> None:
        if self.read is not None:
            self.read.synchronize()


class Staging:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.room: dict[str, Tensor] = {}
        self.making: threading.Thread | None = None
        self.error: OSError | None = None

    def prepare(self, pieces: Pieces) -> None:
        # In a thread of its own in any case: CUDA remembers an error for the thread that met it, and would tell a later
        # kernel that memory could not be locked, which only makes copies slower.
        self.making = threading.Thread(target=self._make, args=(pieces,), name="staging", daemon=True)
        self.making.start()

    def take(self, pieces: Pieces) -> Snapshot:
        if self.making is None:
            self.prepare(pieces)
        assert self.making is not None
        self.making.join()
        if self.error is not None:
            needed = bytes_text(sum(piece.nbytes for piece in pieces.values()))
            raise TrainingError(f"a snapshot takes {needed} of this machine's memory: {self.error.strerror}")
        if self.stream is None:
            return Snapshot({name: self._copied(name, piece) for name, piece in pieces.items()})
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copies = {name: self._copied(name, piece) for name, piece in pieces.items()}
            read = torch.cuda.Event(blocking=True)
            read.record()
        return Snapshot(copies, read)

    def _copied(self, name: str, piece: Piece) -> Piece:
        tensor = piece.make()
        if self.stream is not None:
            tensor.record_stream(self.stream)
        return Piece.of(self.room[name].copy_(tensor, non_blocking=True), tuple(piece.shape), piece.box)

    def _make(self, pieces: Pieces) -> None:
        try:
            self.room = _tensors(pieces)
        except OSError as error:
            self.error = error
            return
        if self.stream is not None:
            locked = _lock(self.room, self.device)
            weakref.finalize(self, _unlock, locked, self.device)


def _tensors(pieces: Pieces) -> dict[str, Tensor]:
    """Each with pages of its own, so that each can be locked by itself."""
    sizes = {name: -(-piece.nbytes // PAGE) * PAGE for name, piece in pieces.items()}
    memory = mmap.mmap(-1, max(PAGE, sum(sizes.values())), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # large pages are locked sooner; a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    found, start = {}, 0
    for name, piece in pieces.items():
        shape = piece.chunk.sizes
        flat = torch.frombuffer(memory, dtype=piece.dtype, count=shape.numel(), offset=start)
        found[name] = flat.view(shape)
        start += sizes[name]
    return found


def _lock(room: Mapping[str, Tensor], device: torch.device) -> list[int]:
    """Addresses that were locked; where the system allows no more, the rest stays as it is."""
    torch.cuda.set_device(device)
    locked = []
    for tensor in room.values():
        size = -(-tensor.nbytes // PAGE) * PAGE
        if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, _FOR_ALL)) != 0:
            break
        locked.append(tensor.data_ptr())
    return locked


def _unlock(addresses: list[int], device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies that are under way
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
