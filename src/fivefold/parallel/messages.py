"""What ranks tell each other in words: data of a declared type, as msgpack. Nothing that a peer sends is run.

    data = packed(value)
    value = unpacked(data, list[File])     # a TrainingError, if it is not that

    from_all(value, int, group)            # collective: the values of all ranks, in their order, on every rank
    to_first(value, RankTrace, group)      # collective: those of all ranks, on the first; others get none

torch's collectives of objects unpickle, and so execute, whatever comes.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.support.errors import TrainingError

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


def from_all(value: T, kind: Any, group: Group = None) -> list[T]:
    size, mine = _start(value, group)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(map(int, sizes))
    boxes = [mine.new_empty(longest) for _ in sizes]
    dist.all_gather(boxes, _padded(mine, longest), group=group)
    return _values(boxes, sizes, kind)


def to_first(value: T, kind: Any, group: Group = None) -> list[T]:
    size, mine = _start(value, group)
    first, longest = dist.get_rank(group) == 0, size.clone()
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    count = dist.get_world_size(group) if first else 0
    sizes = [torch.empty_like(size) for _ in range(count)]
    boxes = [mine.new_empty(int(longest)) for _ in range(count)]
    dist.gather(size, sizes if first else None, group=group, group_dst=0)
    dist.gather(_padded(mine, int(longest)), boxes if first else None, group=group, group_dst=0)
    return _values(boxes, sizes, kind)


def _start(value: Any, group: Group) -> tuple[Tensor, Tensor]:
    """This rank's message and its size, where the group's backend takes tensors."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    mine = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8).to(device)
    return torch.tensor(len(mine), device=device), mine


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _values(boxes: list[Tensor], sizes: list[Tensor], kind: Any) -> list[Any]:
    found = enumerate(zip(boxes, sizes, strict=True))
    return [unpacked(bytes(box[: int(size)].cpu().numpy()), kind, rank) for rank, (box, size) in found]
