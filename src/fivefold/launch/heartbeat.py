"""Signs of life: whether a rank moves, and where it is.

    heartbeat.beat()                     # something moved: an action of a step, a piece of a file. 0.3 microseconds
    heartbeat.enter("step 4")            # where this thread is from now on
    with heartbeat.watched(600):         # in a rank: if nothing moves for 600 s, it prints its stack and ends
        ...
    board = Board(path, ranks)           # in the launcher, which put the path into the ranks' environment
    board.still([0, 1])                  # whether one of them has not moved for longer than it may

The count and the places are in memory that the launcher maps too, so it also sees a rank that is stopped, or whose
interpreter is blocked. Time is counted only while the watcher itself runs: a job that was suspended and continues has
not hung. A rank that waits for a peer beats whenever the peer has moved, so a chain of waits does not look like a hang.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.launch.waits import waits_there
from fivefold.support.errors import PeerLost, TrainingError

BEATS = "FIVEFOLD_BEATS"  # the file that ranks and launcher share
STACK = "FIVEFOLD_STACK"  # names the file into which faulthandler writes; a rank says why it ends in .cause beside it
LONG = 3600.0  # seconds that building a model and compiling its first step may take without a beat
_SLOT = struct.Struct("=Qd120s120s")  # count, seconds that may pass without a beat, the main thread's place, others'
_LIMIT, _PLACES = 8, (16, 136)  # offsets of the limit, and of the two places
_TICK = 1.0  # seconds between two checks, at most
_SHOWN = 3  # operations that are named
_ASKING = 5.0  # seconds for CUDA to answer which operations it has not finished
# Seconds, and a tenth of the limit, that a watcher waits longer: a rank that waits for a peer reports the peer first.
_MORE = 2.0


class Heart:
    """The beats of this process, in its slot of the shared memory. All threads share it: a process hangs as a whole."""

    def __init__(self, memory: memoryview):
        self.memory, self.count, self.timeout = memory, memory[:8].cast("Q"), 0.0
        self.thread = threading.main_thread().ident or 0  # the thread that does the rank's work

    def enter(self, place: str, least: float = 0.0) -> None:
        here = threading.current_thread() is threading.main_thread()
        struct.pack_into("120s", self.memory, _PLACES[not here], place.encode()[:119])
        if here and self.timeout:
            struct.pack_into("=d", self.memory, _LIMIT, max(self.timeout, least))
        self.count[0] += 1


_hearts = [Heart(memoryview(bytearray(_SLOT.size)))]


def beat(_: int = 0) -> None:
    """Count a sign of life: this rank has moved, if only some bytes."""
    _hearts[0].count[0] += 1


def here() -> None:
    """Note that the rank's work goes on in this thread."""
    _hearts[0].thread = threading.get_ident()


def enter(place: str, least: float = 0.0) -> None:
    """Say where this thread is, up to the next call. `least`: seconds that may pass without a beat here, whatever the
    limit is elsewhere."""
    _hearts[0].enter(place, least)


class RankSeen(NamedTuple):
    """How many beats a rank has made, and where it is: what peers see of it."""

    beats: int
    place: str

    @classmethod
    def here(cls) -> "RankSeen":
        return cls(_hearts[0].count[0], _place(_hearts[0].memory))


def _place(memory: memoryview) -> str:
    """Where the threads of a slot's rank are: 'step 4, and concurrently in the write of a checkpoint'."""
    main, beside = (raw.rstrip(b"\0").decode(errors="ignore") for raw in _SLOT.unpack(memory)[2:])
    return f"{main}, and concurrently in {beside}" if main and beside else main or beside or "its start"


class StallDetector:
    """Measures for how many seconds a value has not changed, not counting time in which this process was suspended."""

    def __init__(self) -> None:
        self.value: Hashable = None
        self.seconds, self.last = 0.0, time.monotonic()

    def look(self, value: Hashable, most: float) -> float:
        """The seconds since the value last changed. Since the last look at most `most` of them count: if more have
        passed, this process was suspended."""
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
        """Whether a rank has not moved for longer than it may, and for longer than its own watcher takes to say so."""
        still = False
        for rank in ranks:
            count, limit = _SLOT.unpack(self.slots[rank])[:2]
            seconds = self.ranks[rank].look(count, _TICK)
            still |= limit > 0 and seconds > limit * 1.1 + 2 * _MORE
        return still

    def place(self, rank: int) -> str:
        """Where the rank's main thread is, or was when the rank ended: 'step 4'."""
        name: bytes = _SLOT.unpack(self.slots[rank])[2]
        return name.rstrip(b"\0").decode(errors="ignore")

    def last(self, rank: int) -> str:
        """'it last moved 601 s ago, in step 4'; empty for a rank that is not watched."""
        if not _SLOT.unpack(self.slots[rank])[1]:
            return ""
        return f"it last moved {self.ranks[rank].seconds:.0f} s ago, in {_place(self.slots[rank])}"


def _slot(path: Path, rank: int) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))[rank * _SLOT.size : (rank + 1) * _SLOT.size]


@contextmanager
def watched(timeout: float, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Watch this process while it does the work of a rank; end it once nothing has moved for `timeout` seconds."""
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
    """End this process: print its stacks, innermost frame last, and the sentence. The exit code says whether the rank
    itself hangs, or waits for peers inside torch."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    working = _hearts[0].thread
    main = frames.pop(working if working in frames else threading.main_thread().ident or 0)
    for frame in (*frames.values(), main):
        traceback.print_stack(frame)
    code = PeerLost.code if waits_there(main.f_code.co_filename, main.f_lineno) else TrainingError.code
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    _tell_the_launcher(sentence)
    # CUDA is asked next, in a thread that is left behind if CUDA itself hangs. If it hangs with the GIL held, a timer
    # that does not need the GIL ends the process, though not with this code.
    faulthandler.dump_traceback_later(3 * _ASKING, exit=True)
    asking = threading.Thread(target=_say_what_nccl_does, args=(rank,), daemon=True)
    asking.start()
    asking.join(_ASKING)
    os._exit(code)


def _say_what_nccl_does(rank: int) -> None:
    if device := _on_the_device():
        print(f"rank {rank}: {device}", file=sys.stderr, flush=True)
        _tell_the_launcher(f"; {device}")


def _tell_the_launcher(words: str) -> None:
    """Add words to the cause that our launcher reads once this process has ended. Other launchers have no such file."""
    if stack := os.environ.get(STACK):
        with suppress(OSError), Path(stack).with_suffix(".cause").open("a") as file:
            file.write(words)


def _on_the_device() -> str:
    """A sentence on what NCCL has not finished on this rank, the oldest first, from PyTorch's flight recorder."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    try:
        entries = json.loads(dump(True, True))["entries"] if dump else []
        waiting = [_operation(entry) for entry in entries if entry["state"] != "completed"]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # it differs between releases of PyTorch
        return ""
    more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    return f"NCCL has not finished {', '.join(waiting[:_SHOWN])}{more}" if waiting else ""


def _operation(entry: dict[str, Any]) -> str:
    """How the flight recorder's entry is named: 'all_reduce of [512] Float, call 6 of mesh_tp'."""
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    group_number, group_name = entry["process_group"]
    group = group_name if group_name != "undefined" else f"group {group_number}"
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    tensors = " ".join(map(str, (*entry["input_sizes"], *entry["input_dtypes"][:1])))
    return f"{name} of {tensors}, call {number} of {group}"
