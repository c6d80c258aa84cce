"""Collectives over the ranks of an axis: one function each, out of place.

Each returns at once with a tensor that must not be read before `wait`: what runs in between overlaps. They are torch's
functional collectives, which compiled regions and recompute policies understand. On an axis of one rank nothing moves,
and nothing waits: that op alone would take a fiftieth of a backward pass.
Where ranks share a GPU (`Axis.staged`), what gloo cannot do there goes through host memory, and nothing overlaps.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fivefold.launch.waits import stood
from fivefold.parallel.mesh import Axis, around

_ops = torch.ops._c10d_functional


def wait(x: Tensor, axis: Axis) -> Tensor:
    """The result of a collective over the axis."""
    if axis.size == 1:
        return x
    return _ops.wait_tensor(x) if torch.compiler.is_compiling() else stood(_ops.wait_tensor, x)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    return x if axis.size == 1 else _ops.all_reduce(x.contiguous(), op, axis.group_name)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every rank -> [size * n, ...], in rank order."""
    return _resized(_ops.all_gather_into_tensor, x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[size * n, ...] -> [n, ...]: the sum over ranks of this rank's part."""
    return _resized(_ops.reduce_scatter_tensor, x, axis, "sum")


def _resized(collective: Any, x: Tensor, axis: Axis, *how: str) -> Tensor:
    if axis.size == 1:
        return x
    if axis.staged:
        return wait(collective(x.cpu().contiguous(), *how, axis.size, axis.group_name), axis).to(x.device)
    return collective(x.contiguous(), *how, axis.size, axis.group_name)


def all_to_all(x: Tensor, axis: Axis, out: list[int] | None = None, back: list[int] | None = None) -> Tensor:
    """Part i goes to rank i, and part i of the result came from rank i. The parts are equal, or have `out` and `back`
    rows."""
    if axis.size == 1:
        return x
    equal = [x.shape[0] // axis.size] * axis.size
    return _ops.all_to_all_single(x.contiguous(), back or equal, out or equal, axis.group_name)


# ---- along the sequence: dim 1 of [B, S, ...] ----------------------------------------------------------------------


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[B, S/n, ...] of every rank -> [B, S, ...]."""
    return arrange_sequence(wait(all_gather(x, axis), axis), axis)


def arrange_sequence(gathered: Tensor, axis: Axis) -> Tensor:
    """What `all_gather` made of [B, S/n, ...], [n * B, S/n, ...] -> [B, S, ...]; a copy where B > 1."""
    return gathered.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[B, S, ...] summands -> [B, S/n, ...] of their sum, not yet waited for."""
    return reduce_scatter(x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1), axis)


# ---- around a ring -------------------------------------------------------------------------------------------------


class Exchange:
    """`x` on its way to the next rank of the ring, and the previous rank's on its way here; `wait` returns that."""

    def __init__(self, x: Tensor, axis: Axis):
        self.home, self.patience = x.device, axis.patience
        self.sent = x.cpu() if axis.staged else x.contiguous()
        self.received, self.work = around(self.sent, axis)

    def wait(self) -> Tensor:
        for work in self.work:
            stood(work.wait, self.patience)
        return self.received.to(self.home)


# ---- whole tensors -------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks hold in parts, copied to the CPU. Collective where it is sharded: all its ranks must
    ask, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu" and mesh.get_group(0).name() == "gloo":
        # gloo gathers host tensors only: the same ranks and groups, as a mesh of CPUs
        groups, names = [mesh.get_group(axis) for axis in range(mesh.ndim)], mesh.mesh_dim_names
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
        local, shape, stride = tensor.to_local().cpu(), tensor.shape, tensor.stride()
        tensor = DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return tensor.full_tensor().detach().cpu().clone()


def digest(tensor: Tensor) -> str:
    """Equal for equal bits. Of a float32 or float64 tensor on the CPU."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
