"""Signs of life: whether a rank moves, and where it is.

    heartbeat.beat()                     # something moved: an action of a step, a piece of a file. 0.3 microseconds
    heartbeat.enter("step 4")            # where this thread is from now on
    board = Board(path, ranks)           # in the launcher, which put the path into the ranks' environment
    board.still([0, 1])                  # whether one of them has not moved for longer than it may

The count and the places are in memory that the launcher maps too, so it also sees a rank that is stopped, or whose
interpreter is blocked. `watchdog.py` watches them in the rank itself. A rank that waits for a peer beats whenever the
peer has moved, so a chain of waits does not look like a hang.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import NamedTuple

BEATS_ENV = "FIVEFOLD_BEATS"  # the file that ranks and launcher share
_SLOT = struct.Struct("=Qd120s120s")  # count, seconds that may pass without a beat, the main thread's place, others'
_LIMIT, _PLACES = 8, (16, 136)  # offsets of the limit, and of the two places
CHECK_INTERVAL = 1.0  # seconds between two checks, at most
# Seconds, and a tenth of the limit, that a watchdog waits longer: a rank that waits for a peer reports the peer first.
TIMEOUT_MARGIN = 2.0


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

    @property
    def limit(self) -> float:
        """Seconds that may pass without a beat where the rank is; 0: any number."""
        seconds: float = _SLOT.unpack(self.memory)[1]
        return seconds

    def place(self) -> str:
        """'step 4, and concurrently in the write of a checkpoint'."""
        return _place(self.memory)

    def limit_by(self, timeout: float) -> None:
        """From the next place on, so many seconds may pass without a beat; 0: any number, from now on."""
        self.timeout = timeout
        if not timeout:
            struct.pack_into("=d", self.memory, _LIMIT, 0.0)


_hearts = [Heart(memoryview(bytearray(_SLOT.size)))]  # one: this process's


def my_heart() -> Heart:
    return _hearts[0]


def share(rank: int) -> Heart:
    """Keep the beats of this process where our launcher sees them from now on, if it started this process."""
    if path := os.environ.get(BEATS_ENV):
        _hearts[0] = Heart(_slot(Path(path), rank))
    return _hearts[0]


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
        return cls(_hearts[0].count[0], _hearts[0].place())


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
        """Whether a rank has not moved for longer than it may, and for longer than its own watchdog takes to say so."""
        still = False
        for rank in ranks:
            count, limit = _SLOT.unpack(self.slots[rank])[:2]
            seconds = self.ranks[rank].look(count, CHECK_INTERVAL)
            still |= limit > 0 and seconds > limit * 1.1 + 2 * TIMEOUT_MARGIN
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
