"""Snapshots: a rank's shards, copied into buffers in host memory that are allocated once.

    staging.prepare(shards)            # the buffers, before the first step: pinning gigabytes takes seconds
    snapshot = staging.take(shards)    # on a GPU it returns at once, and the device copies while it computes
    engine.snapshot_copied = snapshot.copied    # the shards may change after this event
    snapshot.wait()                    # in the thread that writes it

A GPU copies into pinned memory asynchronously, at its link's speed. PyTorch's own allocator of pinned memory rounds
every tensor up to a power of two, which for an embedding can be twice its size; so the pages are allocated and pinned
here.
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

PAGE_BYTES = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class Snapshot:
    shards: Shards
    device: torch.device
    copied: torch.cuda.Event | None = None  # recorded after the copies; None: they are complete

    def wait(self) -> None:
        """Waits for the copies, in any thread; without the context, a new thread would initialise device 0."""
        if self.copied is not None:
            with torch.cuda.device(self.device):
                self.copied.synchronize()


class Staging:
    """Allocates the buffers of a rank's shards, and copies into them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: dict[str, Tensor] | None = None

    def prepare(self, shards: Shards, memory: mmap.mmap | None = None) -> None:
        """Allocates and pins the buffers, once; deleting this object unpins them.

        `memory`: used in place of new memory; its size is the `extent` of the shards.
        """
        if self.buffers is not None:
            return
        if not shards:  # other ranks write all replicas of this one's
            self.buffers = {}
            return
        memory = _allocate(extent(shards)) if memory is None else memory
        self.buffers = {name: _view(memory, start, shards[name]) for name, start in starts(shards).items()}
        if self.stream is not None:
            # CUDA keeps an error for the thread in which it occurred. A failure to pin, which only makes copies slower,
            # must not be reported by a later kernel launch.
            errors: list[int] = []
            thread = threading.Thread(target=_pin, args=(self, memory, errors), name="pin")
            thread.start()
            thread.join()
            if errors:
                text = f"{bytes_text(len(memory))} for snapshots are not locked (CUDA error {errors[0]}): saves wait"
                warnings.warn(text, Note, stacklevel=2)

    def take(self, shards: Shards, after: torch.cuda.Event | None = None) -> Snapshot:
        """Copies the shards. `after`: an event of other copies, for which `copied` also waits."""
        self.prepare(shards)
        if self.stream is None or not shards:
            return Snapshot({name: self._copy(name, shard) for name, shard in shards.items()}, self.device, after)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            copies = {name: self._copy(name, shard) for name, shard in shards.items()}
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        return Snapshot(copies, self.device, copied)

    def _copy(self, name: str, shard: Shard) -> Shard:
        assert self.buffers is not None
        tensor = shard.make()
        if self.stream is not None:
            tensor.record_stream(self.stream)
        return Shard.of(self.buffers[name].copy_(tensor, non_blocking=True), shard.shape, shard.box)


def starts(shards: Shards) -> dict[str, int]:
    """{name: the offset of each shard in memory}, each at the start of a page."""
    ends = accumulate((_page_aligned(shard.nbytes) for shard in shards.values()), initial=0)
    return dict(zip(shards, ends, strict=False))


def extent(shards: Shards) -> int:
    """The bytes of memory that all shards take."""
    return sum(_page_aligned(shard.nbytes) for shard in shards.values())


def _page_aligned(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _allocate(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        needed = bytes_text(size)
        raise TrainingError(f"a snapshot takes {needed} of this machine's memory: {error.strerror}") from None
    with suppress(OSError, AttributeError):  # huge pages are pinned in half the time; not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(memory: mmap.mmap, start: int, shard: Shard) -> Tensor:
    count = math.prod(shard.sizes)
    return torch.frombuffer(memory, dtype=shard.dtype, count=count, offset=start).view(shard.sizes)


def _pin(owner: Staging, memory: mmap.mmap, errors: list[int]) -> None:
    """Pins the memory until its owner is deleted. If that fails, adds the error, and the memory stays pageable."""
    assert owner.stream is not None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(owner.device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), _PORTABLE))
    if error:
        errors.append(error)
        return
    # Not at exit: the end of the process unpins it.
    weakref.finalize(owner, _unpin, address, owner.stream).atexit = False


def _unpin(address: int, stream: torch.cuda.Stream) -> None:
    with torch.cuda.device(stream.device):
        try:
            stream.synchronize()  # copies that are under way
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)
