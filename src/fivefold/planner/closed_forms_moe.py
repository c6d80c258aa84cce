"""Closed forms of models with experts, for many layouts at once (closed_forms.py).

What a block costs without its experts depends on a few choices (a `BlockShape`), what experts cost on fewer (an
`ExpertShape`): each is worked out once, by the functions that time a single layout, and the closed forms add them up.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import ExpertActivationMemory, saved_activations
from fivefold.cost.moe import MoEBlock, Travel, block_share
from fivefold.cost.peak_memory import cp_buffer_bytes, loss_peak
from fivefold.cost.step import Workload, p2p_bytes
from fivefold.layout.layout import Layout
from fivefold.planner.closed_forms import (
    DISPATCHES,
    RECOMPUTES,
    Array,
    BlockArrays,
    BlockShape,
    Choices,
    Closed,
    EpChoices,
    LinkArrays,
    PipelineArrays,
    computing,
    split_backward,
)
from fivefold.planner.closed_forms_by_rank import UnlikeClosed, block_params, combine_kinds
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
        workload = shape.of(workload)
        layout, cost = workload.layout, workload.block_cost.of(layer)
        block = cost.without_experts
        saved = _saved_bytes(workload, layout, layer)
        no_recompute = _saved_bytes(workload, structs.replace(layout, recompute="none"), layer)
        residual = cost.activation_bytes * cost.tokens * workload.spec.hidden / layout.sp_degree
        expert_grads = cost.grad_accumulation_seconds(cost.rank_params.experts)
        return cls(
            forward=block.forward.total - block.forward.host,
            backward=block.dgrad.total - block.dgrad.host + block.wgrad.total - expert_grads,
            computing=computing(block)[0],
            computing_back=computing(block)[1],
            launching=cost.host_launch_seconds,
            inter_node_backward=cost.inter_node_backward_seconds,
            unhidden=split_backward(workload).of(layer).without_experts.dgrad.total - block.dgrad.total,
            ends=sum(part.total for part in (*cost.head_and_loss, *cost.embedding)),
            saved=saved.without_experts,
            recomputed=no_recompute.without_experts - saved.without_experts,
            passing=2 * residual + cp_buffer_bytes(cost) - no_recompute.shared_expert,
            logits=loss_peak(workload.spec, layout, workload.software, cost.tokens),
            p2p_bytes=p2p_bytes(workload),
            full=shape.recompute == "full",
        )


class _Saved(NamedTuple):
    """Bytes that a block saves of a microbatch."""

    without_experts: float
    shared_expert: float  # of these


def _saved_bytes(workload: Workload, layout: Layout, layer: Layer) -> _Saved:
    sizes = (
        workload.spec,
        layout,
        workload.software,
        workload.batch,
        workload.seq,
        workload.block_cost.activation_bytes,
    )
    saved = saved_activations(*sizes, layer=layer)
    return _Saved(saved.total - saved.experts, saved.mlp)


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
    def of(cls, workload: Workload, spread: ExpertShape, layout: Layout, layer: Layer) -> "MoECost":
        """`layout` is any that spreads experts so."""
        cost = replace(workload, layout=layout, batch=layout.dp).block_cost
        moe = MoEBlock(
            spec=workload.spec,
            layer=layer,
            layout=layout,
            device=cost.device,
            topology=cost.topology,
            software=workload.software,
            tokens=spread.tokens,
            activation_bytes=cost.activation_bytes,
            precision=workload.precision,
            imbalance=workload.imbalance,
        )
        memory = ExpertActivationMemory(
            spec=workload.spec,
            layer=layer,
            layout=layout,
            software=workload.software,
            tokens=spread.tokens,
            activation_bytes=cost.activation_bytes,
            imbalance=workload.imbalance,
        )
        travel = Travel(moe)  # with backward passes in one piece, which hide most
        there, back, back_again, there_again = travel.messages
        less, less_back = travel.hidden
        kernels = moe.gemm_seconds[0] + moe.memory_seconds[0]
        kernels_back = moe.gemm_seconds[1] + moe.gemm_seconds[2] + moe.memory_seconds[1]
        added = cost.grad_accumulation_seconds(block_share(workload.spec, 1, spread.ep, layer).experts)
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

    dealt: EpChoices
    placed: LinkArrays

    @property
    def links(self) -> LinkArrays:
        return self.placed

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


def closed_of(
    workload: Workload, of: Choices, dealt: EpChoices, shapes: list[BlockShape], pipelines: list[PipelineArrays]
) -> Closed | UnlikeClosed:
    links, parts = LinkArrays.of(workload, of, dealt.ep), list[Closed]()
    for layer in workload.spec.counted():
        block = (
            _with_experts(workload, of, dealt, links, shapes, layer)
            if layer.routed
            else BlockArrays.of_all(workload, shapes, of.shape, layer)
        )
        params = block_params(workload.spec, of, layer, dealt.ep)
        parts.append(ExpertClosed(workload, of, block, params, pipelines, dealt, links))
    return combine_kinds(workload.spec, parts)


def _with_experts(
    workload: Workload, of: Choices, dealt: EpChoices, links: LinkArrays, shapes: list[BlockShape], layer: Layer
) -> BlockArrays:
    """A block with experts."""
    dense = DenseCost(*np.array([DenseCost.of(workload, shape, layer) for shape in shapes])[of.shape].T)
    spent = _moe_costs(workload, of, dealt, links, shapes, layer)
    recompute = np.array([RECOMPUTES.index(shape.recompute) for shape in shapes])[of.shape]
    again = np.choose(recompute, [0.0, spent.moved, spent.forward])
    forward, backward = dense.forward + spent.forward, dense.backward + spent.backward + again
    on_cpus = workload.software.computes_itself  # launching hides behind nothing, as on one layout (`BlockCost`)
    wait = np.maximum(0.0, dense.launching - (0.0 if on_cpus else forward + backward))
    held = np.choose(recompute, [spent.everything, spent.outputs, 0.0])
    twice = recompute == RECOMPUTES.index("full")
    forward_fraction = 1 / np.where(twice, 3, 2)  # of the host's work
    computed: dict[str, Any] = {
        "forward": forward + forward_fraction * wait,
        "backward": backward + (1 - forward_fraction) * wait,
        "computing": dense.computing + spent.kernels,
        "computing_back": dense.computing_back + spent.kernels_back + again,
        "waiting": 0.0 * wait if on_cpus else wait,
        "paired": _hidden_by_pair(spent, forward, backward, twice),
        "saved": dense.saved + held,
        "transient": dense.recomputed + spent.everything - held + spent.worst + dense.passing,
    }
    same = ("inter_node_backward", "unhidden", "ends", "logits", "p2p_bytes", "full")
    return BlockArrays(**computed, **{name: getattr(dense, name) for name in same})


def _hidden_by_pair(spent: MoECost, forward: Any, backward: Any, twice: Array) -> Array:
    """Seconds that a joined pair hides of a block's messages, nearly at most: each behind the turn of the other half
    that comes after it, in the middle of a stage; at its ends there is less to hide behind.

    `twice`: backward runs forward again, first, and has messages that no turn of a forward pass is left for. No pair is
    shorter than all of its messages, which share a link.
    """
    rest = forward - spent.dispatch - spent.combine - spent.computing
    rest_back = backward - spent.dispatch_back - spent.combine_back - spent.computing_back
    rest_back = rest_back - twice * (spent.dispatch + spent.combine)
    ahead = np.minimum(spent.dispatch, rest_back) + np.minimum(spent.combine, spent.computing_back)
    back = np.minimum(spent.combine_back, spent.computing) + np.minimum(spent.dispatch_back, rest)
    link = (1 + twice) * spent.link + spent.link_back
    return np.asarray(np.maximum(0.0, np.minimum(ahead + back, forward + backward - link)))


def _moe_costs(
    workload: Workload, of: Choices, dealt: EpChoices, links: LinkArrays, shapes: list[BlockShape], layer: Layer
) -> MoECost:
    """Arrays, of what is the same in many combinations worked out once."""
    near = np.array([topology.reaches["ep"].together for topology in links.topologies])[links.at]
    sizes = list(dict.fromkeys(_sizes(workload, shape) for shape in shapes))
    size = np.array([sizes.index(_sizes(workload, shape)) for shape in shapes])[of.shape]
    key = ((size * 65536 + dealt.ep) * len(DISPATCHES) + dealt.dispatch) * 4096 + near
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rows = []
    for at in first.tolist():
        tokens, tp, sp = sizes[size[at]]
        placed = links.topologies[links.at[at]].layout
        layout = structs.replace(placed, sp=sp, dispatch=DISPATCHES[dealt.dispatch[at]])
        spread = ExpertShape(tokens, tp, sp, layout.ep, int(dealt.dispatch[at]), int(near[at]))
        rows.append(MoECost.of(workload, spread, layout, layer))
    return MoECost(*np.array(rows)[inverse.ravel()].T)


def _sizes(workload: Workload, shape: BlockShape) -> tuple[int, int, bool]:
    return shape.samples * workload.seq // shape.cp, shape.tp, shape.sp
