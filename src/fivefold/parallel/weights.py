"""Weights: one rank's part of a model's parameters, and where it lies in the full ones."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fivefold.layout.sharding import Box, Grouping, LocalParam, held
from fivefold.model.layers import accum_dtype
from fivefold.parallel.buckets import BackwardPart, Reducer
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.spec.model import ModelSpec

GradHook = Callable[[str, Tensor], None]


class Weights(Protocol):
    """A model's weights on this rank: in full precision for the optimizer, in the compute dtype for the model.

    `ZeroBuckets` and `FullySharded` inherit what they share from here.
    """

    mesh: Mesh
    local_params: dict[str, LocalParam]
    masters: dict[str, nn.Parameter]
    """By global name, this rank's shard in full precision. `finish_grad_sync` sets `grad`, `sync_params` deletes it."""
    always_split: bool
    """Whether every backward pass must come in two halves, because some passes of this schedule do."""
    reshard_after_forward: bool
    """Whether the model's weights are there only while a pass of theirs runs."""
    reducer: Reducer
    grad_hook: GradHook | None = None
    """Is told of the gradients of a step's first microbatch as they come, before ranks add theirs up."""
    microbatch_number: int = 0
    """The microbatch of the backward pass that runs."""
    replaying: bool = False
    """Whether gradients go to `grad_hook` and nowhere else."""

    def microbatch(self, last: bool, stage: int = 0, part: BackwardPart = "all") -> AbstractContextManager[None]:
        """Around the backward pass of one microbatch through one of this rank's stages, whole or half; `last`: no
        other will follow in this step."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, from autograd or from a weight-gradient pass of its own."""
        if not self.call_grad_hook(name, gradient):
            self.reducer.add(name, gradient)

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        """From here on `grad_hook` is told of gradients."""
        self.grad_hook = grad_hook

    def call_grad_hook(self, name: str, gradient: Tensor) -> bool:
        """Show the gradient to `grad_hook`; True if nothing else is to be done with it, as in a replay."""
        if self.grad_hook is not None and self.microbatch_number == 0:
            self.grad_hook(name, gradient)
        return self.replaying

    @contextmanager
    def replay_context(self) -> Iterator[None]:
        """Around passes whose gradients are looked at and not learned from, before those of a step begin."""
        self.replaying = True
        self.drop()
        try:
            yield
        finally:
            self.replaying = False
            self.drop()

    def drop(self) -> None:
        """Drop gradients that autograd or FSDP2 has accumulated, which nothing here could prevent."""

    def finish_grad_sync(self) -> None:
        """After the last microbatch: the masters' gradients are sums over all ranks that hold the parameter."""

    def compute_copies(self) -> dict[str, Tensor]:
        """The model's weights that are rounded copies of this rank's masters, and that nobody else has a part in."""
        return {}

    def sync_params(self, rounded: frozenset[str] = frozenset()) -> None:
        """After the masters have changed: the model's weights follow, at the latest when its forward needs them.

        Those that are `rounded` have followed already.
        """

    def ready(self) -> None:
        """Wait until the model's own weights are the synced ones, for whoever reads them without a forward."""

    def gradient_memory(self) -> Iterator[Tensor]:
        """Memory of gradients that is held right now."""
        ...

    def compute_memory(self) -> Iterable[Tensor]:
        """Memory of the weights that the model computes with, as far as it is held right now."""
        ...

    def sharded(self, param: LocalParam) -> bool:
        """Whether its master is the share of rows that ZeRO gives to this rank, or all that it computes with."""
        ...

    def fsdp(self, param: LocalParam | Grouping) -> Axis:
        """The ranks that ZeRO divides it over."""
        return getattr(self.mesh, param.fsdp_axis)

    def replicate_axes(self, name: str, *, of_weight: bool = False) -> list[str]:
        """The axes whose ranks hold the same bits of a master; `of_weight`: of the weight that the model computes
        with."""
        param = self.local_params[name]
        axes = ["replicate"] if self.sharded(param) and not of_weight else ["replicate", param.fsdp_axis]
        axes += ["tp"] if param.tp.dim is None else []
        return axes + (["embedding"] if param.parameter.tied else [])

    def copies(self, name: str) -> tuple[int, int]:
        """Which copy this rank's shard is, and of how many: in sums over the world the first one counts."""
        axes = [getattr(self.mesh, axis) for axis in self.replicate_axes(name)]
        number = 0
        for axis in axes:
            number = number * axis.size + axis.rank
        return number, math.prod(axis.size for axis in axes)

    def shared(self, param: LocalParam) -> bool:
        """Whether the other end of the pipeline holds a copy, whose gradients are added to this one's."""
        return param.parameter.tied and self.mesh.embedding.size > 1

    def block(self, name: str) -> Box:
        """The part of the full parameter that this rank's master is."""
        param = self.local_params[name]
        zero = self.fsdp(param)
        return param.share(zero.size, zero.rank) if self.sharded(param) else param.box

    def as_dtensor(self, name: str, local: Tensor) -> Tensor:
        """A shard that is shaped like the master, as part of the full parameter: a DTensor over zero x tp, or of
        experts over efsdp x ep."""
        param, mesh = self.local_params[name], self.mesh
        if mesh.world.size == 1:
            return local
        inner: Axis = getattr(mesh, param.tp.axis)
        over_tp: Placement = Replicate() if param.tp.dim is None or inner.size == 1 else Shard(param.tp.dim)
        over_zero: Placement = Replicate()
        if self.sharded(param):
            # The rows are cut over tp first and over zero second, though zero is the outer axis of the mesh.
            over_zero = _StridedShard(0, split_factor=inner.size) if over_tp == Shard(0) else Shard(0)
        shape = torch.Size(param.parameter.shape)
        stride = torch.empty(shape, device="meta").stride()
        submesh = mesh.submesh(param.fsdp_axis, param.tp.axis)
        return DTensor.from_local(local, submesh, [over_zero, over_tp], run_check=False, shape=shape, stride=stride)

    def buffers(self) -> Iterator[Tensor]:
        """Memory of gradients that is held between steps."""
        for bucket in self.reducer.buckets:
            yield from bucket.buffers()

    def resident(self) -> dict[str, int]:
        """Bytes of parameters, gradients and masters held right now; a master that is its parameter counts once."""
        seen: set[int] = set()
        return {
            "parameters": _bytes(self.compute_memory(), seen),
            "gradients": _bytes(self.gradient_memory(), seen),
            "masters": _bytes(self.masters.values(), seen),
        }


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the memory behind `tensors`, each piece of memory once; `seen` are the pieces counted already."""
    total = 0
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if memory._cdata not in seen:
            seen.add(memory._cdata)
            total += memory.nbytes()
    return total


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; without history."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def register_grad_hook(parameter: nn.Parameter, param: LocalParam, add: GradHook) -> None:
    """Hand every gradient of a parameter to `add`, a method, as it comes.

    Weakly: Python's collector does not see through a parameter that PyTorch holds as well, and weights that nobody
    uses any more would stay for ever, with the threads of their groups.
    """
    weak = WeakMethod(add)

    def hook(parameter: Tensor) -> None:
        gradient, add = parameter.grad, weak()
        parameter.grad = None
        assert add is not None  # a gradient comes to weights that are in use
        if gradient is None:
            return  # it was deferred, and will be added by whoever computes it
        if isinstance(gradient, DTensor) and gradient.placements[0].is_partial() != param.tp.partial:
            raise RuntimeError(f"the gradient of {param.name} came as {gradient.placements[0]} over tp")
        add(param.name, local_of(gradient))

    parameter.register_post_accumulate_grad_hook(hook)


def to_empty(model: nn.Module, held: dict[str, LocalParam], compute: torch.dtype, device: torch.device) -> None:
    """Give the model new, empty parameters on a device, in the compute dtype; those that are never rounded in the
    accumulate dtype.

    As `model.to(dtype).to_empty(device=device)`, which swaps tensors in place; those of a dry run refuse that.
    """
    for owner, module in model.named_modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            dtype = accum_dtype(compute) if held[f"{owner}.{name}"].parameter.exact else compute
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
    return {name: param for name, param in held(spec, mesh.layout, mesh.tp.rank, ep).items() if name in names}
