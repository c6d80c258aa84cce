"""Silent data corruption: which ranks must hold, or compute, the same bits, and which of them do not.

Pure functions of digests that all ranks have gathered, so that all come to the same verdict. `corruption.py` computes
and gathers them.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from fivefold.layout.layout import Layout

# ---- replicas -------------------------------------------------------------------------------------------------------

ReplicaAxes = tuple[str, ...]  # the axes over which a tensor is replicated, such as ("fsdp", "tp"), sorted
_WITNESSES = (
    ("", "fsdp", "efsdp"),  # over ZeRO's axis, of dense or of expert weights; "": sharded over it
    ("", "replicate"),  # over the replicas of hybrid sharding
    ("", "tp"),
    ("", "embedding"),  # a tied embedding, on the first and the last stage
)


def replica_axes(axes: Sequence[str], layout: Layout) -> ReplicaAxes:
    """The axes that have more than one rank."""
    return tuple(sorted({axis for axis in axes if axis and layout.size(axis) > 1}))


def all_replica_axes(layout: Layout, *, has_experts: bool) -> list[ReplicaAxes]:
    """Those that any tensor of a layout can have, in one order on all ranks: they index what is gathered."""
    choices = (axes for axes in product(*_WITNESSES) if has_experts or "efsdp" not in axes)
    distinct = {replica_axes(axes, layout) for axes in choices}
    if has_experts:  # the bias that balances the experts is replicated over the whole stage
        distinct.add(replica_axes(["stage"], layout))
    return sorted(distinct - {()})


def replica_groups(layout: Layout, axes: ReplicaAxes) -> list[list[int]]:
    """The groups of ranks that hold replicas: the ranks that groups along the axes connect.

    With "embedding", the ranks of the first and the last stages alone.
    """
    parent = list(range(layout.world))  # union-find

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for axis in axes:
        for ranks in layout.groups(axis):
            for rank in ranks[1:]:
                parent[root(rank)] = root(ranks[0])
    members = set(range(layout.world))
    if "embedding" in axes:
        members = {rank for pair in layout.groups("embedding") for rank in pair}
    groups_by_root: dict[int, list[int]] = {}
    for rank in sorted(members):
        groups_by_root.setdefault(root(rank), []).append(rank)
    return list(groups_by_root.values())


class Disagreement(NamedTuple):
    minority: tuple[int, ...]  # ranks that hold other bits than the majority; without a majority, the whole group
    majority: tuple[int, ...]  # empty: nobody can tell who is right


def find_disagreement(digests: Mapping[int, Hashable]) -> Disagreement | None:
    """A vote among the digests of a replica group, by rank; None if all agree."""
    counts = Counter(digests.values())
    if len(counts) < 2:
        return None
    majority_digest, votes = counts.most_common(1)[0]
    if 2 * votes <= len(digests):
        return Disagreement(tuple(digests), ())
    minority = tuple(rank for rank, digest in digests.items() if digest != majority_digest)
    return Disagreement(minority, tuple(rank for rank in digests if rank not in minority))


# ---- replays --------------------------------------------------------------------------------------------------------
# In a replayed step (every `watch.replay` steps) each rank also computes the first microbatch of its partner, the next
# rank along dp. Where their gradients differ, both compute it once more. A rank that differs from its own first result
# is named; so is one that twice gets the same, but differs from two others: from its partner, and from the rank whose
# partner it is.


def replay_partners(layout: Layout) -> dict[int, int]:
    """By rank, the rank whose microbatch it replays: the next one along dp with the same shard of experts; itself if
    there is none."""
    ranks_per_dp = layout.cp * layout.tp
    stride = layout.ep // math.gcd(layout.ep, ranks_per_dp)  # an ep group has ranks of so many consecutive dp positions
    partners = {}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        partners[rank] = layout.rank(**at | {"dp": (at["dp"] + stride) % layout.dp})
    return partners


class ReplayDigests(NamedTuple):
    """Digests of gradients, by the rank that computed them."""

    own: Mapping[int, Hashable]  # of its own microbatch, in the step
    partner: Mapping[int, Hashable]  # of its partner's, before the step
    own_again: Mapping[int, Hashable] = {}
    partner_again: Mapping[int, Hashable] = {}


class CorruptionVerdict(NamedTuple):
    transient: tuple[int, ...]  # ranks whose two results differ
    persistent: tuple[int, ...]  # ranks whose results agree, and differ from two others
    ambiguous: tuple[int, ...]  # ranks of pairs that persistently differ, where nobody can tell which is wrong


def mismatched_pairs(partner_of: Mapping[int, int], digests: ReplayDigests) -> list[tuple[int, int]]:
    """(rank, its partner) where the two got different gradients of the partner's microbatch."""
    return [(rank, partner) for rank, partner in partner_of.items() if digests.partner[rank] != digests.own[partner]]


def corruption_verdict(partner_of: Mapping[int, int], digests: ReplayDigests) -> CorruptionVerdict:
    """Who of the mismatched pairs computed wrongly."""
    transient: set[int] = set()
    persistent_pairs: list[tuple[int, int]] = []
    for rank, partner in mismatched_pairs(partner_of, digests):
        partner_changed = digests.own[partner] != digests.own_again[partner]
        rank_changed = digests.partner[rank] != digests.partner_again[rank]
        if partner_changed:
            transient.add(partner)
        if rank_changed:
            transient.add(rank)
        if not (partner_changed or rank_changed):
            persistent_pairs.append((rank, partner))
    persistent: set[int] = set()
    ambiguous: set[int] = set()
    for pair in persistent_pairs:
        # Who differs from two others is wrong, unless the other rank of the pair also does.
        in_two_pairs = {rank for rank in pair if sum(rank in other for other in persistent_pairs) > 1}
        if len(in_two_pairs) == 1:
            persistent |= in_two_pairs
        else:
            ambiguous |= set(pair)
    ranks_by_kind = (transient, persistent, ambiguous - persistent)
    return CorruptionVerdict(*(tuple(sorted(ranks)) for ranks in ranks_by_kind))


# ---- messages -------------------------------------------------------------------------------------------------------

_MAX_LISTED = 4  # tensors or ranks in a sentence


def rank_label(layout: Layout, rank: int) -> str:
    place = layout.place(rank)
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def names_text(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return between.join(names[:_MAX_LISTED]) + more


def _rank_labels(layout: Layout, ranks: Sequence[int]) -> str:
    return names_text([rank_label(layout, rank) for rank in ranks], " and ")


def disagreement_message(layout: Layout, found: Disagreement, tensors: list[str]) -> str:
    ranks, verb = _rank_labels(layout, found.minority), "hold" if len(found.minority) > 1 else "holds"
    if found.majority:
        others = ("ranks " if len(found.majority) > 1 else "rank ") + names_text([str(rank) for rank in found.majority])
        return f"{ranks} {verb} different bits than {others} of {names_text(tensors)}"
    return f"{ranks} should hold the same bits of {names_text(tensors)}, but do not; no majority tells who is right"


def corruption_message(layout: Layout, found: CorruptionVerdict) -> str:
    phrases = [
        (found.transient, "got different gradients for the same microbatch in two runs"),
        (found.persistent, "consistently gets different gradients for the same microbatches than two others"),
        (found.ambiguous, "consistently get different gradients for the same microbatch; which is right is unknown"),
    ]
    message = "; ".join(f"{_rank_labels(layout, ranks)} {phrase}" for ranks, phrase in phrases if ranks)
    shares_work = layout.tp * layout.cp * layout.pp * layout.ep > 1
    return message + ("; an error of one rank in a group reaches all that compute with it" if shares_work else "")
