"""Weights: one rank's shard of a model's parameters, and its place in the full ones."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fivefold.layout.bucket_plan import BucketParams
from fivefold.layout.sharding import Box, LocalParam, local_params
from fivefold.model.layers import accum_dtype
from fivefold.parallel.buckets import BackwardPart, Reducer
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.spec.model import ModelSpec

GradHook = Callable[[str, Tensor], None]


class Weights(Protocol):
    """A model's weights on this rank: in full precision for the optimizer, in the compute dtype for the model.

    `ZeroBuckets` (ZeRO 0 to 2, `zero.py`) and `FullySharded` (ZeRO 3, `fsdp.py`) inherit what they share from here.
    """

    mesh: Mesh
    local_params: dict[str, LocalParam]
    masters: dict[str, nn.Parameter]
    """This rank's full-precision shards, by global name. `finish_grad_sync` sets `grad`, `sync_params` deletes it."""
    always_split: bool
    """Whether every backward pass must run as two halves (I and W), because some passes of this schedule do."""
    reshard_after_forward: bool
    """Whether a block's weights are gathered for each of its passes, and released after it."""
    reducer: Reducer
    grad_hook: GradHook | None = None
    """Called with each gradient of a step's first microbatch, before it is reduced."""
    received: set[str]
    """The names that `add` has had gradients of; autograd and FSDP2 accumulate others by themselves."""
    microbatch_number: int = 0
    """Index of the microbatch whose backward pass is running."""
    replaying: bool = False
    """Whether gradients go to `grad_hook` and nowhere else."""

    def microbatch(self, *, last: bool, stage: int = 0, part: BackwardPart = "all") -> AbstractContextManager[None]:
        """A context around the backward pass of one microbatch through one of this rank's pipeline stages (its index
        among them), or around a `part` of it; `last`: the last one of this step."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, from autograd or from a weight-gradient pass."""
        self.received.add(name)
        if not self.call_grad_hook(name, gradient):
            self.reducer.add(name, gradient)

    def has_gradient(self, name: str) -> bool:
        """Whether any has come of a parameter: asked between the first step's passes and `finish_grad_sync`."""
        ...

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        """Call `grad_hook` with gradients from now on."""
        self.grad_hook = grad_hook

    def call_grad_hook(self, name: str, gradient: Tensor) -> bool:
        """Call `grad_hook`, if there is one; True if nothing else is to be done with the gradient, as in a replay."""
        if self.grad_hook is not None and self.microbatch_number == 0:
            self.grad_hook(name, gradient)
        return self.replaying

    @contextmanager
    def replay_context(self) -> Iterator[None]:
        """A context around passes whose gradients go to `grad_hook` alone; before the passes of a step."""
        self.replaying = True
        self.discard_grads()
        try:
            yield
        finally:
            self.replaying = False
            self.discard_grads()

    def discard_grads(self) -> None:
        """Discard gradients that autograd or FSDP2 has accumulated by itself."""

    def finish_grad_sync(self) -> None:
        """After the last microbatch: set the masters' gradients to the sums over all ranks that hold the parameter."""

    def compute_copies(self) -> dict[str, Tensor]:
        """The model's weights that are low-precision copies of this rank's masters, and need no all-gather."""
        return {}

    def sync_params(self, already_cast: frozenset[str] = frozenset()) -> None:
        """After the optimizer's step: update the model's weights, at the latest when its forward needs them.

        Those `already_cast` have been written by the optimizer's kernel.
        """

    def wait_params(self) -> None:
        """Wait until the model's weights are up to date, before they are read outside of a forward."""

    def gradient_memory(self) -> Iterator[Tensor]:
        """Gradients that are allocated now."""
        ...

    def compute_memory(self) -> Iterable[Tensor]:
        """The weights that the model computes with, as far as they are allocated now."""
        ...

    def sharded(self, param: LocalParam) -> bool:
        """Whether its master is this rank's share of rows under ZeRO, not all that the rank computes with."""
        ...

    def fsdp_axis_of(self, param: LocalParam | BucketParams) -> Axis:
        """The axis that ZeRO shards it over."""
        return getattr(self.mesh, param.fsdp_axis)

    def replicate_axes(self, name: str, *, of_weight: bool = False) -> list[str]:
        """The axes whose ranks hold the same bits of a master; `of_weight`: of the weight that the model computes
        with."""
        param = self.local_params[name]
        axes = ["replicate"] if self.sharded(param) and not of_weight else ["replicate", param.fsdp_axis]
        axes += ["tp"] if param.tp.dim is None else []
        return axes + (["embedding"] if param.parameter.tied else [])

    def copies(self, name: str, *, of_weight: bool = False) -> tuple[int, int]:
        """The index of this rank's copy of a master, and the number of copies: sums over the world count copy 0.
        `of_weight`: of the weight that the model computes with."""
        axes = [getattr(self.mesh, axis) for axis in self.replicate_axes(name, of_weight=of_weight)]
        index = 0
        for axis in axes:
            index = index * axis.size + axis.rank
        return index, math.prod(axis.size for axis in axes)

    def has_tied_copy(self, param: LocalParam) -> bool:
        """Whether the first and the last stage both hold it, on two ranks: their gradients are added up."""
        return param.parameter.tied and self.mesh.embedding.size > 1

    def master_box(self, name: str) -> Box:
        """The block of the full parameter that this rank's master holds."""
        param = self.local_params[name]
        axis = self.fsdp_axis_of(param)
        return param.share(axis.size, axis.rank) if self.sharded(param) else param.box

    def as_dtensor(self, name: str, local: Tensor) -> Tensor:
        """A tensor shaped like the master, as a shard of the full parameter: a DTensor over fsdp x tp, or for experts
        over efsdp x ep."""
        param, mesh = self.local_params[name], self.mesh
        if mesh.world.size == 1:
            return local
        inner: Axis = getattr(mesh, param.tp.axis)
        over_tp: Placement = Replicate() if param.tp.dim is None or inner.size == 1 else Shard(param.tp.dim)
        over_fsdp: Placement = Replicate()
        if self.sharded(param):
            # Rows are sharded over tp first and over fsdp second, though fsdp is the outer axis of the mesh.
            over_fsdp = _StridedShard(0, split_factor=inner.size) if over_tp == Shard(0) else Shard(0)
        shape = torch.Size(param.parameter.shape)
        stride = torch.empty(shape, device="meta").stride()
        submesh = mesh.submesh(param.fsdp_axis, param.tp.axis)
        return DTensor.from_local(local, submesh, [over_fsdp, over_tp], run_check=False, shape=shape, stride=stride)

    def buffers(self) -> Iterator[Tensor]:
        """Gradient buffers that stay allocated between steps."""
        for bucket in self.reducer.buckets:
            yield from bucket.buffers()

    def resident(self) -> dict[str, int]:
        """Bytes of parameters, gradients and masters allocated now; a master that is its parameter counts once."""
        seen: set[int] = set()
        return {
            "parameters": _bytes(self.compute_memory(), seen),
            "gradients": _bytes(self.gradient_memory(), seen),
            "masters": _bytes(self.masters.values(), seen),
        }


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind `tensors`, each counted once; `seen` are those counted before."""
    total = 0
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if memory._cdata not in seen:
            seen.add(memory._cdata)
            total += memory.nbytes()
    return total


def local_of(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself; detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def register_grad_hook(parameter: nn.Parameter, param: LocalParam, add: GradHook) -> None:
    """Call `add`, a method, with every gradient of a parameter once autograd has accumulated it.

    By a weak reference: Python's garbage collector does not see through a parameter that PyTorch references as well,
    and unused weights would never be freed, nor the threads of their process groups.
    """
    weak = WeakMethod(add)

    def hook(parameter: Tensor) -> None:
        gradient, add = parameter.grad, weak()
        parameter.grad = None
        assert add is not None  # weights that get gradients are in use
        if gradient is None:
            return  # it is deferred: the weight-gradient pass adds it
        if isinstance(gradient, DTensor) and gradient.placements[0].is_partial() != param.tp.partial:
            raise RuntimeError(f"the gradient of {param.name} came as {gradient.placements[0]} over tp")
        add(param.name, local_of(gradient))

    parameter.register_post_accumulate_grad_hook(hook)


def recast_empty(model: nn.Module, params: dict[str, LocalParam], compute: torch.dtype, device: torch.device) -> None:
    """Give the model new, empty parameters on a device: in the compute dtype, or in the accumulate dtype those that
    stay in full precision.

    Like `model.to(dtype).to_empty(device=device)`, but without swapping tensors in place, which fake tensors refuse.
    """
    for owner, module in model.named_modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            dtype = accum_dtype(compute) if params[f"{owner}.{name}"].parameter.full_precision else compute
            new = torch.empty(local_of(old).shape, dtype=dtype, device=device)
            if isinstance(old, DTensor):
                new = DTensor.from_local(
                    new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
                )
            setattr(module, name, nn.Parameter(new))


def stage_params(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> dict[str, LocalParam]:
    """The parameters of one of this rank's stages."""
    names = {name for name, _ in model.named_parameters()}
    ep = mesh.ep.rank if spec.experts is not None else 0
    return {name: param for name, param in local_params(spec, mesh.layout, mesh.tp.rank, ep).items() if name in names}
