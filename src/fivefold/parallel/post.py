"""Where values lie on their way between ranks: the store at which the ranks met.

For ranks of one machine it is a directory beside their FileStore: a FileStore keeps, in its file and in the memory of
every rank, all that it was ever told.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

_PART = 4 << 20  # bytes: a TCPStore takes no value above 8 MiB


class Folder:
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


class Remote:
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


def post(name: str) -> Folder | Remote:
    """A connection of its own: a TCPStore answers one question at a time. `name` tells several posts apart."""
    met: Any = _get_default_store()
    base = met
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, FileStore):
        return Folder(Path(f"{base.path}.{name}"))  # type: ignore[attr-defined]
    return Remote(PrefixStore(name, met.clone()))
