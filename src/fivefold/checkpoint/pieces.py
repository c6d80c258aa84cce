"""What a rank holds of the whole model, in DCP's words.

A piece is a box of a tensor with a global name. A checkpoint is written as the boxes of one layout and read as those of
another; DCP finds the overlaps.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fivefold.layout.sharding import Box


@dataclass(frozen=True)
class Piece:
    """A box of a tensor. `make` gives its values, and is asked only when they are written: they may lie in a file."""

    shape: torch.Size  # of the whole
    box: Box
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], box: Box) -> "Piece":
        return cls(torch.Size(shape), box, tensor.dtype, lambda: tensor)

    @classmethod
    def whole(cls, tensor: Tensor) -> "Piece":
        return cls.of(tensor, tuple(tensor.shape), tuple(range(size) for size in tensor.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size(side.start for side in self.box)
        return ChunkStorageMetadata(offsets, torch.Size(len(side) for side in self.box))

    @property
    def nbytes(self) -> int:
        return self.chunk.sizes.numel() * self.dtype.itemsize

    # ---- what DCP asks of an object that is no tensor ----------------------------------------------------------------

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        data = TensorWriteData(self.chunk, TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(name, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]


Pieces = Mapping[str, Piece]


@contextmanager
def quietly() -> Iterator[None]:
    """DCP warns where one process works alone, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class SavePlan(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].make()


class LoadPlan(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """DCP's own would first look for tensors on the meta device, and drops what is no tensor."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].make()
