"""Seconds that one rank spends on one microbatch in a block, and in the embedding and head, by cause."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from fivefold.cost import attention
from fivefold.cost.block_collectives import BlockCollectives, Collective
from fivefold.cost.closed_forms import ZeroCost, exposed_seconds
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device, mean_head_dim, mla_concat_bytes, mla_up_projections
from fivefold.cost.moe import MoEBlock, ParamShare, Travel, block_share, dense_gemms
from fivefold.cost.software import (
    CAST_BYTES,
    ELEMENTWISE_BYTES,
    HIGH_PRECISION_BYTES,
    LOW_PRECISION_BYTES,
    SoftwareProfile,
)
from fivefold.layout.layout import ContextKind, Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, block, head
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import accum_bytes
from fivefold.support.tuple_arithmetic import plus

ROWWISE_FP8_SLOWDOWN = 2.0  # torch's matmul with a scale per row over cuBLAS's with one scale (2024)
# Launched in one pass of a block by memory-bound operations, about.
FUSED_KERNELS, EAGER_KERNELS = 8, 20
EMBEDDING_KERNELS, LOSS_KERNELS = 2, 6


class Seconds(NamedTuple):
    """Where time goes. Of collectives, only the exposed part counts."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # memory-bound kernels: norms, activation functions, residual sums, the loss
    recompute: float = 0.0  # includes tp's collectives; those that recompute repeats of cp and ep count there
    host: float = 0.0  # the device waits for its next kernel
    tp: float = 0.0
    cp: float = 0.0
    zero: float = 0.0
    ep: float = 0.0  # dispatch and combine of tokens

    @property
    def total(self) -> float:
        return sum(self)


NO_SECONDS = Seconds()


class PassTimes(NamedTuple):
    """One microbatch through a part of the model: forward, and backward in its two halves."""

    forward: Seconds
    dgrad: Seconds  # gradients of the inputs, and recomputation
    wgrad: Seconds  # gradients of the weights


NO_PASSES = PassTimes(NO_SECONDS, NO_SECONDS, NO_SECONDS)


# What a `BlockCost` has in common with those of layouts that differ in recompute or in their schedule alone.
_OF_ANY_RECOMPUTE = (
    *("operations", "gemms", "rank_params", "cp_method", "inter_node_backward_seconds", "embedding", "head_and_loss"),
    *("_dense", "_memory_bound", "_tp_forward", "_tp_backward"),
)


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """A microbatch of `samples` sequences under a layout, on a device, as a software runs it."""

    spec: ModelSpec
    layer: Layer  # the block's mixer and MLP
    layout: Layout
    device: Device
    topology: Topology
    software: SoftwareProfile
    samples: int
    seq: int
    precision: str = "bf16"
    imbalance: float = 1.0  # of experts: tokens of the most loaded rank over the mean

    @property
    def tokens(self) -> int:
        return self.samples * self.seq // self.layout.cp

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of an activation."""
        return HIGH_PRECISION_BYTES.get(self.precision, 2)

    @cached_property
    def operations(self) -> BlockOperations:
        """The operations of a block on one tp rank."""
        return block(self.spec, self.layout.tp, self.layer)

    def of(self, layer: Layer) -> "BlockCost":
        """The same microbatch in another kind of layer."""
        if layer not in self._others:
            self._others[layer] = replace(self, layer=layer)
        return self._others[layer]

    @cached_property
    def _others(self) -> dict[Layer, "BlockCost"]:
        return {}

    def under(self, layout: Layout) -> "BlockCost":
        """The same block under a layout that differs in recompute or in its schedule alone. What neither changes is
        worked out once."""
        other = replace(self, layout=layout)
        for name in _OF_ANY_RECOMPUTE:
            other.__dict__[name] = getattr(self, name)  # as `cached_property` stores it
        return other

    @cached_property
    def moe(self) -> MoEBlock | None:
        """Its experts, where it has any."""
        if not self.layer.routed:
            return None
        return MoEBlock(
            spec=self.spec,
            layer=self.layer,
            layout=self.layout,
            device=self.device,
            topology=self.topology,
            software=self.software,
            tokens=self.tokens,
            activation_bytes=self.activation_bytes,
            precision=self.precision,
            imbalance=self.imbalance,
        )

    @cached_property
    def gemms(self) -> list[tuple[int, int, int]]:
        """Rows, columns and inner dimension of a block's forward GEMMs, without those of experts."""
        return dense_gemms(
            self.operations.matmuls, self.tokens, apart=self.software.columns_apart, sp_degree=self.layout.sp_degree
        )

    @cached_property
    def collectives(self) -> BlockCollectives:
        """The collectives of one microbatch. Those over ep are in `moe`, which knows how many rows travel."""
        return BlockCollectives(
            spec=self.spec,
            layout=self.layout,
            tokens=self.tokens,
            compute_bytes=self.activation_bytes,
            accum_bytes=accum_bytes(self.activation_bytes),
            layer=self.layer,
        )

    @cached_property
    def rank_params(self) -> ParamShare:
        """Parameters of a block on one rank."""
        return block_share(self.spec, self.layout.tp, self.layout.ep, self.layer)

    # ---- passes ------------------------------------------------------------------------------------------------------

    @cached_property
    def block(self) -> PassTimes:
        return self._passes(self.moe)

    @cached_property
    def without_experts(self) -> PassTimes:
        return self._passes(None)

    def _passes(self, moe: MoEBlock | None) -> PassTimes:
        return self._with_host_wait(self._with_exposed_collectives(self._compute(moe), moe))

    def _compute(self, moe: MoEBlock | None) -> PassTimes:
        """GEMMs, attention and memory-bound kernels, as if nothing were sent or waited for."""
        if moe is None:
            return self._dense
        forward, dgrad, wgrad = moe.gemm_seconds
        memory, memory_backward = moe.memory_seconds
        experts = PassTimes(
            forward=Seconds(gemm=forward, memory=memory),
            dgrad=Seconds(gemm=dgrad, memory=memory_backward),
            wgrad=Seconds(gemm=wgrad),
        )
        return plus(self._dense, experts)

    @cached_property
    def _dense(self) -> PassTimes:
        """The same without experts."""
        forward, dgrad, wgrad = (
            self._gemm_slowdown * seconds for seconds in _gemm_seconds(self.device, tuple(self.gemms), self.precision)
        )
        attention, attention_backward = self._attention
        memory, memory_backward = self._memory_bound
        return PassTimes(
            forward=Seconds(gemm=forward, attention=attention, memory=memory),
            dgrad=Seconds(gemm=dgrad, attention=attention_backward, memory=memory_backward),
            wgrad=Seconds(gemm=wgrad, memory=self.grad_accumulation_seconds(self.rank_params.total)),
        )

    def _with_exposed_collectives(self, compute: PassTimes, moe: MoEBlock | None) -> PassTimes:
        """What each axis sends and compute does not hide; and recomputation, which repeats some of it."""
        forward, dgrad, wgrad = compute
        tp, tp_backward = self._exposed_tp(compute)
        cp, cp_backward = self._exposed_cp()
        ep = ep_backward = 0.0
        if moe is not None:
            hidden, hidden_backward = Travel(moe).hidden
            ep, ep_backward = moe.ep_seconds[0] - hidden, moe.ep_seconds[1] - hidden_backward
            tp, tp_backward = tp + moe.tp_seconds[0], tp_backward + moe.tp_seconds[1]
        recompute = self._recompute_seconds(forward, tp)
        ep_recompute = ep if self.layout.recompute == "full" else 0.0
        backward = dgrad.gemm + wgrad.gemm + dgrad.attention + dgrad.memory + recompute + ep_recompute
        zero, zero_backward = self._exposed_zero3(forward.total, backward)
        return PassTimes(
            forward=forward._replace(tp=tp, cp=cp, zero=zero, ep=ep),
            dgrad=dgrad._replace(
                recompute=recompute,
                tp=tp_backward,
                cp=cp_backward,
                zero=zero_backward,
                ep=ep_backward + ep_recompute,
            ),
            wgrad=wgrad,
        )

    def _with_host_wait(self, passes: PassTimes) -> PassTimes:
        """A device that finishes before its host has launched the next kernel waits, in each pass alike. A CPU is its
        own host: it launches and computes in turn, so that launching hides behind nothing."""
        forward, dgrad, wgrad = passes
        busy = 0.0 if self.software.computes_itself else forward.total + dgrad.total + wgrad.total
        wait = max(0.0, self.host_launch_seconds - busy)
        forward_fraction = 1 / (self._forward_passes + 1)
        return PassTimes(
            forward=forward._replace(host=forward_fraction * wait),
            dgrad=dgrad._replace(host=(1 - forward_fraction) * wait),
            wgrad=wgrad,
        )

    @property
    def _forward_passes(self) -> int:
        return 2 if self.layout.recompute == "full" else 1

    @property
    def host_launch_seconds(self) -> float:
        """Seconds in which the host launches a block's passes, forward and backward."""
        software = self.software
        if self.moe is not None and software.experts.graphs:
            return 0.0
        measured = self.device.achieved.host if software.computes_itself else 0.0
        one_pass = measured or software.host * software.achieved.host
        if self.moe is not None:
            one_pass += (measured or software.achieved.host) * software.experts.host
        return (self._forward_passes + 1) * one_pass

    def grad_accumulation_seconds(self, parameters: float) -> float:
        """Seconds of adding up gradients, where GEMMs do not add them as they write."""
        return self.device.stream(parameters * self.software.accumulate_bytes, 0)

    # ---- compute -----------------------------------------------------------------------------------------------------

    @property
    def _gemm_slowdown(self) -> float:
        return ROWWISE_FP8_SLOWDOWN if self.software.rowwise and self.precision == "fp8" else 1.0

    def _gemm(self, m: int, n: int, k: int) -> float:
        return self._gemm_slowdown * self.device.gemm(m, n, k, self.precision)

    @cached_property
    def _attention(self) -> tuple[float, float]:
        """Forward and backward, for all queries of this rank; with cp, of its slowest rank."""
        scores = self.operations.attention
        if not scores.heads:
            return 0.0, 0.0
        if self.cp_method is not None:
            work = self.cp_method.work
            seconds = work.both if self.software.merges else work.attention
            return seconds.forward, seconds.backward
        return self.device.attention(
            self.software.attention,
            batch=self.samples,
            heads=scores.heads,
            head_dim=mean_head_dim(self.software, scores),
            queries=self.seq,
            mean_keys=scores.keys(self.seq / 2),
        )

    @cached_property
    def cp_method(self) -> attention.Method | None:
        """How attention is computed over the cp ranks, and what it costs; None without cp or attention."""
        scores = self.operations.attention
        if self.layout.cp == 1 or not scores.heads:
            return None
        degrees = msgspec.convert(self.layout.degrees, Layout)  # and nothing else, so that lru_cache hits
        layer_attention = attention.LayerAttention(
            seq=self.seq,
            heads=scores.heads,
            kv_heads=scores.kv_heads,
            head_dim=scores.head_dim,
            device=self.device,
            topology=replace(self.topology, layout=degrees),
            full_kernel=self.software.attention,
            partial_kernel=self.software.cp_attention or self.software.attention,
            samples=self.samples,
            activation_bytes=self.activation_bytes,
            accum_bytes=accum_bytes(self.activation_bytes),
            window=scores.window,
        )
        return _cp_method(self.layout.cp_kind, layer_attention)

    @cached_property
    def _memory_bound(self) -> tuple[float, float]:
        """Memory-bound kernels, forward and backward. The norms of q and k are not counted."""
        software, operations = self.software, self.operations
        norm_slowdown = software.achieved.norm if software.norm == "eager" else 1.0
        norm = [norm_slowdown * bytes_ for bytes_ in getattr(ELEMENTWISE_BYTES[software.norm], self.spec.norm)]
        bytes_per_feature = ELEMENTWISE_BYTES[software.pointwise]._asdict() | {"norm": norm}
        # Inputs of low-precision matmuls are cast in forward, and once more, transposed, for the weight gradients.
        read_once = [group[0] for group in operations.groups if group[0].dense]
        cast = sum(matmul.inputs for matmul in read_once) * CAST_BYTES.get(self.precision, 0.0)
        cast += mla_concat_bytes(operations, software)
        kernels = EAGER_KERNELS if software.pointwise == "eager" else FUSED_KERNELS

        def seconds(direction: int) -> float:
            elementwise = sum(
                self.tokens
                * operation.features_per_rank(self.layout.tp, self.layout.sp)
                * bytes_per_feature.get(operation.kind, operation.moved)[direction]
                for operation in operations.elementwise
            )
            bytes_ = elementwise + self.tokens * cast  # with activations of 2 bytes
            return self.device.stream(self.activation_bytes / 2 * bytes_, kernels)

        return seconds(0), seconds(1)

    def _recompute_seconds(self, forward: Seconds, tp: float) -> float:
        """Recomputation in backward: of the whole block, or of operations whose outputs are cheap to make and large."""
        software = self.software
        if self.layout.recompute == "full":
            return forward.total + tp - (self._gemm(*self.gemms[-1]) if self._skips_last_gemm else 0.0)
        if self.layout.recompute == "none":
            return self._mla_recompute_seconds if software.remakes_heads and self.operations.latent else 0.0
        if software.selective == "attention":
            return forward.attention
        return forward.memory + (0.5 * forward.gemm if software.selective == "half" else 0.0)

    @property
    def _skips_last_gemm(self) -> bool:
        """Whether full recompute stops before a block's last GEMM, whose output no gradient needs."""
        if not (self.software.stops_early and self.gemms):
            return False
        if self.layout.tp > 1 or self.layout.splits_backward:  # one step with a collective, or with a deferred wgrad
            return False
        # With ep=1 a shared expert comes last. With ep>1 it runs while tokens are in flight, and the combine is last.
        return self.moe is None or (self.moe.experts.shared > 0 and self.layout.ep == 1)

    @property
    def _mla_recompute_seconds(self) -> float:
        """Making MLA's heads of their latents again."""
        gemms = sum(self._gemm(*shape) for shape in mla_up_projections(self.operations, self.tokens))
        concat_bytes = mla_concat_bytes(self.operations, self.software)
        return gemms + self.device.stream(self.activation_bytes / 2 * self.tokens * concat_bytes)

    # ---- exposed collectives -----------------------------------------------------------------------------------------

    def _exposed_tp(self, compute: PassTimes) -> tuple[float, float]:
        """Forward and backward, without tp's collectives of experts."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        software, wgrad = self.software, compute.wgrad.gemm
        # Async TP (all-gathers and GEMMs pipelined over peer memory) works inside a node only.
        async_fraction = software.hides("tp") if self.topology.by_peers("tp") else 0.0
        forward = exposed_seconds(self._tp_forward, compute.forward.gemm, async_fraction)
        if async_fraction:
            return forward, exposed_seconds(self._tp_backward, compute.dgrad.gemm + wgrad, async_fraction)
        # The input gradients' collectives hide behind the weight gradients, unless the schedule defers these.
        behind = 0.0 if self.layout.splits_backward else wgrad
        overlap_fraction = max(software.hides("tp_backward"), software.achieved.tp_backward * (software.overlap.tp > 0))
        return forward, exposed_seconds(self._tp_backward, behind, overlap_fraction)

    @cached_property
    def _tp_forward(self) -> float:
        return self._tp_seconds((*self.collectives.mixer(), *self.collectives.mlp()))

    @cached_property
    def _tp_backward(self) -> float:
        return self._tp_seconds((*self.collectives.mixer_back(), *self.collectives.mlp_back()))

    def _tp_seconds(self, collectives: Iterable[Collective]) -> float:
        alike = Counter((sent.kind, sent.payload) for sent in collectives if sent.axis == "tp")
        return sum(self.topology.time(kind, "tp", payload, calls) for (kind, payload), calls in alike.items())

    def _exposed_cp(self) -> tuple[float, float]:
        """Forward and backward exchange of keys and values; full recompute repeats the forward one."""
        method = self.cp_method
        if method is None:
            return 0.0, 0.0
        overlap_fraction = self.software.hides("cp") if self.layout.cp_kind == "ring" else 1.0
        forward, backward = (
            moving - overlap_fraction * (moving - exposed)
            for moving, exposed in zip(method.moving, method.exposed, strict=True)
        )
        return forward, backward + (forward if self.layout.recompute == "full" else 0.0)

    def _exposed_zero3(self, forward: float, backward: float) -> tuple[float, float]:
        """ZeRO 3 in one microbatch: weights gathered behind `forward` and `backward` seconds, gradients scattered."""
        if not self.layout.fully_shards(self.spec):
            return 0.0, 0.0
        zero = ZeroCost(self.spec, self.software, self.topology)
        free = max(0.0, backward - self.inter_node_backward_seconds)
        full_recompute = self.layout.recompute == "full"
        return zero.exposed_zero3_in_block(self.rank_params, forward, free, full_recompute=full_recompute)

    @cached_property
    def inter_node_backward_seconds(self) -> float:
        """Seconds of a block's backward in which tp or cp holds the node's ports, so that dp cannot."""
        busy = 0.0
        if self.layout.tp > 1 and self.topology.across("tp"):
            busy += self._tp_backward
        if self.cp_method is not None and self.topology.across("cp"):
            busy += self.cp_method.moving.backward
        return busy

    # ---- embedding and head ------------------------------------------------------------------------------------------

    @cached_property
    def embedding(self) -> PassTimes:
        """Rows looked up, and gradients added into them."""
        moved = 2.0 * self.activation_bytes * self.tokens * self.spec.hidden
        reduce, *gathers = self.collectives.embedding()
        table = head(self.spec).size / self.layout.tp * (self.spec.vocab > 1)
        backward = self.device.stream(2 * moved, EMBEDDING_KERNELS) + self.grad_accumulation_seconds(table)
        return PassTimes(
            forward=Seconds(memory=self.device.stream(moved, EMBEDDING_KERNELS), tp=self._tp_seconds([reduce])),
            dgrad=Seconds(tp=self._tp_seconds(gathers)),
            wgrad=Seconds(memory=backward),
        )

    @cached_property
    def head_and_loss(self) -> PassTimes:
        """The last norm, the head and the loss."""
        vocab, hidden, tokens = self.spec.vocab, self.spec.hidden, self.tokens
        columns = head(self.spec, self.layout.tp).outputs  # of the vocabulary, on this rank
        precision = "bf16" if self.precision in LOW_PRECISION_BYTES else self.precision  # never less for the head
        gathers_logits = self.software.gathers_logits and self.layout.tp > 1
        loss_bytes = self.software.logit_bytes * tokens * (vocab if gathers_logits else columns) / 2  # in each pass
        loss = self.device.stream(loss_bytes, LOSS_KERNELS)
        *gathers, reduce = self.collectives.head()  # the loss's own, a few bytes per token, are not counted
        logits = 0.0
        if gathers_logits:
            logits = self.topology.time("all-gather", "tp", float(self.activation_bytes) * tokens * vocab)
        gemm, dgrad, wgrad = _gemm_seconds(self.device, ((tokens, columns, hidden),), precision)
        return PassTimes(
            forward=Seconds(gemm=gemm, memory=loss, tp=self._tp_seconds(gathers) + logits),
            dgrad=Seconds(gemm=dgrad, memory=loss, tp=self._tp_seconds([reduce])),
            wgrad=Seconds(gemm=wgrad, memory=self.grad_accumulation_seconds(columns * hidden)),
        )


@lru_cache(maxsize=4096)
def _gemm_seconds(
    device: Device, shapes: tuple[tuple[int, int, int], ...], precision: str
) -> tuple[float, float, float]:
    """Forward, dgrad and wgrad of GEMMs with these forward shapes, which many layouts share."""
    return (
        sum(device.gemm(m, n, k, precision) for m, n, k in shapes),
        sum(device.gemm(m, k, n, precision) for m, n, k in shapes),
        sum(device.gemm(n, k, m, precision) for m, n, k in shapes),
    )


@lru_cache(maxsize=4096)
def _cp_method(kind: ContextKind, layer: attention.LayerAttention) -> attention.Method:
    return {"ring": attention.ring, "allgather": attention.allgather, "ulysses": attention.ulysses}[kind](layer)
