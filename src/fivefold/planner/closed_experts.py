"""Closed forms of models with experts, for many layouts at once (closed.py).

What a block costs without its experts depends on a few choices (a `BlockShape`), what experts cost on fewer (an
`ExpertShape`): each is worked out once, by the functions that time a single layout, and the closed forms add them up.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import MoEMemory, saved_activations
from fivefold.cost.moe import MoEBlock, ParamShare, Travel, block_share, experts_share
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
    mean_of,
    split_backward,
    waiting,
)
from fivefold.spec.model import ModelSpec
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
    """Seconds and bytes of a block without its experts, of one that never had any, and of the ends."""

    forward: float
    backward: float
    plain_forward: float
    plain_backward: float
    computing: float
    computing_back: float
    plain_computing: float
    plain_computing_back: float
    plain_waiting: float
    launching: float
    port: float
    unhidden: float
    ends: float
    saved: float  # activations of a microbatch
    plain_saved: float
    again: float  # bytes that recompute makes again
    passing: float
    logits: float
    p2p_bytes: float
    full: float

    @classmethod
    def of(cls, workload: Workload, shape: BlockShape) -> "DenseCost":
        """Of the mean block."""
        counted = workload.spec.counted()
        pairs = pairs_of(workload.spec)
        return mean_of([(cls.of_kinds(workload, shape, *pair), counted[pair[0]] * counted[pair[1]]) for pair in pairs])

    @classmethod
    def of_kinds(cls, workload: Workload, shape: BlockShape, kinds: Layer, other: Layer) -> "DenseCost":
        """A block of these kinds, and for `plain_...` one of the others."""
        workload = shape.of(workload)
        layout, work = workload.layout, workload.block_cost.of(kinds)
        plain, block = work.of(other).around, work.around
        own, everything = (
            _held(workload, how, kinds, other) for how in (layout, structs.replace(layout, recompute="none"))
        )
        stream = work.activation_bytes * work.tokens * workload.spec.hidden / (shape.tp if shape.sp else 1)
        return cls(
            forward=block.forward.total - block.forward.host,
            backward=block.inputs.total - block.inputs.host + block.weights.total - work.added(work.own.experts),
            plain_forward=plain.forward.total,
            plain_backward=plain.inputs.total + plain.weights.total,
            computing=computing(block)[0],
            computing_back=computing(block)[1],
            plain_computing=computing(plain)[0],
            plain_computing_back=computing(plain)[1],
            plain_waiting=waiting(workload, plain),
            launching=work.launching,
            port=work.port,
            unhidden=split_backward(workload).of(kinds).around.inputs.total - block.inputs.total,
            ends=sum(part.total for part in (*work.top, *work.bottom)),
            saved=own.around,
            plain_saved=own.plain,
            again=everything.around - own.around,
            passing=2 * stream + work.cp_buffer_bytes - everything.shared,
            logits=loss_peak(workload.spec, layout, workload.software, work.tokens),
            p2p_bytes=p2p_bytes(workload),
            full=shape.recompute == "full",
        )


class _Held(NamedTuple):
    """Bytes of a microbatch."""

    around: float  # that a block keeps beside its experts
    plain: float  # of a block without any
    shared: float  # of the first, its shared expert's


def pairs_of(spec: ModelSpec) -> list[tuple[Layer, Layer]]:
    """Every kind of layer with experts, with every kind without; or, if there is none, with itself: nothing has it."""
    mixed = [kinds for kinds in spec.counted() if kinds.routed]
    plain = [kinds for kinds in spec.counted() if not kinds.routed] or mixed[:1]
    return [(kinds, other) for kinds in mixed for other in plain]


def _held(workload: Workload, layout: Layout, kinds: Layer, other: Layer) -> _Held:
    sizes = (
        workload.spec,
        layout,
        workload.software,
        workload.batch,
        workload.seq,
        workload.block_cost.activation_bytes,
    )
    mixed = saved_activations(*sizes, kinds=kinds)
    return _Held(mixed.total - mixed.experts, saved_activations(*sizes, kinds=other).total, mixed.mlp)


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
    def of(cls, workload: Workload, spread: ExpertShape, layout: Layout) -> "MoECost":
        """`layout` is any that spreads experts so."""
        work = replace(workload, layout=layout, batch=layout.dp).block_cost
        sizes = (spread.tokens, work.activation_bytes)
        moe = MoEBlock(
            workload.spec,
            layout,
            work.device,
            work.topology,
            workload.software,
            *sizes,
            workload.precision,
            workload.imbalance,
        )
        held = MoEMemory(workload.spec, layout, workload.software, *sizes, workload.imbalance)
        travel = Travel(moe)  # with backward passes in one piece, which hide most
        there, back, back_again, there_again = travel.messages
        less, less_back = travel.hidden
        kernels, kernels_back = moe.matmuls[0] + moe.memory[0], moe.matmuls[1] + moe.matmuls[2] + moe.memory[1]
        added = work.added(experts_share(workload.spec, spread.ep))
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
    """The closed forms of a model with experts. `block` has the mean of its layers."""

    dealt: EpChoices
    placed: LinkArrays

    @property
    def links(self) -> LinkArrays:
        return self.placed

    @property
    def _mixed(self) -> int:
        """Layers with experts."""
        return len(self.workload.spec.routed_layers)

    @property
    def own(self) -> ParamShare:
        """Of a block with experts."""
        experts: Any = experts_share(self.workload.spec, 1) / self.dealt.ep
        return ParamShare(self._dense(routed=True), experts)

    def _dense(self, *, routed: bool) -> Any:
        """Dense parameters of the largest block with experts, or of one without."""
        spec = self.workload.spec
        kinds = [kinds for kinds in spec.counted() if kinds.routed == routed]
        shares = {
            tp: max((block_share(spec, tp, 1, kind).dense for kind in kinds), default=0.0)
            for tp in np.unique(self.of.tp).tolist()
        }
        return np.array([shares.get(tp, 0.0) for tp in range(max(shares) + 1)])[self.of.tp]

    @property
    def parameters(self) -> ParamShare:
        spec, own, several = self.workload.spec, self.own, np.ceil(self.workload.spec.layers / self.of.pp)
        table = spec.vocab * spec.hidden / self.of.tp
        few = spec.layers - self._mixed
        full = few * self._dense(routed=False) + self._mixed * own.dense + table * (1 if spec.tied else 2)
        dense: Any = np.where(self.alone, full, several * own.dense + table)
        layers: Any = np.where(self.alone, self._mixed, several)
        return ParamShare(dense, layers * own.experts)

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
) -> ExpertClosed:
    counted, pairs = workload.spec.counted(), pairs_of(workload.spec)
    by_kinds = {
        pair: DenseCost(*np.array([DenseCost.of_kinds(workload, shape, *pair) for shape in shapes])[of.shape].T)
        for pair in pairs
    }
    around = mean_of([(by_kinds[pair], counted[pair[0]] * counted[pair[1]]) for pair in pairs])
    links = LinkArrays.of(workload, of, dealt.ep)
    spent = _spent(workload, of, dealt, links, shapes)
    recompute = np.array([RECOMPUTES.index(shape.recompute) for shape in shapes])[of.shape]
    again = np.choose(recompute, [0.0, spent.moved, spent.forward])
    forward, backward = around.forward + spent.forward, around.backward + spent.backward + again
    itself = workload.software.computes_itself  # the host, whose time is then not behind the device's
    wait = np.maximum(0.0, around.launching - (0.0 if itself else forward + backward))
    unlike: dict[Layer, Array] = {}
    for (kinds, other), own in by_kinds.items() if len(counted) > 1 else ():
        both = own.forward + spent.forward + own.backward + spent.backward + again
        unlike[kinds] = both + np.maximum(0.0, own.launching - (0.0 if itself else both))
        if other in counted and not other.routed:
            unlike[other] = np.asarray(own.plain_forward + own.plain_backward)
    held = np.choose(recompute, [spent.everything, spent.outputs, 0.0])
    twice = recompute == RECOMPUTES.index("full")
    share = 1 / np.where(twice, 3, 2)  # of the host's work, in forward

    def mean(mixed: Any, plain: Any) -> Array:
        """Of the layers with experts and those without."""
        few = (workload.spec.layers - len(workload.spec.routed_layers)) / workload.spec.layers
        return np.asarray((1 - few) * mixed + few * plain)

    means: dict[str, Any] = {
        "forward": mean(forward + share * wait, around.plain_forward),
        "backward": mean(backward + (1 - share) * wait, around.plain_backward),
        "computing": mean(around.computing + spent.kernels, around.plain_computing),
        "computing_back": mean(around.computing_back + spent.kernels_back + again, around.plain_computing_back),
        "waiting": mean(0.0 * wait if itself else wait, around.plain_waiting),
        "paired": mean(_paired(spent, forward, backward, twice), 0.0),
        "saved": mean(around.saved + held, around.plain_saved),
        "transient": around.again + spent.everything - held + spent.worst + around.passing,
    }
    same = ("port", "unhidden", "ends", "logits", "p2p_bytes", "full")
    block = BlockArrays(**means, **{name: getattr(around, name) for name in same})
    return ExpertClosed(workload, of, block, pipelines, dealt, links, unlike=unlike)


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


def _spent(workload: Workload, of: Choices, dealt: EpChoices, links: LinkArrays, shapes: list[BlockShape]) -> MoECost:
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
        rows.append(MoECost.of(workload, spread, layout))
    return MoECost(*np.array(rows)[inverse.ravel()].T)


def _sizes(workload: Workload, shape: BlockShape) -> tuple[int, int, bool]:
    return shape.samples * workload.seq // shape.cp, shape.tp, shape.sp
