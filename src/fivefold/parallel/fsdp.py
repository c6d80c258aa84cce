"""ZeRO 3 and hybrid sharding: FSDP2, a block at a time.

A rank holds a share of the rows of every parameter, in full precision: its master. A block's weights are gathered in
the compute dtype for its forward and again for its backward, and released after each; its gradients are reduce-
scattered in full precision every microbatch. With `replicate` (HSDP) that happens within each replica, and the
gradients' shards are summed over the replicas once a step.

Parameters that stay in full precision are ignored by FSDP2 if compute is in low precision: it wants the gradients of a
unit in one dtype. They are few and small: every rank holds them whole, and buckets reduce their gradients once a step,
as in ZeRO 0 (`zero.py`).

If the schedule splits the backward pass (zero-bubble, `split_backward`), gradients of linears are deferred to a weight-
gradient pass, after FSDP2 has released the block. They need no weights, only a reduction: buckets reduce them, as in
ZeRO 2, and their shards accumulate beside FSDP2's.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.layout.bucket_plan import MIN_BUCKET_ELEMENTS, BucketParams, buckets, layers_of
from fivefold.layout.sharding import LocalParam
from fivefold.model.init import init_param
from fivefold.model.layers import accum_dtype
from fivefold.model.moe import ExpertNetworks
from fivefold.model.recompute import unseen_by_checkpoint
from fivefold.parallel.buckets import BackwardPart, Bucket, Reducer, slots_of
from fivefold.parallel.collectives import HookedReduceScatter, stage_through_host
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import GradHook, Weights, local_of, recast_empty, register_grad_hook, stage_params
from fivefold.spec.model import ModelSpec


class FullySharded(Weights):
    """The weights of this rank's stages under FSDP2: its shards are the masters, and the optimizer updates them."""

    reshard_after_forward = True

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
        self.mesh, self.always_split, self.received = mesh, split_backward, set()
        stage_parameters = [stage_params(model, spec, mesh) for model in stages]
        self.local_params = {name: param for params in stage_parameters for name, param in params.items()}
        low_precision = compute_dtype != accum_dtype(compute_dtype)
        self.ignored = {  # names of the full-precision parameters, which FSDP2 does not shard
            name for name, param in self.local_params.items() if low_precision and param.parameter.full_precision
        }
        self.units: list[FSDPModule] = []
        self.named_units: dict[str, FSDPModule] = {}
        self.roots: list[FSDPModule] = []  # the last unit of each stage, which is the stage itself
        self.masters = {}
        self.fsdp_parameters: dict[str, DTensor] = {}  # those that FSDP2 shards
        for model, params in zip(stages, stage_parameters, strict=True):
            self._apply_fsdp(model, params, compute_dtype)
            self._init_masters(model, spec, seed)
        reduced_here = [
            (stage_index, bucket_params)
            for stage_index, params in enumerate(stage_parameters)
            for bucket_params in buckets(
                params.values(),
                min_elements=min_bucket_elements,
                split_backward=split_backward,
                low_precision=low_precision,
            )
            # FSDP2 reduces the gradients of all others.
            if bucket_params.deferred or bucket_params.full_precision
        ]
        self.reducer = Reducer([self._bucket(params, compute_dtype) for _, params in reduced_here], reduced_here)

    def _apply_fsdp(self, model: nn.Module, params: dict[str, LocalParam], compute_dtype: torch.dtype) -> None:
        """Make a stage FSDP2's, with empty parameters on the mesh's device."""
        # On meta: whole parameters would not fit. FSDP2 cuts their shapes, and `_allocate` makes only the shards.
        recast_empty(model, params, accum_dtype(compute_dtype), torch.device("meta"))
        layers = layers_of(param.parameter.unit for param in params.values())
        ignored = {parameter for name, parameter in model.named_parameters() if name in self.ignored}
        units = _fully_shard_units(model, layers, self.mesh, compute_dtype, ignored)
        self.units += units
        self.roots.append(units[-1])
        self.named_units |= {_unit_name(model, unit): unit for unit in units}
        _allocate(model, self.ignored & params.keys(), self.mesh.device)

    def _init_masters(self, model: nn.Module, spec: ModelSpec, seed: int) -> None:
        """Draw the initial values of a stage's shards, which are the masters."""
        for name, parameter in model.named_parameters():
            param, shard = self.local_params[name], local_of(parameter)
            init_param(spec, param.parameter, shard, seed, self.master_box(name))
            self.masters[name] = nn.Parameter(shard)
            if name in self.ignored:
                register_grad_hook(parameter, param, self.add)
                continue
            assert isinstance(parameter, DTensor)
            self.fsdp_parameters[name] = parameter
            if self.always_split and param.parameter.deferred:
                parameter.requires_grad_(False)  # FSDP2 of torch 2.11 would reduce zeros for want of a gradient

    def _bucket(self, params: BucketParams, compute_dtype: torch.dtype) -> Bucket:
        # The weights are FSDP2's; a bucket that only reduces needs no more than their shapes.
        meta_weights = {param.name: torch.empty(param.shape, device="meta") for param in params.params}
        axis, zero_stage = self.fsdp_axis_of(params), 0 if params.full_precision else 2
        slots = slots_of(params, meta_weights, self.masters, 1 if params.full_precision else axis.size)
        return Bucket(slots, axis, self.mesh.tp if params.partial else None, zero_stage, compute_dtype)

    def sharded(self, param: LocalParam) -> bool:
        return param.name not in self.ignored

    def has_gradient(self, name: str) -> bool:
        sharded = self.fsdp_parameters.get(name)
        return name in self.received or (sharded is not None and sharded.grad is not None)

    @contextmanager
    def microbatch(self, *, last: bool, stage: int = 0, part: BackwardPart = "all") -> Iterator[None]:
        if self.mesh.replicate.size > 1 and part != "weights":
            self.roots[stage].set_requires_all_reduce(last and not self.replaying)
        with nullcontext() if self.replaying else self.reducer.microbatch(last, stage, part):
            yield

    def set_grad_hook(self, grad_hook: GradHook) -> None:
        """Hook FSDP2's reduce-scatter, which gets all gradients of a unit in one flat tensor."""
        super().set_grad_hook(grad_hook)
        for name, unit in self.named_units.items():
            unit.set_custom_reduce_scatter(
                HookedReduceScatter(partial(self.call_grad_hook, name), staged=self.mesh.fsdp.staged)
            )

    def discard_grads(self) -> None:
        for parameter in self.fsdp_parameters.values():
            parameter.grad = None
        for fsdp_group in _fsdp_param_groups(self.units):
            fsdp_group._partial_reduce_output = None

    def finish_grad_sync(self) -> None:
        self.reducer.finish()  # `grad` of the buckets' masters is now a view of their shards, which are summed below
        for bucket in self.reducer.buckets if self.mesh.replicate.size > 1 else ():
            dist.all_reduce(bucket.shard, group=self.mesh.replicate.group)
        for name, parameter in self.fsdp_parameters.items():
            if name in self.reducer.bucket_of:
                continue
            master, gradient = self.masters[name], parameter.grad
            # FSDP2 pads uneven shards in storage of its own: the optimizer must update that storage.
            assert _same_memory(parameter._local_tensor, master), f"{name} has moved in memory"
            master.grad = gradient._local_tensor if isinstance(gradient, DTensor) else torch.zeros_like(master)
            if self.has_tied_copy(self.local_params[name]):
                dist.all_reduce(master.grad, group=self.mesh.embedding.group)

    def sync_params(self, already_cast: frozenset[str] = frozenset()) -> None:
        for name, parameter in self.fsdp_parameters.items():
            parameter.grad = self.masters[name].grad = None
        for bucket in self.reducer.buckets:
            bucket.zero_grad()

    def wait_params(self) -> None:
        """Nothing to wait for: the masters are the model's weights."""

    def gradient_memory(self) -> Iterator[Tensor]:
        yield from (p.grad._local_tensor for p in self.fsdp_parameters.values() if isinstance(p.grad, DTensor))
        for fsdp_group in _fsdp_param_groups(self.units):
            if fsdp_group._partial_reduce_output is not None:
                yield fsdp_group._partial_reduce_output
        yield from self.buffers()

    def compute_memory(self) -> Iterator[Tensor]:
        yield from self.masters.values()
        for fsdp_group in _fsdp_param_groups(self.units):
            for parameter in fsdp_group.fsdp_params:
                yield from parameter.all_gather_outputs


# ---- FSDP2's units --------------------------------------------------------------------------------------------------


def _fully_shard_units(
    model: nn.Module, layers: list[int], mesh: Mesh, compute_dtype: torch.dtype, ignored: set[nn.Parameter]
) -> list[FSDPModule]:
    """Apply FSDP2 to the model, except to the `ignored` parameters.

    Returns the units: for each block its experts, which are sharded over efsdp (the ranks of a replica that have the
    same experts), and the rest of it; last the model itself.
    """
    units: list[FSDPModule] = []
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=accum_dtype(compute_dtype), cast_forward_inputs=False
    )
    for module in _unit_modules(model, layers):
        shard_axis = "efsdp" if isinstance(module, ExpertNetworks) else "fsdp"
        submesh = mesh.submesh("replicate", shard_axis) if mesh.replicate.size > 1 else mesh.submesh(shard_axis)
        unit = fully_shard(module, mesh=submesh, mp_policy=policy, reshard_after_forward=True, ignored_params=ignored)
        assert isinstance(unit, FSDPModule)
        # Sums, not means: the loss is divided by the token count already. Unscaled: gloo has no premul-sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.fsdp.staged:
            stage_through_host(unit)
        if isinstance(module, ExpertNetworks):
            _hide_gather_from_checkpoint(module)
        units.append(unit)
    # In backward each unit prefetches the weights of the unit below it. By default FSDP2 follows the order of past
    # forwards, which under a pipeline would gather weights for another microbatch or stage. The lowest unit has nothing
    # to prefetch and names itself, which FSDP2 has gathered by then: an empty list would mean the default.
    units[0].set_modules_to_backward_prefetch([units[0]])
    for below, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([below])
    return units


def _unit_modules(model: nn.Module, layers: list[int]) -> Iterator[nn.Module]:
    """The modules that become FSDP2 units, in the order of the forward pass."""
    for block in (model.get_submodule(f"layers.{layer}") for layer in layers):
        yield from (module for module in block.modules() if isinstance(module, ExpertNetworks))
        yield block
    yield model


def _unit_name(model: nn.Module, unit: FSDPModule) -> str:
    """The name of a unit; that of the rest of a stage is made of its first parameter's."""
    name = next(name for name, module in model.named_modules() if module is unit)
    return name or f"the rest of the stage of {next(iter(dict(model.named_parameters())), 'no weights')}"


def _hide_gather_from_checkpoint(module: nn.Module) -> None:
    """Hide the all-gather of a unit in a block: when the block is recomputed, its weights may be gathered already."""
    hidden = ExitStack()

    def hide(*_: Any) -> None:
        hidden.enter_context(unseen_by_checkpoint())

    def show(*_: Any) -> None:
        hidden.close()

    # FSDP2 has a hook of its own before and after forward: ours are around each of the two.
    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        register(hide, prepend=True)
        register(show)


# ---- memory, and FSDP2's state --------------------------------------------------------------------------------------


def _allocate(model: nn.Module, ignored: set[str], device: torch.device) -> None:
    """Allocate this rank's shards, and the `ignored` parameters whole. The latter are new tensors, because fake tensors
    cannot be swapped in place."""
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in sorted(ignored)]
    set_aside = [(module, key, module._parameters.pop(key)) for module, key in owners]
    model.to_empty(device=device)
    for module, key, meta_parameter in set_aside:
        assert meta_parameter is not None
        module.register_parameter(key, nn.Parameter(torch.empty_like(meta_parameter, device=device)))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at the same place; not by address, which fake tensors do not have."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _fsdp_param_groups(units: list[FSDPModule]) -> Iterator[Any]:
    """FSDP2's parameter groups: a list for each module in torch 2.13; in 2.11 one, or None for a module without
    parameters of its own, such as a middle pipeline stage."""
    for unit in units:
        state: Any = unit._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from filter(None, groups)
