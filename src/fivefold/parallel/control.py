"""Small values that ranks exchange beside the training step: rank 0 collects, and rank 0 announces.

    control = Control(mesh, timeout=600)
    control.broadcast_value(value, Path)      # rank 0's, on every rank
    control.gather_values(value, int)         # all ranks', on rank 0
    control.all_gather_values(value, int)     # all ranks', on every rank

They travel through the store at which the ranks met, not through a process group: a background thread may use it, a
wait can be given up, and it is known who is missing. A wait lasts as long as those waited for move (see
`launch.heartbeat`), however long their files take; `timeout` seconds without movement end it, and name them.

Each rank tells the store where it is eight times in that period. Rank 0 alone reads what all have told, and the others
read what rank 0 has, so on no other rank does work grow with their number.
"""

import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from fivefold.launch import heartbeat
from fivefold.launch.heartbeat import RankSeen, StallDetector
from fivefold.parallel.collectives import who
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import PeerLost, TrainingError

# ---- the store -----------------------------------------------------------------------------------------------------
# Where values lie on their way between ranks: the store at which the ranks met.
#
# For ranks of one machine it is a directory beside their FileStore: a FileStore keeps, in its file and in the memory
# of every rank, all that it was ever told.


_PART = 4 << 20  # bytes: a TCPStore takes no value above 8 MiB


class FolderStore:
    def __init__(self, path: Path):
        self.path = path
        path.mkdir(exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        self._half(key, data).rename(self.path / key)

    def _half(self, key: str, data: bytes) -> Path:
        half = self.path / f"{key}.{threading.get_native_id()}"  # two threads tell where a rank is
        half.write_bytes(data)
        return half

    def first(self, key: str, data: bytes) -> bytes:
        """Put it, unless another rank has; what is there then."""
        half = self._half(key, data)
        with suppress(FileExistsError):
            os.link(half, self.path / key)
        half.unlink()
        return self.get(key)

    def has(self, keys: list[str]) -> bool:
        """All of them."""
        return all((self.path / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Of a key that is there."""
        return (self.path / key).read_bytes()

    def drop(self, key: str) -> None:
        (self.path / key).unlink()


class RemoteStore:
    def __init__(self, store: Any):  # torch's types do not know all that its stores have
        self.store = store

    def put(self, key: str, data: bytes) -> None:
        parts = [data[start : start + _PART] for start in range(0, len(data), _PART)]
        for number, part in enumerate(parts[1:], start=1):
            self.store.set(f"{key}.{number}", part)
        self.store.set(key, len(parts).to_bytes(4, "big") + parts[0])

    def first(self, key: str, data: bytes) -> bytes:
        return self.store.compare_set(key, "", data)

    def has(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        first = self.store.get(key)
        more = (self.store.get(f"{key}.{number}") for number in range(1, int.from_bytes(first[:4], "big")))
        return first[4:] + b"".join(more)

    def drop(self, key: str) -> None:
        for number in range(1, int.from_bytes(self.store.get(key)[:4], "big")):
            self.store.delete_key(f"{key}.{number}")
        self.store.delete_key(key)


def kv_store(name: str) -> FolderStore | RemoteStore:
    """A connection of its own: a TCPStore answers one question at a time. `name` tells several apart."""
    met: Any = _get_default_store()
    base = met
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, FileStore):
        return FolderStore(Path(f"{base.path}.{name}"))  # type: ignore[attr-defined]
    return RemoteStore(PrefixStore(name, met.clone()))


# ---- messages -------------------------------------------------------------------------------------------------------
# What ranks tell each other in words: data of a declared type, as msgpack. Nothing that a peer sends is run.
#
#     data = packed(value)
#     value = unpacked(data, list[File])     # a TrainingError, if it is not that
#
#     all_gather_values(value, int, group)   # collective: the values of all ranks, in their order, on every rank
#     gather_values(value, RankTrace, group) # collective: those of all ranks, on the first; others get none
#
# torch's collectives of objects unpickle, and so execute, whatever comes.


T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all ranks


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def unpacked(data: bytes, kind: Any, rank: int = 0) -> Any:
    """`rank`: that of whom it came from, for the error."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda wanted, plain: wanted(plain))
    except msgspec.MsgspecError as error:
        raise TrainingError(f"rank {rank} sent what is not {kind}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is not sent between ranks")  # msgspec asks for this one


def all_gather_values(value: T, kind: Any, group: Group = None) -> list[T]:
    size, message = _encoded(value, group)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(map(int, sizes))
    messages = [message.new_empty(longest) for _ in sizes]
    dist.all_gather(messages, _padded(message, longest), group=group)
    return _values(messages, sizes, kind)


def gather_values(value: T, kind: Any, group: Group = None) -> list[T]:
    size, message = _encoded(value, group)
    first, longest = dist.get_rank(group) == 0, size.clone()
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    count = dist.get_world_size(group) if first else 0
    sizes = [torch.empty_like(size) for _ in range(count)]
    messages = [message.new_empty(int(longest)) for _ in range(count)]
    dist.gather(size, sizes if first else None, group=group, group_dst=0)
    dist.gather(_padded(message, int(longest)), messages if first else None, group=group, group_dst=0)
    return _values(messages, sizes, kind)


def _encoded(value: Any, group: Group) -> tuple[Tensor, Tensor]:
    """This rank's message and its size, where the group's backend takes tensors."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    message = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8).to(device)
    return torch.tensor(len(message), device=device), message


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _values(messages: list[Tensor], sizes: list[Tensor], kind: Any) -> list[Any]:
    of_ranks = enumerate(zip(messages, sizes, strict=True))
    return [unpacked(bytes(message[: int(size)].cpu().numpy()), kind, rank) for rank, (message, size) in of_ranks]


# ---- control --------------------------------------------------------------------------------------------------------


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
        self.peers = [StallDetector() for _ in range(self.size)]
        self.teller = threading.Thread(target=self._tell, name="control", daemon=True)
        if self.size > 1:
            self.name, self.path = who(mesh), f"control-{next(_MADE)}"
            self.store = kv_store(self.path)
            self.teller.start()

    def broadcast_value(self, value: T, kind: Any) -> T:
        """The value of rank 0, of the type `kind`, on every rank; what the others give is not looked at."""
        if self.size == 1:
            return value
        key = f"{self._call()}"
        if self.rank == 0:
            self.store.put(key, packed(value))
            self.announced.append(key)
            return value
        self._wait({0: key})
        return unpacked(self.store.get(key), kind)

    def gather_values(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in their order, on rank 0; the others get none, and do not wait."""
        if self.size == 1:
            return [value]
        call = self._call()
        if self.rank:
            self.store.put(f"{call} {self.rank}", packed(value))
            return []
        keys = {rank: f"{call} {rank}" for rank in range(1, self.size)}
        self._wait(keys)
        values = [value, *(unpacked(self.store.get(key), kind, rank) for rank, key in keys.items())]
        for key in (*keys.values(), *self.announced):  # who has answered this call has heard the calls before
            self.store.drop(key)
        self.announced.clear()
        return values

    def all_gather_values(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in their order, on every rank: for values that are small, or of few ranks."""
        return self.broadcast_value(self.gather_values(value, kind), list[kind])

    def close(self) -> None:
        """This rank takes part no more: those who wait for it learn so at once. Rank 0, whose process may have the
        store, gives the others a moment to read what it told them."""
        if self.size == 1 or self.over.is_set():
            return
        self.over.set()
        with suppress(RuntimeError, OSError):
            self.store.put(_ended(self.rank), packed(RankSeen.here().place))
            patience = time.monotonic() + _MOMENT * (self.rank == 0 and isinstance(self.store, RemoteStore))
            while time.monotonic() < patience and not self.store.has([_ended(rank) for rank in range(self.size)]):
                heartbeat.beat()
                time.sleep(self.pause)

    def _call(self) -> int:
        """The number of this call. All ranks count the same ones; each says from where it calls, if that is new."""
        self.calls += 1
        now = RankSeen.here()
        if now.place != self.place:
            self.store.put(_at(self.rank), packed(now))
            self.place = now.place
        return self.calls

    def _tell(self) -> None:
        """In the background: where this rank is, again and again, until the store is gone."""
        with suppress(RuntimeError, OSError):
            store = kv_store(self.path)
            while not self.over.is_set():
                store.put(_at(self.rank), packed(RankSeen.here()))
                self.over.wait(self.look)

    def _wait(self, keys: dict[int, str]) -> None:
        """Until the store has the keys, each of which the rank beside it sets."""
        start = looked = time.monotonic()
        pause = 0.0005
        try:
            while not self.store.has(list(keys.values())):
                time.sleep(pause)
                pause = min(1.5 * pause, self.pause)
                if time.monotonic() - looked > self.look:
                    looked = time.monotonic()
                    self._judge([rank for rank, key in keys.items() if not self.store.has([key])], looked - start)
                    heartbeat.beat()  # those waited for move, and so does who waits
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"{self.name} waited for rank 0, whose store is gone: {error}") from error

    def _judge(self, missing: list[int], waited: float) -> None:
        """Raise PeerLost if one of them has not moved for too long. Rank 0 tells the others what it found."""
        if self.rank and self.store.has(["lost"]):
            raise PeerLost(f"{self.name}: {unpacked(self.store.get('lost'), str)}")
        limit = self.timeout if self.rank == 0 else self.timeout + 3 * self.look  # rank 0 knows more, and speaks first
        lost = []
        for rank in missing:
            if self.store.has([_ended(rank)]):
                lost.append(f"rank {rank}, which has ended in {unpacked(self.store.get(_ended(rank)), str, rank)}")
                continue
            known = self.store.has([_at(rank)])
            seen = unpacked(self.store.get(_at(rank)), RankSeen, rank) if known else RankSeen(0, "its start")
            if (still := self.peers[rank].look(seen, 2 * self.look)) > limit:
                lost.append(f"rank {rank}, which has not moved for {still:.0f} s, and was last seen in {seen.place}")
        if lost:
            why = f"waited {waited:.0f} s for {'; '.join(lost[:8])}" + f"; and {len(lost) - 8} more" * (len(lost) > 8)
            if self.rank == 0:
                self.store.put("lost", packed(f"rank 0 {why}"))
            raise PeerLost(f"{self.name} {why}")


def _at(rank: int) -> str:
    return f"at {rank}"


def _ended(rank: int) -> str:
    return f"ended {rank}"
