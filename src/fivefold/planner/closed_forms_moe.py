"""Closed forms of models with experts, for many layouts at once (closed_forms.py).

What a block costs without its experts depends on a few choices (a `BlockShape`), what experts cost on fewer (an
`ExpertShape`): each is worked out once, by the functions that time a single layout, and the closed forms add them up.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import ExpertActivationMemory
from fivefold.cost.collective_time import Topology
from fivefold.cost.moe import MoEBlock, Travel, block_share
from fivefold.cost.peak_memory import cp_buffer_bytes
from fivefold.cost.software import HIGH_PRECISION_BYTES
from fivefold.cost.step import Workload
from fivefold.planner.closed_forms import (
    DISPATCHES,
    RECOMPUTES,
    Array,
    BlockArrays,
    BlockShape,
    Choices,
    Closed,
    Columns,
    EpChoices,
    LinkArrays,
    ShapeCost,
    computing,
    shape_tables,
    unlike,
)
from fivefold.planner.closed_forms_by_rank import ClosedForms, block_params
from fivefold.spec.pattern import Layer


class ExpertShape(NamedTuple):
    """The choices that decide what the experts of a block cost."""

    tokens: int  # of a microbatch on a cp rank
    tp: int
    sp: bool
    ep: int
    dispatch: int  # index into DISPATCHES
    near: int  # ranks of ep on one node


class DenseCost(NamedTuple):
    """Seconds and bytes of a block without its experts, and of the ends."""

    forward: float
    backward: float
    computing: float
    computing_back: float
    launching: float  # by the host
    inter_node_backward: float
    unhidden: float
    ends: float
    saved: float  # activations of a microbatch
    recomputed: float  # bytes that recompute makes again
    passing: float  # bytes that exist at the experts' backward pass alone
    logits: float
    p2p_bytes: float
    full: float

    @classmethod
    def of(cls, workload: Workload, shape: BlockShape, layer: Layer) -> "DenseCost":
        """A block with experts."""
        return cls.in_shape(ShapeCost.of(workload, shape, layer))

    @classmethod
    def in_shape(cls, shape: ShapeCost) -> "DenseCost":
        cost, block, layout = shape.cost, shape.cost.without_experts, shape.cost.layout
        saved, all_saved = shape.activations.under(layout.recompute), shape.activations.without_recompute
        without_experts = saved.total - saved.experts
        residual = cost.activation_bytes * cost.tokens * cost.spec.hidden / layout.sp_degree
        expert_grads = cost.grad_accumulation_seconds(cost.rank_params.experts)
        return cls(
            forward=block.forward.total - block.forward.host,
            backward=block.dgrad.total - block.dgrad.host + block.wgrad.total - expert_grads,
            computing=computing(block)[0],
            computing_back=computing(block)[1],
            launching=cost.host_launch_seconds,
            inter_node_backward=cost.inter_node_backward_seconds,
            unhidden=shape.with_split_backward.without_experts.dgrad.total - block.dgrad.total,
            ends=sum(part.total for part in (*cost.head_and_loss, *cost.embedding)),
            saved=without_experts,
            recomputed=all_saved.total - all_saved.experts - without_experts,
            passing=2 * residual + cp_buffer_bytes(cost) - all_saved.mlp,
            logits=shape.logits,
            p2p_bytes=shape.p2p_bytes,
            full=layout.recompute == "full",
        )


class MoECost(NamedTuple):
    """What the experts of one block take, on the most loaded rank."""

    forward: float  # seconds
    backward: float
    kernels: float  # seconds of forward without messages,
    kernels_back: float  # and of backward
    moved: float  # seconds of forward that are bound by memory: selective recompute does them again
    computing: float  # seconds of forward between the two messages,
    computing_back: float  # and of backward
    dispatch: float  # seconds of messages that can run beside compute, but for what the shared expert hides
    combine: float
    combine_back: float
    dispatch_back: float
    link: float  # seconds of all messages of forward,
    link_back: float  # and of backward
    everything: float  # bytes that are saved without recompute,
    outputs: float  # and with selective recompute
    worst: float  # bytes of backward on top of the former

    @classmethod
    def of(cls, workload: Workload, spread: ExpertShape, topology: Topology, layer: Layer) -> "MoECost":
        """`topology` is that of any layout that spreads experts so."""
        layout = structs.replace(topology.layout, sp=spread.sp, dispatch=DISPATCHES[spread.dispatch])
        device, activation_bytes = topology.device, HIGH_PRECISION_BYTES.get(workload.precision, 2)
        moe = MoEBlock(
            spec=workload.spec,
            layer=layer,
            layout=layout,
            device=device,
            topology=topology,
            software=workload.software,
            tokens=spread.tokens,
            activation_bytes=activation_bytes,
            precision=workload.precision,
            imbalance=workload.imbalance,
        )
        memory = ExpertActivationMemory(
            spec=workload.spec,
            layer=layer,
            layout=layout,
            software=workload.software,
            tokens=spread.tokens,
            activation_bytes=activation_bytes,
            imbalance=workload.imbalance,
        )
        travel = Travel(moe)  # with backward passes in one piece, which hide most
        there, back, back_again, there_again = travel.messages
        less, less_back = travel.hidden
        kernels = moe.gemm_seconds[0] + moe.memory_seconds[0]
        kernels_back = moe.gemm_seconds[1] + moe.gemm_seconds[2] + moe.memory_seconds[1]
        held = block_share(workload.spec, 1, spread.ep, layer).experts
        added = device.stream(held * workload.software.accumulate_bytes, 0)
        return cls(
            forward=kernels + moe.ep_seconds[0] - less + moe.tp_seconds[0],
            backward=kernels_back + moe.ep_seconds[1] - less_back + moe.tp_seconds[1] + added,
            kernels=kernels,
            kernels_back=kernels_back,
            moved=moe.memory_seconds[0],
            computing=moe.expert_gemm_seconds[0],
            computing_back=moe.expert_gemm_seconds[1] + moe.expert_gemm_seconds[2],
            dispatch=there - less,
            combine=back,
            combine_back=back_again,
            dispatch_back=there_again - less_back,
            link=there + back,
            link_back=there_again + back_again,
            everything=memory.saved,
            outputs=memory.saved_selective,
            worst=max(memory.during_weighting, memory.during_last_linear),
        )


@dataclass(frozen=True)
class ExpertClosed(Closed):
    """The closed forms of a model with experts, in layers of one kind."""

    @property
    def unit(self) -> int:
        """The head, next to narrow layers, is worth many, and stages of a rank share them."""
        return 1

    @property
    def each(self) -> Array:
        return super().each - self._joined() * self.block.paired

    def _joined(self) -> Array:
        """The share of microbatches in joined pairs, at most: the pipeline fills before the first. ZeRO 3 runs one half
        after the other."""
        joins = self.fact("joins") & (self.of.zero < 3)
        return np.where(joins, np.maximum(0.0, 1 - self.of.pp / self.of.microbatches), 0.0)


@dataclass(frozen=True)
class ExpertClosedForms(ClosedForms):
    """The closed forms of a model with experts."""

    dealt: EpChoices

    @cached_property
    def links(self) -> LinkArrays:
        return LinkArrays.of(self.workload, self.of, self.dealt.ep)

    @cached_property
    def tables(self) -> dict[Layer, Array]:
        """As for a model without experts, and of layers with experts what these cost is left out (`DenseCost`)."""
        kinds = {
            layer: DenseCost.in_shape if layer.routed else BlockArrays.in_shape
            for layer in self.workload.spec.counted()
        }
        return shape_tables(self.workload, self.shapes, self.of.shape, kinds)

    @cached_property
    def spent(self) -> tuple[dict[Layer, Array], Array]:
        """What the experts of each kind of layer cost, a column for each combination of what decides it; and which of
        them an element has."""
        shapes, links, dealt = self.shapes, self.links, self.dealt
        near = np.array([topology.reaches["ep"].together for topology in links.topologies])[links.at]
        sizes = list(dict.fromkeys(_sizes(self.workload, shape) for shape in shapes))
        size = np.array([sizes.index(_sizes(self.workload, shape)) for shape in shapes])[self.of.shape]
        first, at = unlike(size, dealt.ep, dealt.dispatch, near)
        spreads = []
        for one in first.tolist():
            spread = ExpertShape(*sizes[size[one]], *(int(column[one]) for column in (dealt.ep, dealt.dispatch, near)))
            spreads.append((spread, links.topologies[links.at[one]]))
        routed = [layer for layer in self.workload.spec.counted() if layer.routed]
        rows = {layer: [MoECost.of(self.workload, *spread, layer) for spread in spreads] for layer in routed}
        return {layer: np.array(costs).T.copy() for layer, costs in rows.items()}, at

    @cached_property
    def recompute(self) -> Array:
        """By shape, an index into RECOMPUTES."""
        return np.array([RECOMPUTES.index(shape.recompute) for shape in self.shapes])

    def _of_kind(self, of: Choices, links: LinkArrays, rows: Array, layer: Layer) -> Closed:
        params = block_params(self.workload.spec, of, layer, self.dealt.ep[rows])
        block: Any = Columns(BlockArrays, self.tables[layer], of.shape)
        if layer.routed:
            costs, at = self.spent
            block = ExpertBlock(
                Columns(DenseCost, self.tables[layer], of.shape),
                Columns(MoECost, costs[layer], at[rows]),
                self.recompute[of.shape],
                self.workload.software.computes_itself,
            )
        return ExpertClosed(self.workload, of, block, params, self.pipelines, links)


@dataclass(frozen=True)
class ExpertBlock:
    """A block with experts: the arrays of `BlockArrays`, each worked out when asked for."""

    dense: Any  # arrays of `DenseCost`
    spent: Any  # and of `MoECost`
    recompute: Array  # indices into RECOMPUTES
    on_cpus: bool  # launching hides behind nothing there, as on one layout (`BlockCost`)

    def __getattr__(self, name: str) -> Any:
        """What the experts do not change."""
        if name not in ("inter_node_backward", "unhidden", "ends", "logits", "p2p_bytes", "full"):
            raise AttributeError(name)
        return getattr(self.dense, name)

    @cached_property
    def _twice(self) -> Array:
        """Whether backward runs forward again."""
        return self.recompute == RECOMPUTES.index("full")

    @cached_property
    def _again(self) -> Array:
        return np.choose(self.recompute, [0.0, self.spent.moved, self.spent.forward])

    @cached_property
    def _passes(self) -> tuple[Array, Array]:
        """Seconds of forward and backward, if no kernel waits for the host."""
        dense, spent = self.dense, self.spent
        return dense.forward + spent.forward, dense.backward + spent.backward + self._again

    @cached_property
    def _wait(self) -> Array:
        return np.maximum(0.0, self.dense.launching - (0.0 if self.on_cpus else sum(self._passes)))

    @cached_property
    def _forward_fraction(self) -> Array:
        """Of the host's work."""
        return np.asarray(1 / np.where(self._twice, 3, 2))

    @cached_property
    def forward(self) -> Array:
        return self._passes[0] + self._forward_fraction * self._wait

    @cached_property
    def backward(self) -> Array:
        return self._passes[1] + (1 - self._forward_fraction) * self._wait

    @property
    def computing(self) -> Array:
        return np.asarray(self.dense.computing + self.spent.kernels)

    @property
    def computing_back(self) -> Array:
        return np.asarray(self.dense.computing_back + self.spent.kernels_back + self._again)

    @property
    def waiting(self) -> Array:
        return 0.0 * self._wait if self.on_cpus else self._wait

    @cached_property
    def _held(self) -> Array:
        return np.choose(self.recompute, [self.spent.everything, self.spent.outputs, 0.0])

    @cached_property
    def saved(self) -> Array:
        return np.asarray(self.dense.saved + self._held)

    @property
    def transient(self) -> Array:
        dense, spent = self.dense, self.spent
        return np.asarray(dense.recomputed + spent.everything - self._held + spent.worst + dense.passing)

    @property
    def paired(self) -> Array:
        """Seconds that a joined pair hides of a block's messages, nearly at most: each behind the turn of the other
        half that comes after it, in the middle of a stage; at its ends there is less to hide behind.

        Where backward runs forward again, it does so first, and has messages that no turn of a forward pass is left
        for. No pair is shorter than all of its messages, which share a link.
        """
        spent, twice, (forward, backward) = self.spent, self._twice, self._passes
        rest = forward - spent.dispatch - spent.combine - spent.computing
        rest_back = backward - spent.dispatch_back - spent.combine_back - spent.computing_back
        rest_back = rest_back - twice * (spent.dispatch + spent.combine)
        ahead = np.minimum(spent.dispatch, rest_back) + np.minimum(spent.combine, spent.computing_back)
        back = np.minimum(spent.combine_back, spent.computing) + np.minimum(spent.dispatch_back, rest)
        link = (1 + twice) * spent.link + spent.link_back
        return np.asarray(np.maximum(0.0, np.minimum(ahead + back, forward + backward - link)))


def _sizes(workload: Workload, shape: BlockShape) -> tuple[int, int, bool]:
    return shape.samples * workload.seq // shape.cp, shape.tp, shape.sp
