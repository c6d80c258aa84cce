"""Closed forms of models with experts, for many layouts at once (closed.py).

What a block costs without its experts depends on a few choices (a `BlockShape`), what experts cost on fewer (an
`ExpertShape`): each is worked out once, by the functions that time a single layout, and the closed forms add them up.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import MoEMemory, saved_activations
from fivefold.cost.moe import MoEBlock, Travel, block_share
from fivefold.cost.peak_memory import loss_peak
from fivefold.cost.step import Workload, p2p_bytes
from fivefold.layout.layout import Layout
from fivefold.planner.closed import (
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
from fivefold.planner.closed_ranks import UnlikeClosed, joined, own_share
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
    launching: float
    port: float
    unhidden: float
    ends: float
    saved: float  # activations of a microbatch
    again: float  # bytes that recompute makes again
    passing: float
    logits: float
    p2p_bytes: float
    full: float

    @classmethod
    def of(cls, workload: Workload, shape: BlockShape, kinds: Layer) -> "DenseCost":
        """A block of these kinds."""
        workload = shape.of(workload)
        layout, work = workload.layout, workload.block_cost.of(kinds)
        block = work.around
        own, everything = (_held(workload, how, kinds) for how in (layout, structs.replace(layout, recompute="none")))
        stream = work.activation_bytes * work.tokens * workload.spec.hidden / (shape.tp if shape.sp else 1)
        return cls(
            forward=block.forward.total - block.forward.host,
            backward=block.inputs.total - block.inputs.host + block.weights.total - work.added(work.own.experts),
            computing=computing(block)[0],
            computing_back=computing(block)[1],
            launching=work.launching,
            port=work.port,
            unhidden=split_backward(workload).of(kinds).around.inputs.total - block.inputs.total,
            ends=sum(part.total for part in (*work.top, *work.bottom)),
            saved=own.around,
            again=everything.around - own.around,
            passing=2 * stream + work.cp_buffer_bytes - everything.shared,
            logits=loss_peak(workload.spec, layout, workload.software, work.tokens),
            p2p_bytes=p2p_bytes(workload),
            full=shape.recompute == "full",
        )


class _Held(NamedTuple):
    """Bytes of a microbatch."""

    around: float  # that a block keeps beside its experts
    shared: float  # of these, its shared expert's


def _held(workload: Workload, layout: Layout, kinds: Layer) -> _Held:
    sizes = (
        workload.spec,
        layout,
        workload.software,
        workload.batch,
        workload.seq,
        workload.block_cost.activation_bytes,
    )
    mixed = saved_activations(*sizes, kinds=kinds)
    return _Held(mixed.total - mixed.experts, mixed.mlp)


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
    def of(cls, workload: Workload, spread: ExpertShape, layout: Layout, kinds: Layer) -> "MoECost":
        """`layout` is any that spreads experts so."""
        work = replace(workload, layout=layout, batch=layout.dp).block_cost
        sizes = (spread.tokens, work.activation_bytes)
        moe = MoEBlock(
            workload.spec,
            kinds,
            layout,
            work.device,
            work.topology,
            workload.software,
            *sizes,
            workload.precision,
            workload.imbalance,
        )
        held = MoEMemory(workload.spec, kinds, layout, workload.software, *sizes, workload.imbalance)
        travel = Travel(moe)  # with backward passes in one piece, which hide most
        there, back, back_again, there_again = travel.messages
        less, less_back = travel.hidden
        kernels, kernels_back = moe.matmuls[0] + moe.memory[0], moe.matmuls[1] + moe.matmuls[2] + moe.memory[1]
        added = work.added(block_share(workload.spec, 1, spread.ep, kinds).experts)
        return cls(
            forward=kernels + moe.sent[0] - less + moe.gathered[0],
            backward=kernels_back + moe.sent[1] - less_back + moe.gathered[1] + added,
            kernels=kernels,
            kernels_back=kernels_back,
            moved=moe.memory[0],
            computing=moe.computing[0],
            computing_back=moe.computing[1] + moe.computing[2],
            dispatch=there - less,
            combine=back,
            combine_back=back_again,
            dispatch_back=there_again - less_back,
            link=there + back,
            link_back=there_again + back_again,
            everything=held.saved,
            outputs=held.saved_selective,
            worst=max(held.during_weighting, held.during_last_linear),
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
    for kinds in workload.spec.counted():
        block = (
            _with_experts(workload, of, dealt, links, shapes, kinds)
            if kinds.routed
            else BlockArrays.of_all(workload, shapes, of.shape, kinds)
        )
        own = own_share(workload.spec, of, kinds, dealt.ep)
        parts.append(ExpertClosed(workload, of, block, own, pipelines, dealt, links))
    return joined(workload.spec, parts)


def _with_experts(
    workload: Workload, of: Choices, dealt: EpChoices, links: LinkArrays, shapes: list[BlockShape], kinds: Layer
) -> BlockArrays:
    """A block with experts."""
    around = DenseCost(*np.array([DenseCost.of(workload, shape, kinds) for shape in shapes])[of.shape].T)
    spent = _spent(workload, of, dealt, links, shapes, kinds)
    recompute = np.array([RECOMPUTES.index(shape.recompute) for shape in shapes])[of.shape]
    again = np.choose(recompute, [0.0, spent.moved, spent.forward])
    forward, backward = around.forward + spent.forward, around.backward + spent.backward + again
    itself = workload.software.computes_itself  # the host, whose time is then not behind the device's
    wait = np.maximum(0.0, around.launching - (0.0 if itself else forward + backward))
    held = np.choose(recompute, [spent.everything, spent.outputs, 0.0])
    twice = recompute == RECOMPUTES.index("full")
    share = 1 / np.where(twice, 3, 2)  # of the host's work, in forward
    own: dict[str, Any] = {
        "forward": forward + share * wait,
        "backward": backward + (1 - share) * wait,
        "computing": around.computing + spent.kernels,
        "computing_back": around.computing_back + spent.kernels_back + again,
        "waiting": 0.0 * wait if itself else wait,
        "paired": _paired(spent, forward, backward, twice),
        "saved": around.saved + held,
        "transient": around.again + spent.everything - held + spent.worst + around.passing,
    }
    same = ("port", "unhidden", "ends", "logits", "p2p_bytes", "full")
    return BlockArrays(**own, **{name: getattr(around, name) for name in same})


def _paired(spent: MoECost, forward: Any, backward: Any, twice: Array) -> Array:
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


def _spent(
    workload: Workload, of: Choices, dealt: EpChoices, links: LinkArrays, shapes: list[BlockShape], kinds: Layer
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
        rows.append(MoECost.of(workload, spread, layout, kinds))
    return MoECost(*np.array(rows)[inverse.ravel()].T)


def _sizes(workload: Workload, shape: BlockShape) -> tuple[int, int, bool]:
    return shape.samples * workload.seq // shape.cp, shape.tp, shape.sp
