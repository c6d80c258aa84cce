"""ZeRO 0, 1 and 2. (ZeRO 3 and hybrid sharding are in `fsdp.py`.)

Parameters are replicated in the compute dtype. Stage 1 shards the masters and the optimizer state, stage 2 also the
gradients. A post-accumulate hook copies each gradient into its bucket. Buckets are reduced in one order on all ranks:
each once it and all earlier ones are complete, overlapped with backward. After the optimizer's step (stages 1 and 2)
the new weights are all-gathered, overlapped with the next forward: a block waits for its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.layout.bucket_plan import MIN_BUCKET_ELEMENTS, BucketParams, buckets, layers_of
from fivefold.layout.sharding import LocalParam
from fivefold.model.init import init_param
from fivefold.model.layers import accum_dtype
from fivefold.parallel.buckets import BackwardPart, Bucket, Reducer, slots_of
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import GradHook, Weights, local_of, recast_empty, register_grad_hook, stage_params
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT

# Stage 2: all-gathers of new weights in flight at a time, each with a buffer of its own. Stage 1 starts all at once.
_MAX_GATHERS_IN_FLIGHT = 2


class UnreducedGrads:
    """Parameters whose gradients need no reduction; they bypass the buckets. On one device all parameters do.

    A gradient becomes its master's `grad`, cast to the master's dtype. Where the optimizer also reads low-precision
    gradients, that of a first microbatch is not cast: it would gain no information, and take longer to write and read.
    """

    def __init__(self, params: dict[str, Tensor], masters: dict[str, nn.Parameter], device: torch.device):
        """`params`: the model's weights, in the compute dtype."""
        self.params, self.masters = params, masters
        # The CPU's optimizer kernels are PyTorch's own, which take gradients of the masters' dtype only.
        self.accepts_low_precision = device.type == "cuda" and hasattr(torch.Tensor, "grad_dtype")
        for master in masters.values() if self.accepts_low_precision else ():
            master.grad_dtype = None  # any

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        master = self.masters[name]
        if master.grad is None:
            master.grad = gradient if self.accepts_low_precision else _upcast(gradient, master)
        else:
            master.grad = _upcast(master.grad, master).add_(gradient)

    def set_master_grads(self) -> None:
        """Zeros for parameters that got no gradient."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def sync_params(self, already_cast: frozenset[str]) -> None:
        for master in self.masters.values():
            master.grad = None
        stale = [name for name in self.compute_copies() if name not in already_cast]
        if stale:
            torch._foreach_copy_([self.params[name] for name in stale], [self.masters[name] for name in stale])

    def compute_copies(self) -> dict[str, Tensor]:
        """The model's weights that are low-precision copies of their masters."""
        return {name: param for name, param in self.params.items() if param.dtype != self.masters[name].dtype}


def _upcast(gradient: Tensor, master: nn.Parameter) -> Tensor:
    """The gradient in the dtype of its master."""
    if gradient.dtype == master.dtype:
        return gradient
    cast = torch.empty_like(master)
    torch._foreach_copy_([cast], [gradient])  # on a GPU three times as fast as `to`
    return cast


class ZeroBuckets(Weights):
    """Weights replicated over the data-parallel ranks, with gradients reduced in buckets: ZeRO 0, 1 and 2."""

    reshard_after_forward = False

    def __init__(
        self,
        stages: Sequence[nn.Module],
        spec: ModelSpec,
        mesh: Mesh,
        compute_dtype: torch.dtype,
        seed: int,
        *,
        min_bucket_elements: int = MIN_BUCKET_ELEMENTS,
        split_backward: bool = False,
    ):
        """`split_backward`: weight-gradient passes of their own report the gradients of linears, by `add`."""
        self.mesh, self.always_split = mesh, False  # a bucket takes gradients of either kind of pass
        self.received = set()
        per_stage = [stage_params(model, spec, mesh) for model in stages]
        self.local_params = {name: param for params in per_stage for name, param in params.items()}
        for model, params in zip(stages, per_stage, strict=True):
            recast_empty(model, params, compute_dtype, mesh.device)
        self.parameters = {name: p for model in stages for name, p in model.named_parameters()}
        self.model_weights = {name: local_of(p) for name, p in self.parameters.items()}
        self.masters = {name: self._init_master(spec, param, seed) for name, param in self.local_params.items()}
        # A bucket never spans pipeline stages, which finish at different times; a tied embedding is the first stage's.
        seen: set[str] = set()
        low_precision_gather = mesh.layout.zero > 0 and compute_dtype != accum_dtype(compute_dtype)
        groups: list[tuple[int, BucketParams]] = []
        for stage_index, params in enumerate(per_stage):
            unseen = [param for name, param in params.items() if name not in seen]
            seen |= params.keys()
            of_stage = buckets(
                unseen,
                min_elements=min_bucket_elements,
                split_backward=split_backward,
                separate_tied=mesh.embedding.size > 1,
                low_precision=low_precision_gather,
            )
            groups += [(stage_index, group) for group in of_stage]
        unreduced = [name for _, group in groups if not self._needs_reduction(group) for name in group.names]
        groups = [(stage_index, group) for stage_index, group in groups if self._needs_reduction(group)]
        self.unreduced_grads = UnreducedGrads(
            {name: self.model_weights[name] for name in unreduced},
            {name: self.masters[name] for name in unreduced},
            mesh.device,
        )
        self.buckets = [self._bucket(group, compute_dtype) for _, group in groups]
        self.zero_stage = max((bucket.zero_stage for bucket in self.buckets), default=0)
        self.reducer = Reducer(self.buckets, groups)
        # Forward runs the stages in order; within a stage, buckets are in the order of backward.
        order = sorted(range(len(groups)), key=lambda index: (groups[index][0], -index))
        self.forward_order = [self.buckets[index] for index in order]
        self.pending_gathers: deque[Bucket] = deque()  # buckets whose all-gather is not started yet, in forward's order
        for name, param in self.local_params.items():
            if self.parameters[name] is not self.masters[name]:  # else autograd accumulates where the optimizer looks
                register_grad_hook(self.parameters[name], param, self.add)
        if self.zero_stage:
            for stage_index, model in enumerate(stages):
                pairs = zip(self.buckets, groups, strict=True)
                self._register_gather_hooks(model, [(b, group) for b, (index, group) in pairs if index == stage_index])

    # ---- construction ----------------------------------------------------------------------------------------------

    def zero_stage_of(self, param: LocalParam | BucketParams) -> int:
        """The ZeRO stage: 0 where its fsdp axis has one rank."""
        return self.mesh.layout.zero if self.fsdp_axis_of(param).size > 1 else 0

    def sharded(self, param: LocalParam) -> bool:
        return self.zero_stage_of(param) > 0

    def _needs_reduction(self, group: BucketParams) -> bool:
        """Whether gradients are summed over other ranks."""
        return group.partial or group.tied or self.fsdp_axis_of(group).size > 1

    def _init_master(self, spec: ModelSpec, param: LocalParam, seed: int) -> nn.Parameter:
        """Draw the weight in full precision, cast it to the compute dtype, and return this rank's master of it."""
        weight = self.model_weights[param.name]
        row_offset, rows = param.box[0].start, self.master_box(param.name)[0]
        own_rows = slice(rows.start - row_offset, rows.stop - row_offset)
        is_full_precision = weight.dtype == accum_dtype(weight.dtype)
        full_precision = weight if is_full_precision else torch.empty_like(weight, dtype=torch.float32)
        init_param(spec, param.parameter, full_precision, seed, param.box)
        if full_precision is weight:
            parameter = self.parameters[param.name]
            # A parameter whose gradient is also summed over tp (`partial`) is a DTensor, as all but experts are then.
            is_unshared = self.fsdp_axis_of(param).size == 1 and not self.has_tied_copy(param)
            is_its_own_master = is_unshared and not isinstance(parameter, DTensor)
            return parameter if is_its_own_master else nn.Parameter(weight[own_rows])
        weight.copy_(full_precision)
        return nn.Parameter(full_precision[own_rows].clone() if self.sharded(param) else full_precision)

    def _bucket(self, group: BucketParams, compute_dtype: torch.dtype) -> Bucket:
        fsdp_axis, zero_stage = self.fsdp_axis_of(group), self.zero_stage_of(group)
        slots = slots_of(group, self.model_weights, self.masters, fsdp_axis.size if zero_stage else 1)
        extra_reduce_axis = self.mesh.tp if group.partial else self.mesh.embedding if group.tied else None
        gather_dtype = accum_dtype(compute_dtype) if group.full_precision else compute_dtype
        return Bucket(slots, fsdp_axis, extra_reduce_axis, zero_stage, gather_dtype)

    def _register_gather_hooks(self, model: nn.Module, buckets_and_params: list[tuple[Bucket, BucketParams]]) -> None:
        """Let the forward of a bucket's first module wait for the bucket's all-gather."""
        layers = layers_of(unit for _, group in buckets_and_params for unit in group.units)
        modules = {layer: f"layers.{layer}" for layer in layers}
        # "" is the stage itself, which begins with the embedding. Functions read the weights of last norm and head, and
        # never call these modules, so no hook of their own would run: their weights are waited for at the last layer.
        modules |= {EMBEDDING_UNIT: "", HEAD_UNIT: modules[layers[-1]] if layers else ""}
        for bucket, group in buckets_and_params:
            for name in {modules[unit] for unit in group.units}:
                model.get_submodule(name).register_forward_pre_hook(partial(self._wait_all_gather, bucket))

    # ---- gradients -----------------------------------------------------------------------------------------------

    def microbatch(self, *, last: bool, stage: int = 0, part: BackwardPart = "all") -> AbstractContextManager[None]:
        return nullcontext() if self.replaying else self.reducer.microbatch(last, stage, part)

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, from autograd or from a weight-gradient pass; if it completes its bucket, reduce that."""
        self.received.add(name)
        if self.call_grad_hook(name, gradient):
            return
        if name in self.reducer.bucket_of:
            self.reducer.add(name, gradient)
        else:
            self.unreduced_grads.add(name, gradient)

    def has_gradient(self, name: str) -> bool:
        parameter = self.parameters[name]
        return name in self.received or (parameter is self.masters[name] and parameter.grad is not None)

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        super().set_grad_hook(grad_hook)
        for name, parameter in self._params_that_are_masters():
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad_accumulated, name))

    def _on_grad_accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it was deferred
            self.call_grad_hook(name, parameter.grad)

    def discard_grads(self) -> None:
        for _, parameter in self._params_that_are_masters():
            parameter.grad = None

    def _params_that_are_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that are their own masters: autograd accumulates where the optimizer looks."""
        return ((name, parameter) for name, parameter in self.parameters.items() if parameter is self.masters[name])

    def finish_grad_sync(self) -> None:
        self.reducer.finish()
        self.unreduced_grads.set_master_grads()

    # ---- weights -------------------------------------------------------------------------------------------------

    def compute_copies(self) -> dict[str, Tensor]:
        return self.unreduced_grads.compute_copies()

    def sync_params(self, already_cast: frozenset[str] = frozenset()) -> None:
        for bucket in self.buckets:
            bucket.zero_grad()
        self.unreduced_grads.sync_params(already_cast)
        self.pending_gathers = deque(self.forward_order)
        self._start_all_gathers(limit=_MAX_GATHERS_IN_FLIGHT if self.zero_stage == 2 else len(self.buckets))

    def _start_all_gathers(self, limit: int) -> None:
        """Start pending all-gathers, in order, while fewer than `limit` are in flight."""
        while self.pending_gathers and sum(bucket.gathering is not None for bucket in self.buckets) < limit:
            self.pending_gathers.popleft().start_all_gather()

    def _wait_all_gather(self, bucket: Bucket, *_: object) -> None:
        """A module's forward pre-hook: wait for its new weights, and prefetch those of the next buckets."""
        while bucket in self.pending_gathers:
            self.pending_gathers.popleft().start_all_gather()
        bucket.wait_all_gather()
        self._start_all_gathers(_MAX_GATHERS_IN_FLIGHT)

    def wait_params(self) -> None:
        for bucket in self.forward_order:
            self._wait_all_gather(bucket)

    # ---- memory --------------------------------------------------------------------------------------------------

    def gradient_memory(self) -> Iterator[Tensor]:
        yield from self.buffers()
        yield from (master.grad for master in self.unreduced_grads.masters.values() if master.grad is not None)

    def compute_memory(self) -> Iterable[Tensor]:
        return self.model_weights.values()
