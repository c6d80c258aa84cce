"""Signs of life: whether a rank moves, and where it is.

    heartbeat.beat()                     # something moved: an action of a step, a piece of a file. 0.3 microseconds
    heartbeat.enter("step 4")            # where this thread is from now on
    with heartbeat.watched(600):         # in a rank: if nothing moves for 600 s, it prints its stack and ends
        ...
    board = Board(path, ranks)           # in the launcher, which put the path into the ranks' environment
    board.still([0, 1])                  # whether one of them has not moved for longer than it may

The count and the places are in memory that the launcher maps too, so a rank that is stopped, or whose interpreter is
blocked, is seen as well. Time is counted only while the watcher itself runs: a job that was suspended and continues has
not hung. Whoever waits for a peer that moves beats for it, so movement passes through waits.
"""

import faulthandler
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.launch.waits import waits_there
from fivefold.support.errors import PeerLost, TrainingError

BEATS = "FIVEFOLD_BEATS"  # the file that ranks and launcher share
LONG = 3600.0  # seconds: what building a model and compiling its first step may take without a sign
_SLOT = struct.Struct("=Qd120s120s")  # count, seconds that may pass without a beat, the main thread's place, others'
_LIMIT, _PLACES = 8, (16, 136)
_TICK = 1.0  # seconds between looks, at most
_SHOWN = 3  # operations that are named
_ASKING = 5.0  # seconds for CUDA to say which
_MORE = 2.0  # seconds and a tenth of the limit: who waits for a peer is to speak before the one who watches it


class Heart:
    """Of this process. It is one, as what hangs is a process; threads share it."""

    def __init__(self, memory: memoryview):
        self.memory, self.count, self.timeout = memory, memory[:8].cast("Q"), 0.0
        self.thread = threading.main_thread().ident or 0  # that does the rank's work

    def enter(self, place: str, least: float = 0.0) -> None:
        here = threading.current_thread() is threading.main_thread()
        struct.pack_into("120s", self.memory, _PLACES[not here], place.encode()[:119])
        if here and self.timeout:
            struct.pack_into("=d", self.memory, _LIMIT, max(self.timeout, least))
        self.count[0] += 1


_hearts = [Heart(memoryview(bytearray(_SLOT.size)))]


def beat(_: int = 0) -> None:
    """This rank has moved: some bytes, for example."""
    _hearts[0].count[0] += 1


def here() -> None:
    """The rank's work goes on in this thread."""
    _hearts[0].thread = threading.get_ident()


def enter(place: str, least: float = 0.0) -> None:
    """Say where this thread is, up to the next call. `least`: seconds that may pass without a beat here, whatever the
    limit is elsewhere."""
    _hearts[0].enter(place, least)


class RankSeen(NamedTuple):
    """A rank, as others see it."""

    beats: int
    place: str

    @classmethod
    def here(cls) -> "RankSeen":
        return cls(_hearts[0].count[0], _place(_hearts[0].memory))


def _place(memory: memoryview) -> str:
    main, beside = (raw.rstrip(b"\0").decode(errors="ignore") for raw in _SLOT.unpack(memory)[2:])
    return f"{main}, and concurrently in {beside}" if main and beside else main or beside or "its start"


class StallDetector:
    """How long something has not changed, in seconds of this process's own running."""

    def __init__(self) -> None:
        self.value: Hashable = None
        self.seconds, self.last = 0.0, time.monotonic()

    def look(self, value: Hashable, most: float) -> float:
        """`most` seconds count since the last look: whatever is more, this process was asleep."""
        now = time.monotonic()
        self.seconds = 0.0 if value != self.value else self.seconds + min(now - self.last, most)
        self.value, self.last = value, now
        return self.seconds


class Board:
    """The launcher's view of the ranks."""

    def __init__(self, path: Path, ranks: int):
        path.write_bytes(bytes(_SLOT.size * ranks))
        self.slots = [_slot(path, rank) for rank in range(ranks)]
        self.ranks = [StallDetector() for _ in range(ranks)]

    def still(self, ranks: Iterable[int]) -> bool:
        """Whether one of them has not moved for longer than it may, and has had the time to say so itself."""
        late = False
        for rank in ranks:
            count, limit = _SLOT.unpack(self.slots[rank])[:2]
            seconds = self.ranks[rank].look(count, _TICK)
            late |= limit > 0 and seconds > limit * 1.1 + 2 * _MORE
        return late

    def place(self, rank: int) -> str:
        """Where its main thread is, or was when it ended: 'step 4'."""
        name: bytes = _SLOT.unpack(self.slots[rank])[2]
        return name.rstrip(b"\0").decode(errors="ignore")

    def last(self, rank: int) -> str:
        """'it last moved 601 s ago, in step 4'; nothing of a rank that is not watched."""
        if not _SLOT.unpack(self.slots[rank])[1]:
            return ""
        return f"it last moved {self.ranks[rank].seconds:.0f} s ago, in {_place(self.slots[rank])}"


def _slot(path: Path, rank: int) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))[rank * _SLOT.size : (rank + 1) * _SLOT.size]


@contextmanager
def watched(timeout: float, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Around the work of a rank."""
    if path := os.environ.get(BEATS):
        _hearts[0] = Heart(_slot(Path(path), rank))
    heart = _hearts[0]
    heart.timeout, over = timeout, threading.Event()
    heart.enter("its start", LONG)
    more = timeout / 10 + _MORE if world > 1 else 0.0
    threading.Thread(target=_watch, args=(heart, rank, more, over), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        heart.timeout = 0.0
        struct.pack_into("=d", heart.memory, _LIMIT, 0.0)


def _watch(heart: Heart, rank: int, more: float, over: threading.Event) -> None:
    stillness, tick = StallDetector(), min(_TICK, heart.timeout / 4)
    while not over.wait(tick):
        limit = _SLOT.unpack(heart.memory)[1]
        seconds = stillness.look(heart.count[0], 2 * tick)
        if limit and seconds > limit + more:
            _end(rank, f"rank {rank} has not moved for {seconds:.0f} s in {_place(heart.memory)}")


def _end(rank: int, sentence: str) -> None:
    """With the stacks, innermost frame last. A rank that waits for others inside torch is not what they wait for."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    working = _hearts[0].thread
    main = frames.pop(working if working in frames else threading.main_thread().ident or 0)
    for frame in (*frames.values(), main):
        traceback.print_stack(frame)
    code = PeerLost.code if waits_there(main.f_code.co_filename, main.f_lineno) else TrainingError.code
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    # CUDA is asked next, and what hangs may be CUDA: in a thread that is left behind then. Should it take Python's lock
    # along, a timer that needs none ends the process, though not with this code.
    faulthandler.dump_traceback_later(3 * _ASKING, exit=True)
    asking = threading.Thread(target=_say_what_nccl_does, args=(rank,), daemon=True)
    asking.start()
    asking.join(_ASKING)
    os._exit(code)


def _say_what_nccl_does(rank: int) -> None:
    if device := _on_the_device():
        print(f"rank {rank}: {device}", file=sys.stderr, flush=True)


def _on_the_device() -> str:
    """What NCCL has not finished on this rank, the oldest first, as PyTorch's flight recorder has it."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    try:
        entries = json.loads(dump(True, True))["entries"] if dump else []
        waiting = [_operation(entry) for entry in entries if entry["state"] != "completed"]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # it differs between releases of PyTorch
        return ""
    more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    return f"NCCL has not finished {', '.join(waiting[:_SHOWN])}{more}" if waiting else ""


def _operation(entry: dict[str, Any]) -> str:
    """'all_reduce of [512] Float, call 6 of mesh_tp'."""
    name, group = str(entry["profiling_name"]).removeprefix("nccl:"), entry["process_group"]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    what = " ".join(map(str, (*entry["input_sizes"], *entry["input_dtypes"][:1])))
    return f"{name} of {what}, call {number} of {group[1] if group[1] != 'undefined' else f'group {group[0]}'}"
