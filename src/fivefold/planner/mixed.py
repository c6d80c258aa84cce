"""The group of a mixed cluster that each pipeline rank runs on, and the division of layers by their speed.

Every replica spans all groups, so that none is slower than another: dp divides the batch evenly, and a replica of slow
devices would hold up all others. A pipeline passes through one group after the other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, islice, permutations

from msgspec import structs

from fivefold.cost.peak_memory import USABLE_FRACTION, Footprint, footprint_of
from fivefold.cost.step import Workload, estimate, with_full_backward
from fivefold.hardware.cluster import Cluster, Group, table_of
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.support.text import either

MOST_ORDERS = 6  # of groups, that are tried


def merge_groups(cluster: Cluster) -> Cluster:
    """The same nodes, with all nodes of one kind in one group, in the order in which the kinds first appear.

    Nodes of a cluster file keep their places, so only neighbours are merged."""
    groups: list[Group] = []
    for group in cluster.groups:
        at = next((at for at, known in enumerate(groups) if structs.replace(known, nodes=group.nodes) == group), None)
        if at is None or (at < len(groups) - 1 and not _may_move(cluster)):
            groups.append(group)
        else:
            groups[at] = structs.replace(groups[at], nodes=groups[at].nodes + group.nodes)
    return Cluster(tuple(groups))


def orders(cluster: Cluster) -> Iterator[Cluster]:
    """The orders in which a pipeline can pass through the groups, the given one first."""
    for number, groups in enumerate(permutations(cluster.groups) if _may_move(cluster) else [cluster.groups]):
        if number < MOST_ORDERS:
            yield Cluster(groups)


def _may_move(cluster: Cluster) -> bool:
    """Whether its nodes can be renumbered. A file's cannot: a job names the file, and its order is the ranks' order."""
    return all(group.from_catalogue for group in cluster.groups)


def groups_of(cluster: Cluster, layout: Layout) -> tuple[int, ...]:
    """The group of each pipeline rank, if every replica spans all groups; empty if there is one group."""
    if len(cluster.groups) == 1:
        return ()
    row = layout.world // layout.pp  # ranks of one stage
    degrees = ",".join(f"{axis}={many}" for axis, many in layout.degrees.items() if many > 1) or "dp=1"
    if any(group.world % row for group in cluster.groups):
        raise UserError(
            f"{degrees} does not span the mixed nodes of {cluster}: a pipeline stage has dp x tp x cp = {row} "
            f"ranks, and the groups have {either([group.world for group in cluster.groups])}; nearest: a dp x tp x cp "
            f"that divides {math.gcd(*(group.world for group in cluster.groups))}",
            "layout.nodes.span",
        )
    if cut := next((group for group in cluster.groups if group.world // layout.dp % group.gpus), None):
        most = math.gcd(*(group.nodes for group in cluster.groups))
        near = f"a dp that divides {most}" if most > 1 else "dp=1"
        raise UserError(
            f"{degrees} gives each of its {layout.dp} replicas {cut.world // layout.dp} of the {cut.gpus} GPUs of a "
            f"node of {cut}: ranks of a node have consecutive numbers, and those of a replica too, so a replica takes "
            f"whole nodes of every kind; nearest: {near}, with more cp, tp or pp",
            "layout.nodes.replica",
        )
    return tuple(at for at, group in enumerate(cluster.groups) for _ in range(group.world // row))


def span_problems(cluster: Cluster, layout: Layout) -> list[str]:
    """Why a layout's degrees do not span the groups; empty if they do."""
    try:
        groups_of(cluster, layout)
    except UserError as error:
        return error.problems
    return []


def hosts_in_rank_order(cluster: Cluster, dp: int, given: str) -> str:
    """A mixed cluster as its hosts are to be numbered: for each replica its nodes of every kind, in the pipeline's
    order. `given` is how the user wrote it, with the names of their accelerators; a file of tables stays that."""
    try:
        tables = [table_of(part.strip()) for part in given.split("+")]
        named = {group: table["accelerator"] for group, table in zip(Cluster.parse(given).groups, tables, strict=True)}
    except UserError:
        return given
    names = {structs.replace(group, nodes=1): name for group, name in named.items()}
    replica = []
    for group in cluster.groups:
        count, name = group.nodes // dp, names[structs.replace(group, nodes=1)]
        replica.append(f"{count}x{group.gpus}x{name}" if count > 1 else f"{group.gpus}x{name}")
    return "+".join(replica * dp)


# ---- split ----------------------------------------------------------------------------------------------------------
# How many layers each stage takes where devices differ: by speed, as far as each rank's own memory goes.
#
# divide_layers(workload) # by the ranks' loads: exact where microbatches are many
# refine_split(workload) # then layer by layer, as long as the simulated step becomes shorter


MAX_MEMORY_ROUNDS = 12  # of handing layers on, until all ranks fit
MAX_EVALUATIONS = 300  # of a refinement, at most
MAX_STAGES_OF_DOUBLE_MOVES = 4  # stages, of which two layers are moved at a time


def divide_layers(workload: Workload) -> Workload:
    """The workload with layers divided by speed; a rank that does not fit gives layers to the others, while they have
    room. If there is no room, layers stay where they are fastest. `auto`, which is made for a split, takes 1F1B's."""
    if workload.layout.record.uses_stage_times:
        return replace(
            workload,
            layout=structs.replace(workload.layout, split=divide_layers(with_full_backward(workload)).layout.split),
        )
    caps = [workload.spec.layers] * workload.layout.pp
    quickest = shared = with_split(workload, by_load(workload, caps))
    for _ in range(MAX_MEMORY_ROUNDS):
        over = {rank: many for rank in range(workload.layout.pp) if (many := _excess(shared, rank))}
        if not over:
            return shared
        held = layers_of(shared)
        caps = [held[rank] - over[rank] if rank in over else cap for rank, cap in enumerate(caps)]
        if min(caps) < 0 or sum(caps) < workload.spec.layers:
            break
        shared = with_split(workload, by_load(workload, caps))
    return quickest


def by_load(workload: Workload, caps: Sequence[int]) -> list[int]:
    """Layers of each rank: the next one goes to the rank that would then be done first, if it has room."""
    pp, owner = workload.layout.pp, workload.layout.placement.owner
    each = [_total(workload.block_cost_of(rank).block) for rank in range(pp)]
    load, layers = [0.0] * pp, [0] * pp
    load[owner[0]] += _total(workload.block_cost_of(owner[0]).embedding)
    load[owner[-1]] += _total(workload.block_cost_of(owner[-1]).head_and_loss)
    for _ in range(workload.spec.layers):
        # Among equals the later one, which holds fewer microbatches.
        free = [rank for rank in reversed(range(pp)) if layers[rank] < caps[rank]]
        rank = min(free, key=lambda at: load[at] + each[at])
        load[rank] += each[rank]
        layers[rank] += 1
    return layers


def with_split(workload: Workload, layers: Sequence[int]) -> Workload:
    """The workload with so many layers on each rank. A rank's stages share them evenly, embedding and head included."""
    placement, split = workload.layout.placement, [0] * workload.layout.stages
    for rank, stages in enumerate(placement.of_rank):
        work, load = workload.block_cost_of(rank), dict.fromkeys(stages, 0.0)
        if 0 in load:
            load[0] += _total(work.embedding)
        if placement.stages - 1 in load:
            load[placement.stages - 1] += _total(work.head_and_loss)
        for _ in range(layers[rank]):
            stage = min(reversed(stages), key=load.__getitem__)
            load[stage] += _total(work.block)
            split[stage] += 1
    return replace(workload, layout=structs.replace(workload.layout, split=tuple(split)))


def refine_split(workload: Workload, evaluations: int = MAX_EVALUATIONS) -> Workload:
    """Moves layers of a workload that `divide_layers` made between stages while that shortens the simulated step: one
    layer at a time; with few stages two at a time, if one gains nothing."""
    fits = fits_on_all_ranks(workload)
    best, seconds, left = workload, estimate(workload).seconds, evaluations
    reach = 1
    while left and reach <= (2 if workload.layout.stages <= MAX_STAGES_OF_DOUBLE_MOVES else 1):
        better = None
        for other in islice(_moves(best, reach), left):
            left -= 1
            now = estimate(other).seconds
            if now < seconds * (1 - 1e-9) and (not fits or fits_on_all_ranks(other)):
                better, seconds = other, now
        reach, best = (1, better) if better else (reach + 1, best)
    return best


def _moves(workload: Workload, reach: int) -> Iterator[Workload]:
    """All moves of `reach` layers, each from one stage to another."""
    pairs, split = list(permutations(range(workload.layout.stages), 2)), workload.layout.split
    for moves in combinations_with_replacement(pairs, reach):
        moved = list(split)
        for giver, taker in moves:
            moved[giver] -= 1
            moved[taker] += 1
        if min(moved) >= 0 and tuple(moved) != split:
            yield replace(workload, layout=structs.replace(workload.layout, split=tuple(moved)))


def layers_of(workload: Workload) -> list[int]:
    """The layers of each pipeline rank."""
    return [
        sum(len(workload.stages[number].layers) for number in stages_here)
        for stages_here in workload.layout.placement.of_rank
    ]


def footprints(workload: Workload) -> list[Footprint]:
    return [footprint_of(workload, rank) for rank in range(workload.layout.pp)]


def fits_on_all_ranks(workload: Workload) -> bool:
    """Whether every rank fits into its own device."""
    return all(needs.total <= USABLE_FRACTION * workload.device_memory_of(needs.rank) for needs in footprints(workload))


def _excess(workload: Workload, rank: int) -> int:
    """About how many layers a rank has too many for its device; at least one if it overfills it."""
    here = footprint_of(workload, rank).total
    over, held = here - USABLE_FRACTION * workload.device_memory_of(rank), layers_of(workload)
    if over <= 0 or not held[rank]:
        return int(over > 0)
    fewer = [count - (at == rank) for at, count in enumerate(held)]
    fewer[rank - 1] += 1
    each = here - footprint_of(with_split(workload, fewer), rank).total
    return max(1, min(held[rank], int(over / each))) if each > 0 else 1


def _total(passes: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, passes))
