"""Collectives over the ranks of an axis: one function each, out of place.

Each returns at once with a tensor that must not be read before `wait`: what runs in between overlaps. They are torch's
functional collectives, which compiled regions and recompute policies understand. On an axis of one rank they return
their input, and nothing waits: the wait op alone would take a fiftieth of a backward pass.
If ranks share a GPU (`Axis.staged`), collectives that gloo lacks there go through host memory, without overlap.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from fivefold.launch.exits import lost_peer
from fivefold.launch.waits import timed_wait
from fivefold.parallel.mesh import Axis, Mesh, start_ring_exchange
from fivefold.support.errors import PeerLost

_ops = torch.ops._c10d_functional


def wait(x: Tensor, axis: Axis) -> Tensor:
    """Wait for the result of a collective over the axis."""
    if axis.size == 1:
        return x
    return _ops.wait_tensor(x) if torch.compiler.is_compiling() else timed_wait(_ops.wait_tensor, x)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    return x if axis.size == 1 else _ops.all_reduce(x.contiguous(), op, axis.group_name)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every rank -> [size * n, ...], in rank order."""
    return _resized(_ops.all_gather_into_tensor, x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[size * n, ...] -> [n, ...]: the sum over ranks of this rank's part."""
    return _resized(_ops.reduce_scatter_tensor, x, axis, "sum")


def _resized(collective: Any, x: Tensor, axis: Axis, *op: str) -> Tensor:
    """Start a collective whose result has another size than x."""
    if axis.size == 1:
        return x
    if axis.staged:
        return wait(collective(x.cpu().contiguous(), *op, axis.size, axis.group_name), axis).to(x.device)
    return collective(x.contiguous(), *op, axis.size, axis.group_name)


def all_to_all(x: Tensor, axis: Axis, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Part i goes to rank i, and part i of the result is from rank i. The parts are equal, or `sent` and `received` are
    their numbers of rows."""
    if axis.size == 1:
        return x
    equal = [x.shape[0] // axis.size] * axis.size
    return _ops.all_to_all_single(x.contiguous(), received or equal, sent or equal, axis.group_name)


# ---- along the sequence: dim 1 of [B, S, ...] ----------------------------------------------------------------------


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[B, S/n, ...] of every rank -> [B, S, ...]."""
    return arrange_sequence(wait(all_gather(x, axis), axis), axis)


def arrange_sequence(gathered: Tensor, axis: Axis) -> Tensor:
    """The result of `all_gather`, [n * B, S/n, ...] -> [B, S, ...]; a copy if B > 1."""
    return gathered.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[B, S, ...] partial sums -> this rank's [B, S/n, ...] of the sum, to be waited for."""
    return reduce_scatter(x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1), axis)


def all_reduce_or_scatter(axis: Axis, sp: bool, x: Tensor) -> Tensor:
    """Sums over ranks: without sp an all-reduce of the full sequence, with sp a reduce-scatter to this rank's part."""
    return wait(scatter_sequence(x, axis) if sp else all_reduce(x, axis), axis)


# ---- around a ring -------------------------------------------------------------------------------------------------


class RingExchange:
    """Sends x to the next rank of the ring, and receives the previous rank's; `wait` returns that."""

    def __init__(self, x: Tensor, axis: Axis):
        self.device, self.timeout = x.device, axis.timeout
        self.sent = x.cpu() if axis.staged else x.contiguous()
        self.received, self.works = start_ring_exchange(self.sent, axis)

    def wait(self) -> Tensor:
        for work in self.works:
            timed_wait(work.wait, self.timeout)
        return self.received.to(self.device)


# ---- full tensors --------------------------------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """A full tensor on the CPU. Collective if it is sharded: all its ranks must call it, in the same order."""
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
    """A hash of the bits of a float32 or float64 tensor on the CPU."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# ---- host staging ---------------------------------------------------------------------------------------------------
# If ranks share a GPU: NCCL refuses that, and gloo gathers, scatters and sends from host memory only.
#
# So these collectives go through a copy on the host: a slow way to try a layout on one GPU, with the same results.


# torch 2.13 has new names for them and warns of the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
staged_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class StagedWork(Protocol):
    def wait(self) -> Any: ...


class _HostWork:
    """A collective between host tensors; `wait` copies the result to the GPU."""

    def __init__(self, work: StagedWork, host: Tensor, out: Tensor):
        self.work, self.host, self.out = work, host, out

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.host)


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> StagedWork:
    """Start the sum over the axis of this rank's part of x; `out` may be that part of x itself."""
    return _start(_reduce_scatter, out, x, axis)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> StagedWork:
    """Start gathering x of all ranks; x may be this rank's part of `out` itself."""
    return _start(staged_all_gather, out, x, axis)


def _start(collective: Any, out: Tensor, x: Tensor, axis: Axis) -> StagedWork:
    if not axis.staged:
        return collective(out, x, group=axis.group, async_op=True)
    host = torch.empty_like(out, device="cpu")
    return _HostWork(collective(host, x.cpu(), group=axis.group, async_op=True), host, out)


def stage_through_host(module: FSDPModule) -> None:
    """Let FSDP2 stage its collectives through host memory, too."""
    module.set_custom_all_gather(_HostAllGather())
    module.set_custom_reduce_scatter(_HostReduceScatter())


def _by_host(collective: Any, out: Tensor, x: Tensor, **options: Any) -> None:
    host = torch.empty_like(out, device="cpu")
    collective(host, x.cpu(), **options)
    out.copy_(host)


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _HostAllGather(_Allocates, AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        _by_host(staged_all_gather, output_tensor, input_tensor, group=group)


class _HostReduceScatter(_Allocates, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        _by_host(_reduce_scatter, output_tensor, input_tensor, group=group, op=op)


class HookedReduceScatter(_Allocates, ReduceScatter):
    """FSDP2's reduce-scatter of gradients. A hook gets them first; if it returns True, they are not reduced."""

    def __init__(self, hook: Callable[[Tensor], bool], staged: bool):
        self.hook, self.host = hook, _HostReduceScatter() if staged else None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self.hook(input_tensor):
            return None
        if self.host is not None:
            return self.host(output_tensor, input_tensor, group, op, async_op)
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


# ---- peer errors ----------------------------------------------------------------------------------------------------
# Peers that died or do not answer: torch's errors, with the rank that waited, in what, and for whom.


def who(mesh: Mesh) -> str:
    """This rank and its coordinates in the mesh: 'rank 5 (dp 1, pp 0)'."""
    place = mesh.layout.place(mesh.world.rank)
    return f"rank {mesh.world.rank} ({place})" if place else "rank 0"


def others(*axes: Axis) -> str:
    """The other ranks of some axes, by their numbers in the world: 'ranks 0, 3 (dp, embedding)'."""
    wide = [axis for axis in axes if axis.size > 1]
    ranks = sorted({rank for axis in wide for rank in axis.ranks} - {dist.get_rank()})
    names = ", ".join(dict.fromkeys(axis.name for axis in wide))
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))} ({names})"


@contextmanager
def waiting(what: str, mesh: Mesh, *axes: Axis) -> Iterator[None]:
    """A context around collectives over some axes: if a peer is lost, the error says what waited for whom."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if (why := lost_peer(error)) is None:
            raise
        waited = f"waited {time.monotonic() - start:.1f} s for {others(*axes)}"
        raise PeerLost(f"{who(mesh)}: {what} {waited}: {why}") from error
