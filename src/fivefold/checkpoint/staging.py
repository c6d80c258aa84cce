"""Snapshots: a rank's shards, copied into host memory that is made once and kept.

    staging.prepare(shards)            # the room, before the first step: locking gigabytes for a GPU takes seconds
    snapshot = staging.take(shards)    # on a GPU it returns at once, and the device copies while it computes
    engine.snapshot_copied = snapshot.copied    # ... what it copies may change behind this event
    snapshot.arrive()                  # in the thread that writes it

Locked memory is what a GPU copies into by itself, at its link's pace. PyTorch's own allocator of it rounds every tensor
up to a power of two, which for a vocabulary's table is nearly twice; so the pages are asked for and locked here.
"""

import math
import mmap
import threading
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fivefold.checkpoint.shards import Shard, Shards
from fivefold.support.errors import Note, TrainingError
from fivefold.support.text import bytes_text

PAGE = mmap.PAGESIZE
_FOR_ALL = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class Snapshot:
    shards: Shards
    device: torch.device
    copied: torch.cuda.Event | None = None  # when the device is done with it; None: it is

    def arrive(self) -> None:
        """Wait for it, in whatever thread; a new one would make itself at home on the first device."""
        if self.copied is not None:
            with torch.cuda.device(self.device):
                self.copied.synchronize()


class Staging:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.room: dict[str, Tensor] | None = None

    def prepare(self, shards: Shards, memory: mmap.mmap | None = None) -> None:
        """Once: what is locked must stay where it is until it is unlocked, which is when this object goes.

        `memory`: room that is there already, for the whole `extent` of the shards."""
        if self.room is not None:
            return
        if not shards:  # a rank that others write for
            self.room = {}
            return
        memory = _asked_for(extent(shards)) if memory is None else memory
        self.room = {name: _view(memory, start, shards[name]) for name, start in starts(shards).items()}
        if self.stream is not None:
            # CUDA remembers an error for the thread that met it: memory that could not be locked, which only makes
            # copies slower, must not be what a later kernel stumbles over.
            refused: list[int] = []
            lock = threading.Thread(target=_lock, args=(self, memory, refused), name="lock")
            lock.start()
            lock.join()
            if refused:
                said = f"{bytes_text(len(memory))} for snapshots are not locked (CUDA error {refused[0]}): saves wait"
                warnings.warn(said, Note, stacklevel=2)

    def take(self, shards: Shards, after: torch.cuda.Event | None = None) -> Snapshot:
        """`after`: another copy that is under way; what is `copied` here has waited for it, too."""
        self.prepare(shards)
        if self.stream is None or not shards:
            return Snapshot({name: self._copied(name, shard) for name, shard in shards.items()}, self.device, after)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            copies = {name: self._copied(name, shard) for name, shard in shards.items()}
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        return Snapshot(copies, self.device, copied)

    def _copied(self, name: str, shard: Shard) -> Shard:
        assert self.room is not None
        tensor = shard.make()
        if self.stream is not None:
            tensor.record_stream(self.stream)
        return Shard.of(self.room[name].copy_(tensor, non_blocking=True), shard.shape, shard.box)


def starts(shards: Shards) -> dict[str, int]:
    """Where each shard begins in memory: at a page."""
    ends = accumulate((_paged(shard.nbytes) for shard in shards.values()), initial=0)
    return dict(zip(shards, ends, strict=False))


def extent(shards: Shards) -> int:
    """Bytes of memory for all of them."""
    return sum(_paged(shard.nbytes) for shard in shards.values())


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _asked_for(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        needed = bytes_text(size)
        raise TrainingError(f"a snapshot takes {needed} of this machine's memory: {error.strerror}") from None
    with suppress(OSError, AttributeError):  # large pages are locked in half the time; not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(memory: mmap.mmap, start: int, shard: Shard) -> Tensor:
    count = math.prod(shard.sizes)
    return torch.frombuffer(memory, dtype=shard.dtype, count=count, offset=start).view(shard.sizes)


def _lock(owner: Staging, memory: mmap.mmap, refused: list[int]) -> None:
    """As long as its owner lives. Where the system refuses, memory stays as it is."""
    assert owner.stream is not None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(owner.device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), _FOR_ALL))
    if error:
        refused.append(error)
        return
    # A process takes its locks along when it ends.
    weakref.finalize(owner, _unlock, address, owner.stream).atexit = False


def _unlock(address: int, stream: torch.cuda.Stream) -> None:
    with torch.cuda.device(stream.device):
        try:
            stream.synchronize()  # copies that are under way
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)
