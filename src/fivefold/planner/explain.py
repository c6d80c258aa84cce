"""Which of the ranked layouts to take, why not its neighbours, and whether another batch would do better.

The choice is the simplest layout among those that nobody could tell apart. Published runs of one configuration differ
by 6% between releases of the same software, and the model's own error is of that size. A layout that wins by less and
needs one axis more, or tp over a network, is not worth its trouble.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.cost.collective_time import Reach
from fivefold.cost.model_state import ADAMW
from fivefold.cost.peak_memory import USABLE_FRACTION, Footprint, footprint
from fivefold.cost.step import Workload, estimate
from fivefold.cost.traffic import expected_traffic
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.planner.closed_forms import DISPATCHES
from fivefold.planner.mixed import divide_layers, groups_of, span_problems
from fivefold.planner.mixed_search import can_be_built
from fivefold.planner.option import Option
from fivefold.planner.search import search
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.dtypes import dtype_of_bytes
from fivefold.support.errors import UserError
from fivefold.support.text import either

MAX_NAMED_CAUSES = 3  # causes of a difference at most
RANKS_BY = "a cluster of"  # how a planner's reader gives a number of ranks

EVEN_LAYERS, LAYERS_BY_SPEED = "even layers", "layers by speed"  # over mixed nodes

# The name of each cause of time. Communication is what compute does not hide.
CAUSE_NAMES = {
    "gemm": "matmuls",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "recompute": "recomputation",
    "host": "waiting for the host",
    "tp": "tp collectives",
    "cp": "cp communication",
    "zero": "ZeRO-3 gathers and scatters",
    "ep": "tokens on their way to experts",
    "bubble": "pipeline bubbles and sends",
    "dp": "gradient and weight collectives",
    "optimizer": "optimizer",
    "other": "host work between steps",
}


class Neighbour(NamedTuple):
    """A layout one change away. `slower` is relative to the option; None where it cannot run or does not fit."""

    change: str
    layout: Layout
    slower: float | None
    sentence: str
    memory: float | None = None  # bytes of its fullest rank; None where it cannot run

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, "layout": str(self.layout), "slower": self.slower, "why": self.sentence} | {
            "memory_bytes": self.memory
        }


def neighbours(option: Option) -> list[Neighbour]:
    """The layouts one change away."""
    return [_evaluate_neighbour(option, change, layout) for change, layout in _changes(option.workload)]


def nearest_fit(option: Option, searched: Sequence[Option] | None = None) -> Neighbour | None:
    """The fastest layout one change away that fits; if none does, the planner's choice, if there is one.

    `searched`: the fastest layouts of a search of the same workload, if the caller has made one.
    """
    if fitting := [neighbour for neighbour in neighbours(option) if neighbour.slower is not None]:
        return min(fitting, key=lambda neighbour: neighbour.slower or 0.0)
    try:
        options = search(option.workload).options if searched is None else searched
    except UserError:
        return None
    if not options:
        return None
    best = simplest(options)
    change = str(best.layout)
    return Neighbour(change, best.layout, best.seconds / option.seconds - 1, f"{change} {difference(option, best)}")


def _changes(workload: Workload) -> Iterator[tuple[str, Layout]]:
    """One degree doubled or halved (dp takes the difference), or one other choice."""
    layout, world = workload.layout, workload.cluster.world
    if workload.groups:
        yield (EVEN_LAYERS, structs.replace(layout, split=())) if layout.split else (LAYERS_BY_SPEED, layout)
    # A split by hand belongs to its degrees; over mixed nodes it is made anew.
    for axis in () if layout.split and not workload.groups else ("tp", "pp", "cp"):
        value = getattr(layout, axis)
        for other in (2 * value, value // 2):
            dp = world // max(1, layout.world // layout.dp // value * other) if other else 0
            if dp:
                changes: dict[str, Any] = {axis: other, "dp": dp}
                if axis == "tp":
                    changes["sp"] = other > 1 and (layout.sp or layout.tp == 1)
                if layout.dp * layout.microbatches % dp == 0:  # as many as keep microbatches as large as they are
                    changes["microbatches"] = layout.dp * layout.microbatches // dp
                yield f"{axis}={other}", structs.replace(layout, **changes)
    for zero in range(4):
        if abs(zero - layout.zero) == 1 and layout.has_copies(workload.spec):
            yield f"zero={zero}", structs.replace(layout, zero=zero)
    for recompute in ("none", "selective", "full"):
        if recompute != layout.recompute:
            yield f"recompute={recompute}", structs.replace(layout, recompute=recompute)
    for count in (2 * layout.microbatches, layout.microbatches // 2):
        if count:
            yield f"microbatches={count}", structs.replace(layout, microbatches=count)
    yield from ep_changes(workload)
    if layout.tp > 1:
        yield ("no sp" if layout.sp else "sp"), structs.replace(layout, sp=not layout.sp)
    if layout.pp > 1:
        for record in CATALOGUE.values():
            if record is layout.record or not (record.planned or (workload.groups and record.uses_stage_times)):
                continue
            if record.planned or can_be_built(layout):
                change = f"schedule={record.name}"
                yield change, structs.replace(layout, schedule=record.name, chunks=0, split=())


def ep_changes(workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Neighbours of a layout: ep doubled or halved, or the other way for tokens to travel."""
    layout = workload.layout
    if workload.spec.experts is None:
        return
    for other in (2 * layout.ep, layout.ep // 2):
        if other:
            dispatch = layout.dispatch if other > 1 else "alltoall"
            yield f"ep={other}", structs.replace(layout, ep=other, dispatch=dispatch)
    if layout.ep > 1:
        other_kind = DISPATCHES[1 - DISPATCHES.index(layout.dispatch)]
        yield f"dispatch={other_kind}", structs.replace(layout, dispatch=other_kind)


def _evaluate_neighbour(option: Option, change: str, layout: Layout) -> Neighbour:
    workload = replace(option.workload, layout=layout, groups=())
    if option.workload.groups:  # each layout has its own division of the layers, unless the option has none
        if problems := span_problems(workload.cluster, layout):
            return Neighbour(change, layout, None, f"{change} cannot run: {problems[0]}")
        layout = structs.replace(layout, split=())
        workload = replace(workload, layout=layout, groups=groups_of(workload.cluster, layout))
    problems = layout.problems(
        workload.spec, world=workload.cluster.world, seq=workload.seq, batch=workload.batch, ranks_by=RANKS_BY
    )
    if problems:
        return Neighbour(change, layout, None, f"{change} cannot run: {problems[0]}")
    if workload.groups and change != EVEN_LAYERS and (option.layout.split or change == LAYERS_BY_SPEED):
        workload = divide_layers(workload)
        layout = workload.layout
    needs = footprint(workload)
    limit = USABLE_FRACTION * workload.device_memory_of(needs.rank)
    if needs.total > limit:
        why = (
            f"{change} does not fit: needs {needs.total / 1e9:.1f} GB on pipeline rank {needs.rank}, limit "
            f"{limit / 1e9:.1f} GB; {_what_grew(option, needs)}"
        )
        return Neighbour(change, layout, None, why, needs.total)
    other = Option(workload, estimate(workload), needs)
    slower = other.seconds / option.seconds - 1
    return Neighbour(change, layout, slower, f"{change} {difference(option, other)}", needs.total)


def _what_grew(option: Option, needs: Footprint) -> str:
    """Why it is too large: the part that grew most over an option that fits, else its largest part."""
    before, parts = option.footprint.parts, needs.parts
    grown = max(parts, key=lambda part: parts[part] - before.get(part, 0.0))
    now, was = (f"{size / 1e9:.1f}" for size in (parts[grown], before.get(grown, 0.0)))
    if option.fits and now != was:
        return f"{grown} {now} GB instead of {was}"
    largest = max(parts, key=lambda part: parts[part])
    return f"its largest part is {largest}, {parts[largest] / 1e9:.1f} GB"


def difference(best: Option, other: Option) -> str:
    """How another option's step time differs, and why."""
    slower = other.seconds / best.seconds - 1
    if abs(slower) < 0.001:
        return "takes the same time"
    here, there = best.estimate.causes, other.estimate.causes
    sign = -1 if slower < 0 else 1
    moved = {cause: (there[cause] - here[cause]) / best.seconds for cause in there}
    cause, *others = sorted(moved, key=lambda cause: -sign * moved[cause])
    named, explained = [cause], moved[cause]
    while (
        len(named) < MAX_NAMED_CAUSES and sign * explained < abs(slower) / 2
    ):  # less than half of it does not explain it
        named.append(others.pop(0))
        explained += moved[named[-1]]
    why = ", ".join(f"{CAUSE_NAMES[name]} {moved[name]:+.1%}" for name in named) + " of the "
    why += "shorter step" if any(abs(moved[name]) > 1 for name in named) else "step"  # whose a share above 100% is
    if "ep" in named and (best.estimate.expert_messages.hidden_by_pair > 0) != (
        other.estimate.expert_messages.hidden_by_pair > 0
    ):
        why += f", which joined pairs hide {'there' if other.estimate.expert_messages.hidden_by_pair else 'here'}"
    if slower < 0:
        return f"is {-slower:.1%} faster: {why}"
    across = [
        axis
        for axis in ("tp", "cp", "ep")
        if other.workload.topology.across(axis) and not best.workload.topology.across(axis)
    ]
    if set(named) & set(across):
        why += f", because {either(across)} then leaves the node"
    return f"is {slower:.1%} slower: {why}"


class AxisTraffic(NamedTuple):
    """What a rank sends along an axis in one step, by class of link. Experts' messages count as ep's, even where
    another axis has the same ranks."""

    axis: str
    kind: str
    calls: int
    payload: int  # bytes handed to the collectives
    inside: float  # bytes on the wire within the node
    across: float  # and between nodes
    seconds: float | None  # that these would take if nothing hid them; None: of the whole world, a few numbers


def traffic_rank(option: Option) -> int:
    """The pipeline rank whose traffic is shown: the one with the memory peak, or else the first that has experts."""
    workload, peak_rank = option.workload, option.footprint.rank
    if workload.spec.experts is None:
        return peak_rank
    ranks = workload.layout.placement.of_rank
    with_experts = [
        rank for rank, stages in enumerate(ranks) if any(_with_experts(workload, stage) for stage in stages)
    ]
    return peak_rank if peak_rank in with_experts else with_experts[0]


def _with_experts(workload: Workload, stage: int) -> bool:
    return any(workload.spec.kinds(layer).routed for layer in workload.stages[stage].layers)


def traffic(option: Option) -> list[AxisTraffic]:
    """What `traffic_rank` sends, by axis and kind, within the node and across. For experts' tokens, the mean."""
    workload, rank, rows = option.workload, traffic_rank(option), []
    topology = workload.block_cost_of(rank).topology
    dtype = dtype_of_bytes(workload.block_cost.activation_bytes)
    splits = workload.splits_backward if workload.groups else None
    sizes = (workload.spec, workload.layout, workload.seq, workload.batch, dtype)
    sent = expected_traffic(
        *sizes, coords=RankCoords(pp=rank), splits_backward=splits, keep_ep_axis=True,
        optimizer=workload.software.matrices or ADAMW,
    )  # fmt: skip
    for row in sent:
        reach = topology.reaches.get(row.axis)  # None: the whole world, the pipeline's ends: a few numbers
        share, wire = _share_across_nodes(row.kind, reach, workload.cluster.nodes), float(row.wire)
        handed: float = row.payload
        if (
            reach and row.kind == "all-to-all"
        ):  # as if a rank's own share, which may not be packed, were like the others
            handed = wire * reach.ranks / (reach.ranks - 1)
        alone = topology.time(row.kind, row.axis, handed / row.calls, row.calls) if reach else None
        rows.append(AxisTraffic(row.axis, row.kind, row.calls, row.payload, wire * (1 - share), wire * share, alone))
    return rows


def _share_across_nodes(kind: str, reach: Reach | None, nodes: int) -> float:
    """The share of a rank's bytes that goes to other nodes."""
    if (reach.nodes if reach else nodes) == 1:
        return 0.0
    if reach is None or kind == "send":
        return 1.0
    if kind == "all-to-all":  # as much to each of the other ranks
        return (reach.ranks - reach.together) / (reach.ranks - 1)
    return 1 / reach.together  # a ring leaves a node once for each that it enters


EQUAL_TIME = 0.03  # of a step: a smaller difference counts as none
NETWORK_TP_MARGIN = 0.10  # by which tp over a network must win, since no run that judges the planner has it
MIN_BATCH_GAIN = 0.05  # in tokens per second, for another batch to be worth a sentence


def complexity(option: Option) -> int:
    """How much there is to get right: axes in use, a split backward, and tp over a network. The last counts as two
    axes: its collectives are in every block and wait for the slowest port, so nobody uses it who can avoid it."""
    layout = option.layout
    axes = (layout.pp > 1) * 2 + (layout.tp > 1) * (3 if option.workload.topology.across("tp") else 1) + (layout.cp > 1)
    return axes + (layout.pp > 1 and layout.splits_backward) + (layout.replicate > 1) + (layout.ep > 1)


def simplest(options: Sequence[Option]) -> Option:
    """The simplest within 3% of the fastest; within 10%, if the fastest has tp over a network and another has not."""
    first = min(options, key=lambda option: option.seconds)
    inside = [option for option in options if not option.workload.topology.across("tp")]
    if inside and first not in inside:
        within = min(inside, key=lambda option: option.seconds)
        first, options = (
            (within, inside) if within.seconds <= (1 + NETWORK_TP_MARGIN) * first.seconds else (first, options)
        )
    near = [option for option in options if option.seconds <= (1 + EQUAL_TIME) * first.seconds]
    return min(near, key=lambda option: (complexity(option), option.seconds))


def better_batch(option: Option) -> str:
    """A sentence about a batch nearby that divides better over the devices; empty where the given one is good."""
    workload, unit = option.workload, option.workload.cluster.groups[0].gpus
    if workload.batch % unit == 0 or workload.groups:
        return ""
    near = max(unit, round(workload.batch / unit) * unit)
    better = search(replace(workload, batch=near), top=1).best
    gain = better.tokens_per_second / option.tokens_per_second - 1
    if gain < MIN_BATCH_GAIN:
        return ""
    return (
        f"a batch of {workload.batch} divides badly over {workload.cluster.world} devices; batch={near} gives "
        f"{gain:.0%} more tokens/s, with {better.layout}"
    )
