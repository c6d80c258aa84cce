"""A control channel: small values that ranks exchange outside of the training step, by way of rank 0.

    control = Control(mesh, timeout=600)
    control.broadcast_value(value, Path)      # rank 0's, on every rank
    control.gather_values(value, int)         # all ranks', on rank 0
    control.all_gather_values(value, int)     # all ranks', on every rank

They go through the store of the rendezvous, not through a process group: a background thread may use it, a wait can be
given up, and it is known who is missing. A wait lasts as long as the missing ranks make progress (see
`launch.heartbeat`), however long their files take; after `timeout` seconds without progress it ends, and names them.

Each rank reports to the store where it is eight times in that period. Only rank 0 reads all reports, and the others
read what rank 0 found, so on no other rank does work grow with the number of ranks.
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
# A key-value store for values in flight between ranks: the store of the rendezvous.
#
# For ranks of one machine it is a directory beside their FileStore: a FileStore never frees a value, in its file and in
# the memory of every rank.


_PART = 4 << 20  # bytes: a TCPStore takes no value above 8 MiB


class FolderStore:
    def __init__(self, path: Path):
        self.path = path
        path.mkdir(exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        self._write_temp(key, data).rename(self.path / key)

    def _write_temp(self, key: str, data: bytes) -> Path:
        temp = self.path / f"{key}.{threading.get_native_id()}"  # two threads of a rank may put the same key
        temp.write_bytes(data)
        return temp

    def put_if_absent(self, key: str, data: bytes) -> bytes:
        """Put a value unless there is one; return the value that is in the store then."""
        temp = self._write_temp(key, data)
        with suppress(FileExistsError):
            os.link(temp, self.path / key)
        temp.unlink()
        return self.get(key)

    def has(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return all((self.path / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key, which must have one."""
        return (self.path / key).read_bytes()

    def delete(self, key: str) -> None:
        (self.path / key).unlink()


class RemoteStore:
    def __init__(self, store: Any):  # torch's type stubs lack some methods of its stores
        self.store = store

    def put(self, key: str, data: bytes) -> None:
        parts = [data[start : start + _PART] for start in range(0, len(data), _PART)]
        for number, part in enumerate(parts[1:], start=1):
            self.store.set(f"{key}.{number}", part)
        self.store.set(key, len(parts).to_bytes(4, "big") + parts[0])

    def put_if_absent(self, key: str, data: bytes) -> bytes:
        return self.store.compare_set(key, "", data)

    def has(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        first = self.store.get(key)
        more = (self.store.get(f"{key}.{number}") for number in range(1, int.from_bytes(first[:4], "big")))
        return first[4:] + b"".join(more)

    def delete(self, key: str) -> None:
        for number in range(1, int.from_bytes(self.store.get(key)[:4], "big")):
            self.store.delete_key(f"{key}.{number}")
        self.store.delete_key(key)


def kv_store(name: str) -> FolderStore | RemoteStore:
    """A new connection: a TCPStore answers one request at a time. `name` is a namespace."""
    default: Any = _get_default_store()
    base = default
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, FileStore):
        return FolderStore(Path(f"{base.path}.{name}"))  # type: ignore[attr-defined]
    return RemoteStore(PrefixStore(name, default.clone()))


# ---- messages -------------------------------------------------------------------------------------------------------
# Messages between ranks: data of a declared type, as msgpack. Nothing that a peer sends is executed.
#
#     data = packed(value)
#     value = unpacked(data, list[File])     # a TrainingError, if it is not that
#
#     all_gather_values(value, int, group)   # collective: the values of all ranks, in their order, on every rank
#     gather_values(value, RankTrace, group) # collective: those of all ranks, on the first; others get none
#
# torch's collectives of objects unpickle, and so execute, what they receive.


T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all ranks


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def unpacked(data: bytes, kind: Any, rank: int = 0) -> Any:
    """`rank`: the sender, for the error."""
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
    """This rank's message and its size, on the device of the group's backend."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    message = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8).to(device)
    return torch.tensor(len(message), device=device), message


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _values(messages: list[Tensor], sizes: list[Tensor], kind: Any) -> list[Any]:
    of_ranks = enumerate(zip(messages, sizes, strict=True))
    return [unpacked(bytes(message[: int(size)].cpu().numpy()), kind, rank) for rank, (message, size) in of_ranks]


# ---- control --------------------------------------------------------------------------------------------------------


_INSTANCES = itertools.count()  # all ranks create theirs in one order
_CLOSE_WAIT = 3.0  # seconds


class Control:
    def __init__(self, mesh: Mesh, timeout: float = 600.0):
        """Collective: all ranks create one in the same order."""
        self.rank, self.size, self.timeout = mesh.world.rank, mesh.world.size, timeout
        self.calls, self.announced, self.closed = 0, list[str](), threading.Event()
        self.report_every = timeout / 8  # seconds
        self.pause = 0.02 + self.size / 5000  # seconds, at most, between two requests of a wait to the store
        self.place = ""  # the source line that this rank last called from
        self.peers = [StallDetector() for _ in range(self.size)]
        self.publishing = threading.Lock()
        self.reporter = threading.Thread(target=self._report, name="control", daemon=True)
        if self.size > 1:
            self.name, self.path = who(mesh), f"control-{next(_INSTANCES)}"
            self.store = kv_store(self.path)
            self.reporter.start()

    def broadcast_value(self, value: T, kind: Any) -> T:
        """The value of rank 0, of the type `kind`, on every rank; the values of the others are ignored."""
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
        for key in (
            *keys.values(),
            *self.announced,
        ):  # a rank that answered this call has read the answers of all earlier ones
            self.store.delete(key)
        self.announced.clear()
        return values

    def all_gather_values(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in their order, on every rank: for values that are small, or of few ranks."""
        return self.broadcast_value(self.gather_values(value, kind), list[kind])

    def close(self) -> None:
        """Leave: ranks that wait for this one learn so at once. Rank 0, which may host the store, gives the others a
        moment to read its last values."""
        if self.size == 1 or self.closed.is_set():
            return
        self.closed.set()
        with suppress(RuntimeError, OSError):
            self.store.put(_ended(self.rank), packed(RankSeen.here().place))
            deadline = time.monotonic() + _CLOSE_WAIT * (self.rank == 0 and isinstance(self.store, RemoteStore))
            while time.monotonic() < deadline and not self.store.has([_ended(rank) for rank in range(self.size)]):
                heartbeat.beat()
                time.sleep(self.pause)

    def _call(self) -> int:
        """The number of this call, equal on all ranks; report where this rank calls from, if that is new."""
        self.calls += 1
        if RankSeen.here().place != self.place:
            self.place = self._publish(self.store)
        return self.calls

    def _publish(self, store: FolderStore | RemoteStore) -> str:
        """Tell the others where this rank is. Under a lock: what the other thread looked up before would come after it,
        and a rank that stops then would be looked for where it no longer was."""
        with self.publishing:
            now = RankSeen.here()
            store.put(_at(self.rank), packed(now))
        return now.place

    def _report(self) -> None:
        """The background thread: report periodically where this rank is, until the store is gone."""
        with suppress(RuntimeError, OSError):
            store = kv_store(self.path)
            while not self.closed.is_set():
                self._publish(store)
                self.closed.wait(self.report_every)

    def _wait(self, keys: dict[int, str]) -> None:
        """Wait until the store has all keys; `keys` is by the rank that sets each."""
        start = looked = time.monotonic()
        pause = 0.0005
        try:
            while not self.store.has(list(keys.values())):
                time.sleep(pause)
                pause = min(1.5 * pause, self.pause)
                if time.monotonic() - looked > self.report_every:
                    looked = time.monotonic()
                    self._judge([rank for rank, key in keys.items() if not self.store.has([key])], looked - start)
                    heartbeat.beat()  # the others make progress, and so does this wait
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"{self.name} waited for rank 0, whose store is gone: {error}") from error

    def _judge(self, missing: list[int], waited: float) -> None:
        """Raise PeerLost if a missing rank made no progress for too long. Rank 0 reports that to the others."""
        if self.rank and self.store.has(["lost"]):
            raise PeerLost(f"{self.name}: {unpacked(self.store.get('lost'), str)}")
        limit = self.timeout if self.rank == 0 else self.timeout + 3 * self.report_every  # rank 0 first
        lost = []
        for rank in missing:
            if self.store.has([_ended(rank)]):
                lost.append(f"rank {rank}, which has ended in {unpacked(self.store.get(_ended(rank)), str, rank)}")
                continue
            known = self.store.has([_at(rank)])
            seen = unpacked(self.store.get(_at(rank)), RankSeen, rank) if known else RankSeen(0, "its start")
            if (still := self.peers[rank].look(seen, 2 * self.report_every)) > limit:
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
