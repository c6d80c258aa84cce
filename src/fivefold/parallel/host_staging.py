"""Ranks that share a GPU: NCCL refuses them, and gloo gathers, scatters and sends from host memory only.

So these go through a copy on the host. It is the slow way of trying a layout on one GPU, and changes no result.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fivefold.parallel.mesh import Axis

# torch 2.13 has new names for them and warns of the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    def wait(self) -> Any: ...


class _Landing:
    """A collective between host tensors whose result still has to go to the GPU."""

    def __init__(self, work: Work, host: Tensor, out: Tensor):
        self.work, self.host, self.out = work, host, out

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.host)


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> Work:
    """Start the sum over the axis of this rank's part of x; `out` may be that part of x itself."""
    return _started(_reduce_scatter, out, x, axis)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> Work:
    """Start gathering x of all ranks; x may be this rank's part of `out` itself."""
    return _started(all_gather, out, x, axis)


def _started(collective: Any, out: Tensor, x: Tensor, axis: Axis) -> Work:
    if not axis.staged:
        return collective(out, x, group=axis.group, async_op=True)
    host = torch.empty_like(out, device="cpu")
    return _Landing(collective(host, x.cpu(), group=axis.group, async_op=True), host, out)


def stage(module: FSDPModule) -> None:
    """Let FSDP2 do the same."""
    module.set_custom_all_gather(_HostGather())
    module.set_custom_reduce_scatter(_HostScatter())


def _by_host(collective: Any, out: Tensor, x: Tensor, **options: Any) -> None:
    host = torch.empty_like(out, device="cpu")
    collective(host, x.cpu(), **options)
    out.copy_(host)


class _Temporary:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _HostGather(_Temporary, AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        _by_host(all_gather, output_tensor, input_tensor, group=group)


class _HostScatter(_Temporary, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        _by_host(_reduce_scatter, output_tensor, input_tensor, group=group, op=op)


class Heard(_Temporary, ReduceScatter):
    """FSDP2's sum of gradients, of which somebody is told first; if that says so, it is not made."""

    def __init__(self, tell: Callable[[Tensor], bool], staged: bool):
        self.tell, self.host = tell, _HostScatter() if staged else None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self.tell(input_tensor):
            return None
        if self.host is not None:
            return self.host(output_tensor, input_tensor, group, op, async_op)
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
