"""One rank's part of a parameter: made anew, and seen as part of the whole."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fivefold.layout.buckets import Held, held
from fivefold.parallel.mesh import Mesh
from fivefold.spec.model import ModelSpec


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; without history."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def remake(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Its parameters anew and empty, in a dtype on a device.

    As `model.to(dtype).to_empty(device=device)`, which swaps tensors in place; those of a dry run refuse that.
    """
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                setattr(module, name, nn.Parameter(_empty_like(old, dtype, device)))


def _empty_like(old: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(old, DTensor):
        return torch.empty(old.shape, dtype=dtype, device=device)
    local = torch.empty(old._local_tensor.shape, dtype=dtype, device=device)
    return DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )


def held_by(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> dict[str, Held]:
    """The parameters of one of this rank's stages."""
    here = {name for name, _ in model.named_parameters()}
    whole = held(spec, mesh.layout, mesh.tp.rank)
    return {name: one for name, one in whole.items() if name in here}


def globally(one: Held, local: Tensor, mesh: Mesh, sharded: bool) -> Tensor:
    """`local` as part of the whole parameter; `sharded`: it is the share of the rows that ZeRO gives to this rank."""
    if mesh.world.size == 1:
        return local
    over_tp: Placement = Replicate() if one.tp.dim is None or mesh.tp.size == 1 else Shard(one.tp.dim)
    over_zero: Placement = Replicate()
    if sharded:
        # The rows are cut over tp first and over zero second, though zero is the outer axis of the mesh.
        over_zero = _StridedShard(0, split_factor=mesh.tp.size) if over_tp == Shard(0) else Shard(0)
    shape = torch.Size(one.parameter.shape)
    stride = torch.empty(shape, device="meta").stride()
    plane = mesh.plane("zero", "tp")
    return DTensor.from_local(local, plane, [over_zero, over_tp], run_check=False, shape=shape, stride=stride)


def shared(one: Held, mesh: Mesh) -> bool:
    """Whether the other end of the pipeline holds a copy, whose gradients are added to this one's."""
    return one.parameter.tied and mesh.ends.size > 1


def copies(one: Held, mesh: Mesh, sharded: bool) -> tuple[int, int]:
    """Among the ranks that hold the same elements, this one's number, and how many they are."""
    axes = [mesh.replicate] if sharded else [mesh.replicate, mesh.zero]
    axes += [mesh.tp] if one.tp.dim is None else []
    axes += [mesh.ends] if one.parameter.tied else []
    number = 0
    for axis in axes:
        number = number * axis.size + axis.rank
    return number, math.prod(axis.size for axis in axes)


def bytes_of(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the memory behind `tensors`, each piece of memory once; `seen` are the pieces counted already."""
    total = 0
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if memory._cdata not in seen:
            seen.add(memory._cdata)
            total += memory.nbytes()
    return total
