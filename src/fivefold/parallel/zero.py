"""ZeRO 0, 1 and 2: every rank computes with full weights; gradients and optimizer state are replicated or sharded.

A hook on every parameter moves its new gradient into its bucket. Buckets are reduced in a fixed order, the same on all
ranks, each as soon as it and those before it are final, while backward goes on. After the optimizer's step (stages 1
and 2) the new weights are gathered while the next forward runs: a block waits for its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.layout.sharding import MINIMUM, Grouping, LocalParam, buckets, layers_of
from fivefold.model.init import init_param
from fivefold.model.layers import accum_dtype
from fivefold.parallel.buckets import BackwardPart, Bucket, Reducer, slots_of
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import GradHook, Weights, local_of, register_grad_hook, stage_params, to_empty
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BOTTOM, TOP

_AHEAD = 2  # stage 2: buckets of new weights on their way at a time, each in a buffer of its own


class LocalGrads:
    """Parameters in whose gradients no other rank has a part. The gradients are final as they come, and need no buffer.

    They become the master's gradient, cast to its dtype. Where the optimizer also reads low-precision gradients, that
    of a first microbatch stays as it is: a cast would add no information, and take longer to write and read. On a
    single device all parameters are such.
    """

    def __init__(self, weights: dict[str, Tensor], masters: dict[str, nn.Parameter], device: torch.device):
        self.weights, self.masters = weights, masters
        # PyTorch's own kernels of optimizers, which a CPU has, take gradients of the masters' dtype.
        self.low_precision = device.type == "cuda" and hasattr(torch.Tensor, "grad_dtype")
        for master in masters.values() if self.low_precision else ():
            master.grad_dtype = None  # any

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        master = self.masters[name]
        if master.grad is None:
            master.grad = gradient if self.low_precision else _upcast(gradient, master)
        else:
            master.grad = _upcast(master.grad, master).add_(gradient)

    def set_master_grads(self) -> None:
        """Zeros where none came."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def sync_params(self, rounded: frozenset[str]) -> None:
        for master in self.masters.values():
            master.grad = None
        stale = [name for name in self.compute_copies() if name not in rounded]
        if stale:
            torch._foreach_copy_([self.weights[name] for name in stale], [self.masters[name] for name in stale])

    def compute_copies(self) -> dict[str, Tensor]:
        """The model's weights that are rounded copies of their masters."""
        return {name: weight for name, weight in self.weights.items() if weight.dtype != self.masters[name].dtype}


def _upcast(gradient: Tensor, master: nn.Parameter) -> Tensor:
    """In the dtype of its master."""
    if gradient.dtype == master.dtype:
        return gradient
    cast = torch.empty_like(master)
    torch._foreach_copy_([cast], [gradient])  # on a GPU three times as fast as `to`
    return cast


class ZeroBuckets(Weights):
    reshard_after_forward = False

    def __init__(
        self,
        stages: Sequence[nn.Module],
        spec: ModelSpec,
        mesh: Mesh,
        compute: torch.dtype,
        seed: int,
        *,
        minimum: int = MINIMUM,
        split: bool = False,
    ):
        """`split`: linears report their gradients by `add`, in weight-gradient passes of their own."""
        self.mesh, self.always_split = mesh, False  # a bucket takes gradients of either kind of pass
        per_stage = [stage_params(model, spec, mesh) for model in stages]
        self.local_params = {name: param for params in per_stage for name, param in params.items()}
        for model, params in zip(stages, per_stage, strict=True):
            to_empty(model, params, compute, mesh.device)
        self.parameters = {name: p for model in stages for name, p in model.named_parameters()}
        self.weights = {name: local_of(p) for name, p in self.parameters.items()}
        self.masters = {name: self._init_master(spec, param, seed) for name, param in self.local_params.items()}
        # A bucket never spans stages, which finish at different times; a tied embedding is the first stage's.
        seen: set[str] = set()
        narrow = mesh.layout.zero > 0 and compute != accum_dtype(compute)
        groups: list[tuple[int, Grouping]] = []
        for number, params in enumerate(per_stage):
            new = [param for name, param in params.items() if name not in seen]
            seen |= params.keys()
            groups += [(number, group) for group in buckets(new, minimum, split, mesh.embedding.size > 1, narrow)]
        # Only gradients that other ranks have a part in need a bucket.
        local_names = [name for _, group in groups if not self._reduced(group) for name in group.names]
        groups = [(number, group) for number, group in groups if self._reduced(group)]
        self.local_grads = LocalGrads(
            {name: self.weights[name] for name in local_names},
            {name: self.masters[name] for name in local_names},
            mesh.device,
        )
        self.buckets = [self._bucket(group, compute) for _, group in groups]
        self.stage = max((bucket.stage for bucket in self.buckets), default=0)
        self.reducer = Reducer(self.buckets, groups)
        # Forward meets the stages in order; within a stage, buckets stand in backward's.
        order = sorted(range(len(groups)), key=lambda index: (groups[index][0], -index))
        self.forward_order = [self.buckets[index] for index in order]
        self.unsent: deque[Bucket] = deque()  # buckets whose new weights are still to be gathered, in forward's order
        for name, param in self.local_params.items():
            if self.parameters[name] is not self.masters[name]:  # else autograd accumulates where the optimizer looks
                register_grad_hook(self.parameters[name], param, self.add)
        if self.stage:
            for number, model in enumerate(stages):
                of_stage = [
                    (b, group) for b, (stage, group) in zip(self.buckets, groups, strict=True) if stage == number
                ]
                self._set_gates(model, of_stage)

    # ---- making --------------------------------------------------------------------------------------------------

    def stage_of(self, param: LocalParam | Grouping) -> int:
        """The ZeRO stage: 0 where there is nobody to shard over."""
        return self.mesh.layout.zero if self.fsdp(param).size > 1 else 0

    def sharded(self, param: LocalParam) -> bool:
        return self.stage_of(param) > 0

    def _reduced(self, group: Grouping) -> bool:
        """Whether other ranks have a part in its gradients."""
        return group.partial or group.shared or self.fsdp(group).size > 1

    def _init_master(self, spec: ModelSpec, param: LocalParam, seed: int) -> nn.Parameter:
        """Fill the weight, by way of full precision, and return this rank's master of it."""
        weight = self.weights[param.name]
        block, first = self.block(param.name)[0], param.box[0].start
        rows = slice(block.start - first, block.stop - first)
        exact = weight if weight.dtype == accum_dtype(weight.dtype) else torch.empty_like(weight, dtype=torch.float32)
        init_param(spec, param.parameter, exact, seed, param.box)
        if exact is weight:
            parameter = self.parameters[param.name]
            own = self.fsdp(param).size == 1 and not isinstance(parameter, DTensor) and not self.shared(param)
            return parameter if own else nn.Parameter(weight[rows])
        weight.copy_(exact)
        return nn.Parameter(exact[rows].clone() if self.sharded(param) else exact)

    def _bucket(self, group: Grouping, compute: torch.dtype) -> Bucket:
        zero, stage = self.fsdp(group), self.stage_of(group)
        slots = slots_of(group, self.weights, self.masters, zero.size if stage else 1)
        also_over = self.mesh.tp if group.partial else self.mesh.embedding if group.shared else None
        return Bucket(slots, zero, also_over, stage, accum_dtype(compute) if group.exact else compute)

    def _set_gates(self, model: nn.Module, buckets: list[tuple[Bucket, Grouping]]) -> None:
        """Let a module's forward wait for the weights that are needed from there on."""
        layers = layers_of(unit for _, group in buckets for unit in group.units)
        gates = {layer: f"layers.{layer}" for layer in layers}
        gates |= {BOTTOM: "", TOP: gates[layers[-1]] if layers else ""}
        for bucket, group in buckets:
            for gate in {gates[unit] for unit in group.units}:
                model.get_submodule(gate).register_forward_pre_hook(partial(self._receive, bucket))

    # ---- gradients -----------------------------------------------------------------------------------------------

    def microbatch(self, last: bool, stage: int = 0, part: BackwardPart = "all") -> AbstractContextManager[None]:
        return nullcontext() if self.replaying else self.reducer.microbatch(last, stage, part)

    def add(self, name: str, gradient: Tensor) -> None:
        """A gradient has come, from autograd or from a weight-gradient pass of its own; it may be the bucket's last."""
        if self.call_grad_hook(name, gradient):
            return
        if name in self.reducer.home:
            self.reducer.add(name, gradient)
        else:
            self.local_grads.add(name, gradient)

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        super().set_grad_hook(grad_hook)
        for name, parameter in self._own_masters():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it was deferred
            self.call_grad_hook(name, parameter.grad)

    def drop(self) -> None:
        for _, parameter in self._own_masters():
            parameter.grad = None

    def _own_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that are their own masters: autograd accumulates where the optimizer looks."""
        return ((name, parameter) for name, parameter in self.parameters.items() if parameter is self.masters[name])

    def finish_grad_sync(self) -> None:
        self.reducer.finish()
        self.local_grads.set_master_grads()

    # ---- weights -------------------------------------------------------------------------------------------------

    def compute_copies(self) -> dict[str, Tensor]:
        return self.local_grads.compute_copies()

    def sync_params(self, rounded: frozenset[str] = frozenset()) -> None:
        for bucket in self.buckets:
            bucket.zero_grad()
        self.local_grads.sync_params(rounded)
        self.unsent = deque(self.forward_order)
        self._send(limit=_AHEAD if self.stage == 2 else len(self.buckets))

    def _send(self, limit: int) -> None:
        """Start gathers, in order, while fewer than `limit` are under way."""
        while self.unsent and sum(bucket.gathering is not None for bucket in self.buckets) < limit:
            self.unsent.popleft().send_weights()

    def _receive(self, bucket: Bucket, *_: object) -> None:
        """Before a module's forward: its new weights are there, and those of the next buckets on their way."""
        while bucket in self.unsent:
            self.unsent.popleft().send_weights()
        bucket.receive_weights()
        self._send(_AHEAD)

    def ready(self) -> None:
        for bucket in self.forward_order:
            self._receive(bucket)

    # ---- memory --------------------------------------------------------------------------------------------------

    def gradient_memory(self) -> Iterator[Tensor]:
        yield from self.buffers()
        yield from (master.grad for master in self.local_grads.masters.values() if master.grad is not None)

    def compute_memory(self) -> Iterable[Tensor]:
        return self.weights.values()
