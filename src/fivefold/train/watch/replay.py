"""A microbatch computed twice: digests of its gradients, of the step itself and of a rehearsal."""

import time
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fivefold.data.batch import Share
from fivefold.train.engine import Engine
from fivefold.train.watch.account import Account
from fivefold.train.watch.digests import digest


class Replay:
    """Listens to the gradients of first microbatches, on this rank."""

    def __init__(self, engine: Engine, account: Account):
        self.engine, self.account = engine, account
        self.seen: dict[str, Tensor] | None = None  # digests by name, while it listens
        engine.weights.hear(self._hear)

    def _hear(self, name: str, gradient: Tensor) -> None:
        if self.seen is not None and name not in self.seen:
            start = time.perf_counter()
            with _disable_current_modes():
                self.seen[name] = digest(gradient)
            if not self.engine.weights.rehearsing:  # whose time is counted as a whole
                self.account.add("replay", time.perf_counter() - start)

    def listen(self) -> None:
        self.seen = {}

    def heard(self) -> Tensor:
        """One number for all gradients since; nothing is listened to any more."""
        seen, self.seen = self.seen or {}, None
        total = torch.zeros((), dtype=torch.int64, device=self.engine.mesh.device)
        for name, found in seen.items():
            total += found * (2 * crc32(name.encode()) + 1)
        return total

    def rehearse(self, share: Share) -> Tensor:
        """The same number of a rehearsal."""
        self.listen()
        with _disable_current_modes():
            self.engine.rehearse(share)
            return self.heard()
