"""Small objects that ranks exchange, over a gloo group of its own, which a background thread may use while
the training step uses the others."""

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fivefold.parallel.mesh import Mesh

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # a large file takes its time; a rank that dies closes its connections at once


class Control:
    def __init__(self, mesh: Mesh):
        """Collective."""
        self.rank, self.size = mesh.world.rank, mesh.world.size
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.size > 1 else None

    def from_first(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        box: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group)
        return box[0]

    def from_all(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        box: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(box, value, group=self.group)
        return box
