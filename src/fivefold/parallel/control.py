"""Small values that ranks exchange beside the training step: rank 0 collects, and rank 0 announces.

    control = Control(mesh, timeout=600)
    control.from_first(value, Path)      # rank 0's, on every rank
    control.to_first(value, int)         # all ranks', on rank 0
    control.from_all(value, int)         # all ranks', on every rank

They travel through the store at which the ranks met, not through a process group: a background thread may use it, a
wait can be given up, and it is known who is missing. A wait lasts as long as those waited for move (see
`launch.heartbeat`), however long their files take; `timeout` seconds without movement end it, and name them.

Each rank tells the store where it is eight times in that period. Rank 0 alone reads what all have told, and the others
read what rank 0 has, so on no other rank does work grow with their number.
"""

import itertools
import threading
import time
from contextlib import suppress
from typing import Any, TypeVar

from fivefold.launch import heartbeat
from fivefold.launch.heartbeat import Seen, Stillness
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.messages import packed, unpacked
from fivefold.parallel.peer_errors import who
from fivefold.parallel.post import Remote, post
from fivefold.support.errors import PeerLost

T = TypeVar("T")
_MADE = itertools.count()  # all ranks make theirs in one order
_MOMENT = 3.0  # seconds


class Control:
    def __init__(self, mesh: Mesh, timeout: float = 600.0):
        """All ranks make one together."""
        self.rank, self.size, self.timeout = mesh.world.rank, mesh.world.size, timeout
        self.calls, self.announced, self.over = 0, list[str](), threading.Event()
        self.look = timeout / 8  # seconds from one to the next
        self.pause = 0.02 + self.size / 5000  # seconds, at most, between two questions to the store, which all ask
        self.place = ""  # where this rank last called from
        self.peers = [Stillness() for _ in range(self.size)]
        self.teller = threading.Thread(target=self._tell, name="control", daemon=True)
        if self.size > 1:
            self.name, self.path = who(mesh), f"control-{next(_MADE)}"
            self.post = post(self.path)
            self.teller.start()

    def from_first(self, value: T, kind: Any) -> T:
        """The value of rank 0, of the type `kind`, on every rank; what the others give is not looked at."""
        if self.size == 1:
            return value
        key = f"{self._call()}"
        if self.rank == 0:
            self.post.put(key, packed(value))
            self.announced.append(key)
            return value
        self._wait({0: key})
        return unpacked(self.post.get(key), kind)

    def to_first(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in their order, on rank 0; the others get none, and do not wait."""
        if self.size == 1:
            return [value]
        call = self._call()
        if self.rank:
            self.post.put(f"{call} {self.rank}", packed(value))
            return []
        keys = {rank: f"{call} {rank}" for rank in range(1, self.size)}
        self._wait(keys)
        found = [value, *(unpacked(self.post.get(key), kind, rank) for rank, key in keys.items())]
        for key in (*keys.values(), *self.announced):  # who has answered this call has heard the calls before
            self.post.drop(key)
        self.announced.clear()
        return found

    def from_all(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in their order, on every rank: for values that are small, or of few ranks."""
        return self.from_first(self.to_first(value, kind), list[kind])

    def close(self) -> None:
        """This rank takes part no more: those who wait for it learn so at once. Rank 0, whose process may have the
        store, gives the others a moment to read what it told them."""
        if self.size == 1 or self.over.is_set():
            return
        self.over.set()
        with suppress(RuntimeError, OSError):
            self.post.put(_ended(self.rank), packed(Seen.here().place))
            patience = time.monotonic() + _MOMENT * (self.rank == 0 and isinstance(self.post, Remote))
            while time.monotonic() < patience and not self.post.has([_ended(rank) for rank in range(self.size)]):
                heartbeat.beat()
                time.sleep(self.pause)

    def _call(self) -> int:
        """The number of this call. All ranks count the same ones; each says from where it calls, if that is new."""
        self.calls += 1
        here = Seen.here()
        if here.place != self.place:
            self.post.put(_at(self.rank), packed(here))
            self.place = here.place
        return self.calls

    def _tell(self) -> None:
        """In the background: where this rank is, again and again, until the store is gone."""
        with suppress(RuntimeError, OSError):
            own = post(self.path)
            while not self.over.is_set():
                own.put(_at(self.rank), packed(Seen.here()))
                self.over.wait(self.look)

    def _wait(self, keys: dict[int, str]) -> None:
        """Until the store has the keys, each of which the rank beside it sets."""
        start = looked = time.monotonic()
        pause = 0.0005
        try:
            while not self.post.has(list(keys.values())):
                time.sleep(pause)
                pause = min(1.5 * pause, self.pause)
                if time.monotonic() - looked > self.look:
                    looked = time.monotonic()
                    self._judge([rank for rank, key in keys.items() if not self.post.has([key])], looked - start)
                    heartbeat.beat()  # those waited for move, and so does who waits
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"{self.name} waited for rank 0, whose store is gone: {error}") from error

    def _judge(self, missing: list[int], waited: float) -> None:
        """Raise PeerLost if one of them has not moved for too long. Rank 0 tells the others what it found."""
        if self.rank and self.post.has(["lost"]):
            raise PeerLost(f"{self.name}: {unpacked(self.post.get('lost'), str)}")
        limit = self.timeout if self.rank == 0 else self.timeout + 3 * self.look  # rank 0 knows more, and speaks first
        lost = []
        for rank in missing:
            if self.post.has([_ended(rank)]):
                lost.append(f"rank {rank}, which has ended in {unpacked(self.post.get(_ended(rank)), str, rank)}")
                continue
            told = self.post.has([_at(rank)])
            seen = unpacked(self.post.get(_at(rank)), Seen, rank) if told else Seen(0, "its start")
            if (still := self.peers[rank].look(seen, 2 * self.look)) > limit:
                lost.append(f"rank {rank}, which has not moved for {still:.0f} s, and was last seen in {seen.place}")
        if lost:
            why = f"waited {waited:.0f} s for {'; '.join(lost[:8])}" + f"; and {len(lost) - 8} more" * (len(lost) > 8)
            if self.rank == 0:
                self.post.put("lost", packed(f"rank 0 {why}"))
            raise PeerLost(f"{self.name} {why}")


def _at(rank: int) -> str:
    return f"at {rank}"


def _ended(rank: int) -> str:
    return f"ended {rank}"
