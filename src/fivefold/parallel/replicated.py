"""ZeRO 0, 1 and 2: every rank computes with whole weights; gradients and optimizer state are whole or sharded.

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
from fivefold.parallel.buckets import Bucket, BackwardPart, Reducer, slots_of
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import GradHook, Weights, stage_params, register_grad_hook, local_of, to_empty
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BOTTOM, TOP

_AHEAD = 2  # stage 2: buckets of new weights on their way at a time, each in a buffer of its own


class LocalGrads:
    """Parameters in whose gradients no other rank has a part. The gradients are final as they come, and need no buffer.

    The master takes each one over, widened where needed; where the optimizer reads narrow ones, a first one stays as it
    is: widened it would say no more, and take longer to write and read. On a single device that goes for all.
    """

    def __init__(self, weights: dict[str, Tensor], masters: dict[str, nn.Parameter], device: torch.device):
        self.weights, self.masters = weights, masters
        # PyTorch's own kernels of optimizers, which a CPU has, take gradients of the masters' dtype.
        self.narrow = device.type == "cuda" and hasattr(torch.Tensor, "grad_dtype")
        for master in masters.values() if self.narrow else ():
            master.grad_dtype = None  # any

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        master = self.masters[name]
        if master.grad is None:
            master.grad = gradient if self.narrow else _widened(gradient, master)
        else:
            master.grad = _widened(master.grad, master).add_(gradient)

    def hand_over(self) -> None:
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


def _widened(gradient: Tensor, master: nn.Parameter) -> Tensor:
    if gradient.dtype == master.dtype:
        return gradient
    wide = torch.empty_like(master)
    torch._foreach_copy_([wide], [gradient])  # on a GPU three times as fast as `to`
    return wide


class Replicated(Weights):
    reshard_after_forward = False

    def __init__(
        self,
        stages: Sequence[nn.Module],
        spec: ModelSpec,
        mesh: Mesh,
        compute: torch.dtype,
        seed: int,
        minimum: int = MINIMUM,
        split: bool = False,
    ):
        """`split`: linears report their gradients by `add`, in weight-gradient passes of their own."""
        self.mesh, self.halves = mesh, False  # a bucket takes gradients of either kind of pass
        per_stage = [stage_params(model, spec, mesh) for model in stages]
        self.local_params = {name: one for held in per_stage for name, one in held.items()}
        for model, held in zip(stages, per_stage, strict=True):
            to_empty(model, held, compute, mesh.device)
        self.parameters = {name: p for model in stages for name, p in model.named_parameters()}
        self.weights = {name: local_of(p) for name, p in self.parameters.items()}
        self.masters = {name: self._draw(spec, one, seed) for name, one in self.local_params.items()}
        # A bucket never spans stages, which finish at different times; a tied embedding is the first stage's.
        seen: set[str] = set()
        narrow = mesh.layout.zero > 0 and compute != accum_dtype(compute)
        groups: list[tuple[int, Grouping]] = []
        for number, held in enumerate(per_stage):
            fresh = [one for name, one in held.items() if name not in seen]
            seen |= held.keys()
            groups += [(number, group) for group in buckets(fresh, minimum, split, mesh.ends.size > 1, narrow)]
        # Nobody to shard over: only gradients that others have a part in need a bucket.
        alone = [not (group.partial or group.shared or self.zero(group).size > 1) for _, group in groups]
        unsharded = [name for (_, group), lonely in zip(groups, alone, strict=True) if lonely for name in group.names]
        groups = [pair for pair, lonely in zip(groups, alone, strict=True) if not lonely]
        self.unsharded = LocalGrads(
            {name: self.weights[name] for name in unsharded},
            {name: self.masters[name] for name in unsharded},
            mesh.device,
        )
        self.buckets = [self._bucket(group, compute) for _, group in groups]
        self.stage = max((bucket.stage for bucket in self.buckets), default=0)
        self.reducer = Reducer(self.buckets, groups)
        # Forward meets the stages in order; within a stage, buckets stand in backward's.
        order = sorted(range(len(groups)), key=lambda index: (groups[index][0], -index))
        self.forward_order = [self.buckets[index] for index in order]
        self.unsent: deque[Bucket] = deque()  # buckets whose new weights are still to be gathered, in forward's order
        for name in self.local_params:
            self._listen(name)
        if self.stage:
            for number, model in enumerate(stages):
                mine = [(b, group) for b, (of, group) in zip(self.buckets, groups, strict=True) if of == number]
                self._set_gates(model, mine)

    # ---- making --------------------------------------------------------------------------------------------------

    def stage_of(self, one: LocalParam | Grouping) -> int:
        return self.mesh.layout.zero if self.zero(one).size > 1 else 0  # nothing to shard over: nothing is

    def sharded(self, one: LocalParam) -> bool:
        return self.stage_of(one) > 0

    def _draw(self, spec: ModelSpec, one: LocalParam, seed: int) -> nn.Parameter:
        """Fill the weight, by way of full precision, and return this rank's master of it."""
        weight = self.weights[one.name]
        mine, above = self.block(one.name)[0], one.box[0].start
        rows = slice(mine.start - above, mine.stop - above)
        exact = weight if weight.dtype == accum_dtype(weight.dtype) else torch.empty_like(weight, dtype=torch.float32)
        init_param(spec, one.parameter, exact, seed, one.box)
        if exact is weight:
            parameter = self.parameters[one.name]
            own = self.zero(one).size == 1 and not isinstance(parameter, DTensor) and not self.shared(one)
            return parameter if own else nn.Parameter(weight[rows])
        weight.copy_(exact)
        return nn.Parameter(exact[rows].clone() if self.sharded(one) else exact)

    def _bucket(self, group: Grouping, compute: torch.dtype) -> Bucket:
        zero, stage = self.zero(group), self.stage_of(group)
        slots = slots_of(group, self.weights, self.masters, zero.size if stage else 1)
        also = self.mesh.tp if group.partial else self.mesh.ends if group.shared else None
        return Bucket(slots, zero, also, stage, accum_dtype(compute) if group.exact else compute)

    def _listen(self, name: str) -> None:
        if self.parameters[name] is not self.masters[name]:  # else autograd accumulates where the optimizer looks
            register_grad_hook(self.parameters[name], self.local_params[name], self.add)

    def _set_gates(self, model: nn.Module, buckets: list[tuple[Bucket, Grouping]]) -> None:
        """A module's forward waits for the weights that are needed from there on."""
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
            self.unsharded.add(name, gradient)

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        super().set_grad_hook(grad_hook)
        for name, parameter in self._own():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it was put off
            self.call_grad_hook(name, parameter.grad)

    def drop(self) -> None:
        for _, parameter in self._own():
            parameter.grad = None

    def _own(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that are their masters: autograd accumulates where the optimizer looks."""
        return ((name, parameter) for name, parameter in self.parameters.items() if parameter is self.masters[name])

    def finish_grad_sync(self) -> None:
        self.reducer.finish()
        self.unsharded.hand_over()

    # ---- weights -------------------------------------------------------------------------------------------------

    def compute_copies(self) -> dict[str, Tensor]:
        return self.unsharded.compute_copies()

    def sync_params(self, rounded: frozenset[str] = frozenset()) -> None:
        for bucket in self.buckets:
            bucket.zero_grad()
        self.unsharded.sync_params(rounded)
        self.unsent = deque(self.forward_order)
        self._send(_AHEAD if self.stage == 2 else len(self.buckets))

    def _send(self, most: int) -> None:
        """Start gathers, in order, while fewer than `most` are under way."""
        while self.unsent and sum(bucket.gathering is not None for bucket in self.buckets) < most:
            self.unsent.popleft().send_weights()

    def _receive(self, bucket: Bucket, *_: object) -> None:
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
        yield from (master.grad for master in self.unsharded.masters.values() if master.grad is not None)

    def compute_memory(self) -> Iterable[Tensor]:
        return self.weights.values()
