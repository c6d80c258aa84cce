"""A rank's part of a tensor: a box of it with a global name. State is written as the boxes of one layout and read as
those of another; `load.py` finds the overlaps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.layout.sharding import Box


@dataclass(frozen=True)
class Piece:
    """A box of a tensor. `make` gives its values, and is asked only when they are written: they may lie in a file."""

    shape: tuple[int, ...]  # of the whole
    box: Box
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], box: Box) -> "Piece":
        return cls(shape, box, tensor.dtype, lambda: tensor)

    @classmethod
    def whole(cls, tensor: Tensor) -> "Piece":
        return cls.of(tensor, tuple(tensor.shape), tuple(range(size) for size in tensor.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(side) for side in self.box)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


Pieces = Mapping[str, Piece]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that lies in one piece in this machine's memory; they are shared."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
