"""Tensor and sequence parallelism: the decoder's ops over the tp axis (Megatron-LM, arXiv 1909.08053 and 2205.05198).

Every rank holds a shard of each matrix: column-parallel for q, k, v, gate and up, row-parallel for o and down; and a
range of the vocabulary. Collectives of [B, S, E] per layer:

             without sp             with sp
  forward    2 all-reduces          2 all-gathers, 2 reduce-scatters
  backward   2 all-reduces          2 all-gathers, 2 reduce-scatters, and 2 all-gathers of the saved inputs

Latent attention (MLA) has no gather of [B, S, E] before its heads: the linears to the latents run on this rank's
tokens, and the latents are sent instead: gathered once in forward (sp), reduced once in backward.
Full recompute repeats the forward's collectives, selective recompute none. With sp the residual stream is sharded over
the sequence, and so are the inputs that column-parallel linears save.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from fivefold.layout.sharding import chunk, kv_head, local_params
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets, linear_cross_entropy
from fivefold.model.ops import AttentionOps, LocalOps
from fivefold.model.recompute import save_output
from fivefold.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_or_scatter,
    arrange_sequence,
    gather_sequence,
    scatter_sequence,
    wait,
)
from fivefold.parallel.context import ContextParallel
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.parallel.token_dispatch import dispatch_of
from fivefold.parallel.vocab import VocabParallel, embed_in_shards
from fivefold.parallel.wgrad import Deferral, Target, WeightGradQueue
from fivefold.spec.model import ModelSpec


class TensorParallel(LocalOps):
    """The decoder's ops with weights that are DTensors over tp: they compute with this rank's shard of each."""

    sharded = True

    def __init__(self, spec: ModelSpec, mesh: Mesh, wgrad_queue: WeightGradQueue | None = None, **options: Any):
        """With `wgrad_queue`, linears can defer the gradients of their weights."""
        super().__init__(**options)
        self.spec, self.axis, self.sp, self.wgrad_queue = spec, mesh.tp, mesh.layout.sp, wgrad_queue
        heads = kv_head(spec, mesh.layout, mesh.tp.rank)
        self.kv_rows = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        self.vocabulary = chunk(spec.vocab, mesh.tp.size, mesh.tp.rank)
        self.local_params = local_params(spec, mesh.layout, mesh.tp.rank)  # except experts, which `dispatch` shards
        self.names: dict[nn.Module, str] = {}  # of the modules that hold parameters
        if wgrad_queue is not None:
            # Deferred tasks carry the names of a layer's parameters: in a graph, each layer would need its own.
            self.run_eagerly("column_parallel", "row_parallel", "replicated_linear", "latent_up_projection")

    def shard_parameters(self, model: nn.Module) -> None:
        """Turn the parameters of a model on the meta device into DTensors with this rank's shards."""
        assert self.axis.mesh is not None
        for owner, module in model.named_modules():
            over_tp: dict[str, tuple[bool, bool]] = {}  # by parameter: is it sharded, is its gradient partial
            for name, full in list(module.named_parameters(recurse=False)):
                param = self.local_params[f"{owner}.{name}"]
                if param.tp.axis != "tp":
                    continue
                placement: Placement = Replicate() if param.tp.dim is None else Shard(param.tp.dim)
                local = torch.empty(param.shape, dtype=full.dtype, device="meta")
                weight = DTensor.from_local(
                    local, self.axis.mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
                )
                setattr(module, name, nn.Parameter(weight))
                over_tp[name] = param.tp.dim is not None, param.tp.partial
            if over_tp:
                # On the module: a table keyed by module would recompile for every block.
                vars(module)["over_tp"] = over_tp
                self.names[module] = owner
        super().shard_parameters(model)

    def weight(self, module: nn.Module, name: str = "weight") -> Tensor:
        return self.local(module, name)

    def local(self, module: nn.Module, name: str = "weight") -> Tensor:
        """This rank's shard of a parameter. If its gradient is a partial sum, it is declared `Partial` over tp, and its
        bucket sums it."""
        parameter = getattr(module, name)
        _, partial = module.over_tp[name]  # type: ignore[index]
        return parameter.to_local(grad_placements=[Partial()] if partial else parameter.placements)

    # ---- the residual stream -----------------------------------------------------------------------------------------

    def residual_positions(self, positions: TokenPositions) -> TokenPositions:
        if not self.sp:
            return positions
        local = chunk(positions.position_ids.shape[1], self.axis.size, self.axis.rank)
        return replace(positions, position_ids=positions.position_ids[:, local.start : local.stop])

    def norm_of_all_heads(self, q_norm: nn.RMSNorm, q: Tensor, k_norm: nn.RMSNorm, k: Tensor) -> tuple[Tensor, Tensor]:
        """The mean square is all-reduced. If several ranks have the same kv head, all kv heads count equally often."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        squares = torch.stack([x.to(dtype).square().mean(-1) for x in (q, k)])
        means = AllReduceFn.apply(self.axis, squares) / self.axis.size
        scales = [(mean + norm.eps).rsqrt()[..., None] for mean, norm in zip(means, (q_norm, k_norm), strict=True)]
        weights = [self._used_rows(norm, "weight") for norm in (q_norm, k_norm)]
        q, k = ((x * scale * w).to(x.dtype) for x, scale, w in zip((q, k), scales, weights, strict=True))
        return q, k

    def position_embedding(self, table: nn.Embedding, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.local(table))

    # ---- linears -----------------------------------------------------------------------------------------------------

    def column_parallel(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        weights = [self._used_rows(linear, "weight") for linear in linears]
        biases = [None if linear.bias is None else self._used_rows(linear, "bias") for linear in linears]
        return ColumnParallelFn.apply(self.axis, self.sp, self._deferral(*linears), x, *weights, *biases)

    def replicated_linear(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """The weights are replicated, and so are the outputs; under sp each rank computes those of its tokens."""
        return self._without_collectives(x, *linears)

    def latent_up_projection(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Each rank computes its heads: `gather_latents` has gathered the input, and sums its gradient."""
        return self._without_collectives(x, *linears)

    def _without_collectives(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        weights, biases = (
            [self.local(linear, name) if getattr(linear, name) is not None else None for linear in linears]
            for name in ("weight", "bias")
        )
        targets = tuple(Target(f"{self.names[linear]}.weight") for linear in linears)
        deferral = None if self.wgrad_queue is None else Deferral(self.wgrad_queue, targets)
        one_rank, sp = Axis("tp"), False
        return ColumnParallelFn.apply(one_rank, sp, deferral, x, *weights, *biases)

    def gather_latents(self, latents: Tensor) -> Tensor:
        return GatherFromSP.apply(self.axis, self.sp, latents)

    def _used_rows(self, module: nn.Module, name: str) -> Tensor:
        """A shard; or, for k and v with fewer heads than ranks, this rank's head's rows of the replicated parameter."""
        local, (split, _) = self.local(module, name), module.over_tp[name]  # type: ignore[index]
        return local if split else local[self.kv_rows]

    def _deferral(self, *linears: nn.Linear) -> Deferral | None:
        if self.wgrad_queue is None:
            return None
        targets = []
        for linear in linears:
            split, _ = linear.over_tp["weight"]  # type: ignore[index]
            rows = None if split else self.kv_rows
            targets.append(Target(f"{self.names[linear]}.weight", rows, linear.weight.shape[0]))
        return Deferral(self.wgrad_queue, tuple(targets))

    def row_parallel(self, x: Tensor, linear: nn.Linear) -> Tensor:
        y = RowParallelFn.apply(self.axis, self.sp, self._deferral(linear), x, self.local(linear))
        return y if linear.bias is None else y + self.local(linear, "bias")  # once, after the reduction

    # ---- the vocabulary ----------------------------------------------------------------------------------------------

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        return embed_in_shards(self.local(table), self.vocabulary, tokens, self.axis, self.sp)

    def logits(self, x: Tensor, table: nn.Linear | nn.Embedding) -> Tensor:
        """[B, S(/tp), E] -> [B, S, V/tp], which are never gathered."""
        return ColumnParallelFn.apply(self.axis, self.sp, None, x, self.local(table), None)[0]

    def loss(self, x: Tensor, table: nn.Linear | nn.Embedding, targets: Targets) -> Tensor:
        vocabulary = VocabParallel(self.spec.vocab, self.axis, self.sp)
        return linear_cross_entropy(x, self.local(table), targets, vocabulary, compile=self.compiled)


class DeferredLocalOps(LocalOps):
    """`LocalOps` whose linears can defer the gradients of their weights; for tp=1. Results are the same to the bit."""

    def __init__(self, wgrad_queue: WeightGradQueue, **options: Any):
        super().__init__(**options)
        self.wgrad_queue, self.axis = wgrad_queue, Axis("tp")
        self.names: dict[nn.Module, str] = {}
        self.run_eagerly("column_parallel", "replicated_linear", "latent_up_projection")

    def shard_parameters(self, model: nn.Module) -> None:
        self.names |= {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        super().shard_parameters(model)

    def _deferral(self, *linears: nn.Linear) -> Deferral:
        return Deferral(self.wgrad_queue, tuple(Target(f"{self.names[linear]}.weight") for linear in linears))

    def column_parallel(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        weights, biases, sp = [linear.weight for linear in linears], [linear.bias for linear in linears], False
        return ColumnParallelFn.apply(self.axis, sp, self._deferral(*linears), x, *weights, *biases)

    def row_parallel(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return self.column_parallel(x, linear)[0]


def ops_of(
    spec: ModelSpec,
    mesh: Mesh,
    wgrad_queue: WeightGradQueue | None = None,
    *,
    attention: AttentionOps | None = None,
    compiled: bool = False,
    fp8: bool = False,
    fp8_experts: bool = False,
    dtype: torch.dtype | None = None,
    documents: bool = False,
) -> LocalOps:
    """The decoder's ops for a layout: tensor parallelism where tp > 1, context parallelism where cp > 1.

    With `wgrad_queue`, linears can defer the gradients of their weights; `attention` replaces the layout's; `dtype`: of
    the blocks' activations; `documents`: attention is masked by document.
    """
    attention = attention or (ContextParallel(mesh) if mesh.cp.size > 1 else None)
    options: Any = {"attention": attention, "compiled": compiled, "fp8": fp8}
    dispatch = options["dispatch"] = dispatch_of(spec, mesh, wgrad_queue, dtype)
    dispatch.fp8 = fp8_experts
    # The sizes of a dispatch depend on the data, and so do the tiles of attention that is masked by document: both run
    # between the graphs of a compiled block, or each microbatch would be recompiled.
    in_tiles = mesh.layout.cp > 1 and mesh.layout.cp_kind != "ulysses"
    masked_between_graphs = documents and (in_tiles or spec.sinks or spec.windowed)
    options["graph_breaks"] = (
        mesh.layout.breaks_graphs or masked_between_graphs or (spec.experts is not None and not dispatch.in_graph)
    )
    ops: LocalOps
    if mesh.tp.size > 1:
        ops = TensorParallel(spec, mesh, wgrad_queue, **options)
    else:
        ops = LocalOps(**options) if wgrad_queue is None else DeferredLocalOps(wgrad_queue, **options)
    if masked_between_graphs:
        ops.run_eagerly("attend")
    return ops


class ColumnParallelFn(Function):
    """y_i = x W_i^T + b_i for several W_i, of which each rank has a shard of rows: one input gradient is reduced."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, sp: bool, deferral: Deferral | None, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]  # a bias may be None
        ctx.axis, ctx.sp, ctx.deferral, ctx.biased = axis, sp, deferral, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)

        def compute() -> tuple[Tensor, ...]:
            inputs = gather_sequence(x, axis) if sp else x
            return tuple(F.linear(inputs, w, b) for w, b in zip(weights, biases, strict=True))

        return save_output(compute, count, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        axis, sp, deferral = ctx.axis, ctx.sp, ctx.deferral
        x, *weights = ctx.saved_tensors
        defer_wgrad = deferral is not None and deferral.collecting
        gathering = all_gather(x, axis) if sp and not defer_wgrad else x
        flat = [gradient.flatten(0, 1) for gradient in gradients]
        # The last one first, as autograd does: with one rank the bits are those of `LocalOps`.
        dx = flat[-1] @ weights[-1]
        for gradient, weight in zip(flat[-2::-1], weights[-2::-1], strict=True):
            dx += gradient @ weight
        dx = dx.unflatten(0, gradients[0].shape[:2])
        reducing = scatter_sequence(dx, axis) if sp else all_reduce(dx, axis)
        for_biases = [g.sum(0) if biased else None for g, biased in zip(flat, ctx.biased, strict=True)]
        if defer_wgrad:
            deferral.defer(lambda: (gather_sequence(x, axis) if sp else x).flatten(0, 1), flat)
            return None, None, None, wait(reducing, axis), *[None] * len(weights), *for_biases
        # The weights' gradients are computed while the input's is reduced.
        inputs = (arrange_sequence(wait(gathering, axis), axis) if sp else x).flatten(0, 1)
        for_weights = [gradient.T @ inputs for gradient in flat]
        return None, None, None, wait(reducing, axis), *for_weights, *for_biases


class RowParallelFn(Function):
    """y = sum over ranks of x W^T, each rank with a shard of W's columns and of x's features."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, sp: bool, deferral: Deferral | None, x: Tensor, weight: Tensor) -> Tensor:
        ctx.axis, ctx.sp, ctx.deferral = axis, sp, deferral
        ctx.save_for_backward(x, weight)
        (y,) = save_output(lambda: (all_reduce_or_scatter(axis, sp, F.linear(x, weight)),), 1, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy = (gather_sequence(gradient, ctx.axis) if ctx.sp else gradient).flatten(0, 1)
        dx = (dy @ weight).unflatten(0, x.shape[:2])
        if ctx.deferral is not None and ctx.deferral.collecting:
            ctx.deferral.defer(lambda: x.flatten(0, 1), [dy])
            return None, None, None, dx, None
        return None, None, None, dx, dy.T @ x.flatten(0, 1)


class AllReduceFn(Function):
    """The sum over ranks; each rank uses all of it, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: Tensor) -> Tensor:
        ctx.axis = axis
        (y,) = save_output(lambda: (wait(all_reduce(x, axis), axis),), 1, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, wait(all_reduce(gradient, ctx.axis), ctx.axis)


class GatherFromSP(Function):
    """The input of every rank's heads, gathered under sp; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, sp: bool, x: Tensor) -> Tensor:
        ctx.axis, ctx.sp = axis, sp
        if not sp:
            return x.view_as(x)
        (gathered,) = save_output(lambda: (gather_sequence(x, axis),), 1, x)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, all_reduce_or_scatter(ctx.axis, ctx.sp, gradient)
