"""Which group of a mixed cluster each pipeline rank is on.

Every replica spans all groups, so that none is slower than another: the batch is dealt out evenly over dp, and a
replica of slow devices would hold up all others. A pipeline passes through one group after the other.
"""

import math
from collections.abc import Iterator
from itertools import permutations

from msgspec import structs

from fivefold.hardware.cluster import Cluster, Group
from fivefold.hardware.short_form import table_of
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.support.formatting import either

MOST_ORDERS = 6  # of groups, that are tried


def merged(cluster: Cluster) -> Cluster:
    """The same nodes with those of one kind in one group, in the order in which the kinds first appear.

    Ranks that were measured are where they are: of those only neighbours are of one group."""
    found: list[Group] = []
    for group in cluster.groups:
        at = next((at for at, one in enumerate(found) if structs.replace(one, nodes=group.nodes) == group), None)
        if at is None or (at < len(found) - 1 and not _may_move(cluster)):
            found.append(group)
        else:
            found[at] = structs.replace(found[at], nodes=found[at].nodes + group.nodes)
    return Cluster(tuple(found))


def orders(cluster: Cluster) -> Iterator[Cluster]:
    """The orders in which a pipeline can pass through the groups, the given one first."""
    for number, groups in enumerate(permutations(cluster.groups) if _may_move(cluster) else [cluster.groups]):
        if number < MOST_ORDERS:
            yield Cluster(groups)


def _may_move(cluster: Cluster) -> bool:
    """Whether its nodes can be numbered otherwise. A file's cannot: a job names the file, whose order is the ranks'."""
    return all(group.from_catalogue for group in cluster.groups)


def groups_of(cluster: Cluster, layout: Layout) -> tuple[int, ...]:
    """The group of each pipeline rank, where every replica spans all groups; empty where there is one group."""
    if len(cluster.groups) == 1:
        return ()
    row = layout.world // layout.pp  # ranks of one stage
    degrees = ",".join(f"{axis}={many}" for axis, many in layout.degrees.items() if many > 1) or "dp=1"
    if any(group.world % row for group in cluster.groups):
        raise UserError(
            f"{degrees} does not span the mixed nodes of {cluster}: a pipeline stage has dp x tp x cp = {row} "
            f"ranks, and the groups have {either([group.world for group in cluster.groups])}; nearest: a dp x tp x cp "
            f"that divides {math.gcd(*(group.world for group in cluster.groups))}"
        )
    if cut := next((group for group in cluster.groups if group.world // layout.dp % group.gpus), None):
        most = math.gcd(*(group.nodes for group in cluster.groups))
        near = f"a dp that divides {most}" if most > 1 else "dp=1"
        raise UserError(
            f"{degrees} gives each of its {layout.dp} replicas {cut.world // layout.dp} of the {cut.gpus} GPUs of a "
            f"node of {cut}: ranks of a node have consecutive numbers, and those of a replica too, so a replica takes "
            f"whole nodes of every kind; nearest: {near}, with more cp, tp or pp"
        )
    return tuple(at for at, group in enumerate(cluster.groups) for _ in range(group.world // row))


def spanning(cluster: Cluster, layout: Layout) -> list[str]:
    """Why a layout's degrees do not span the groups; empty where they do."""
    try:
        groups_of(cluster, layout)
    except UserError as error:
        return error.problems
    return []


def hosts(cluster: Cluster, dp: int, given: str) -> str:
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
