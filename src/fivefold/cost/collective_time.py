"""How long a collective takes: ring or tree, within a node or across, by where an axis's ranks really are.

    topology = Topology(device, 8, layout, software.order)  # 8 GPUs a node
    topology.time("all-reduce", "tp", 64 << 20)         # seconds

Alpha-beta: a ring of n passes its bytes on n-1 times (twice that for an all-reduce), each time a latency; a tree needs
log2 of the nodes, carries a little less, and is for all-reduces. Across nodes all of a group's ranks on a node send at
once, each through its own port, so a group with g ranks a node has g times a port's bandwidth, until the links inside
are slower.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from msgspec import structs

from fivefold.cost.kernels import Device
from fivefold.hardware.accelerators import LINKS, Link
from fivefold.layout.axes import PLACEMENT_ORDER, shown_order
from fivefold.layout.layout import Layout

# ---- collective cost ------------------------------------------------------------------------------------------------
# What a collective costs. Traffic is counted by axis and kind; the counter and the planner share these definitions.
#
# Payload is the larger side of a collective on one rank: the input of an all-reduce, a reduce-scatter, an all-to-all
# or a send, and the output of an all-gather. Wire is what that rank then sends around a ring of N: payload x (N-1)/N,
# twice that for an all-reduce (a reduce-scatter and an all-gather), and the payload itself for a send. Where an
# all-to-all has a share of its own for each rank, wire is the sum of the shares of the others.


Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]


class Traffic(NamedTuple):
    """What one rank did along one axis with one kind of collective."""

    axis: str
    kind: Kind
    calls: int
    payload: int  # bytes
    wire: Fraction  # bytes; a share of a padded or odd-sized tensor need not be whole

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"wire": float(self.wire)}


def wire(kind: Kind, payload: int, size: int, sent: int | None = None) -> Fraction:
    """Bytes that each of `size` ranks sends for a payload. `sent`: to the others, where their shares are unlike."""
    if sent is not None:
        return Fraction(sent)
    if kind == "send":
        return Fraction(payload)
    return payload * Fraction(size - 1, size) * (2 if kind == "all-reduce" else 1)


def total(parts: Iterable[Traffic]) -> list[Traffic]:
    """One row for each axis and kind, in the table's order of axes."""
    sums: dict[tuple[str, Kind], Traffic] = {}
    for part in parts:
        seen = sums.get((part.axis, part.kind))
        if seen is not None:
            part = Traffic(*part[:2], seen.calls + part.calls, seen.payload + part.payload, seen.wire + part.wire)
        sums[part[:2]] = part
    return sorted(sums.values(), key=lambda row: (shown_order(row.axis), row.axis, row.kind))


def times(row: Traffic, steps: int) -> Traffic:
    return Traffic(*row[:2], steps * row.calls, steps * row.payload, steps * row.wire)


# ---- links ----------------------------------------------------------------------------------------------------------


TREE_BANDWIDTH = 0.85  # of a ring's bandwidth
COLLECTIVE_START = (
    8.4e-6  # seconds before a collective's first byte: `baseLat` of ring/Simple in NCCL's tuning model (tuning.cc)
)


class Reach(NamedTuple):
    """The ranks of an axis: how many, and how many of them share a node."""

    ranks: int
    together: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.together)


@dataclass(frozen=True)
class Topology:
    device: Device
    gpus: int  # of a node
    layout: Layout
    order: tuple[str, ...] = PLACEMENT_ORDER
    start: float = COLLECTIVE_START

    @cached_property
    def reaches(self) -> dict[str, Reach]:
        """By axis: the degrees in the order in which the software places them, then the compound axes made of them."""
        layout = self.layout
        return _reaches(
            type(layout), tuple(layout.degrees.items()), (layout.replicate, layout.ep), self.gpus, self.order
        )

    def across(self, axis: str) -> bool:
        """Whether an axis leaves the node."""
        return self.reaches[axis].nodes > 1

    def by_peers(self, axis: str) -> bool:
        """Whether its ranks reach each other's memory: within a node, or where one kind of link joins them all."""
        card = self.device.accelerator
        return not self.across(axis) or card.inside == card.across

    def bandwidth(self, axis: str) -> float:
        """Bytes/s that one rank passes on in a large collective."""
        card, achieved, reach = self.device.accelerator, self.device.achieved, self.reaches[axis]
        inside = card.inside.bandwidth * achieved.inside
        return inside if reach.nodes == 1 else min(inside, reach.together * card.across.bandwidth * achieved.across)

    def time(self, kind: Kind, axis: str, payload: float, calls: int = 1) -> float:
        """Seconds of collectives that are handed `payload` bytes each."""
        card, achieved, reach = self.device.accelerator, self.device.achieved, self.reaches[axis]
        n = reach.ranks
        if n == 1 or calls == 0:
            return 0.0
        if kind == "send":
            if reach.nodes > 1:
                return calls * (card.across.latency + payload / (card.across.bandwidth * achieved.across))
            return calls * (card.inside.latency + payload / (card.inside.bandwidth * achieved.inside))
        if kind == "all-to-all":
            return calls * self._trade(reach, payload)
        inner, outer = card.inside.latency, card.across.latency
        rounds = 2 if kind == "all-reduce" else 1
        start = rounds * (0.0 if card.is_cpu else self.start)  # a link of gloo's was measured with its start
        carried = rounds * payload * (n - 1) / n / self.bandwidth(axis)
        # A ring passes every rank, and from node to node once each.
        ring = start + rounds * ((n - reach.nodes) * inner + (reach.nodes if reach.nodes > 1 else 0) * outer) + carried
        if kind != "all-reduce":  # gathers and scatters have no tree: every rank's part is another
            return calls * ring
        steps = start + rounds * (math.log2(max(2, reach.nodes)) * outer * (reach.nodes > 1) + reach.together * inner)
        return calls * min(ring, steps + carried / TREE_BANDWIDTH)

    def _trade(self, reach: Reach, payload: float) -> float:
        """All-to-all: what is for other nodes differs from rank to rank, and each rank's leaves by its own port."""
        inside, across, achieved = self.device.accelerator.inside, self.device.accelerator.across, self.device.achieved
        near = payload * (reach.together - 1) / reach.ranks / (inside.bandwidth * achieved.inside)
        if reach.nodes == 1:
            return inside.latency + near
        far = payload * (reach.ranks - reach.together) / reach.ranks / (across.bandwidth * achieved.across)
        return across.latency + max(near, far)


def _together(size: int, stride: int, gpus: int) -> int:
    """How many of `size` ranks, `stride` apart, share a node, in the group that is worst off."""
    if stride >= gpus:
        return 1
    if gpus % (stride * size) and stride * size < gpus:
        return max(1, size // 2)  # nodes are no multiple of the groups: some lie across two
    return max(1, min(size, gpus // stride))


@lru_cache(maxsize=4096)  # a search asks for the same degrees with every other choice
def _reaches(
    kind: type[Layout], degrees: tuple[tuple[str, int], ...], more: tuple[int, int], gpus: int, order: tuple[str, ...]
) -> dict[str, Reach]:
    named: dict[str, Any] = dict(degrees)
    layout, reaches, stride = kind(**named, replicate=more[0], ep=more[1]), dict[str, Reach](), 1
    for axis in dict.fromkeys((*order, *PLACEMENT_ORDER)):  # what an order does not name is furthest apart
        size = getattr(layout, axis)
        reaches[axis] = Reach(size, _together(size, stride, gpus))
        stride *= size
    within = reaches["dp"].together
    reaches["shard"] = Reach(layout.shard, min(layout.shard, within))
    reaches["replicate"] = Reach(layout.replicate, _together(layout.replicate, layout.shard, within))
    # Experts are sharded over the ranks of a stage, neighbours first.
    near = math.prod(reaches[axis].together for axis in ("tp", "cp", "dp"))
    reaches["ep"] = Reach(layout.ep, min(layout.ep, near))
    reaches["efsdp"] = Reach(layout.efsdp, max(1, min(layout.efsdp, near // layout.ep)))
    for axis, parts in layout.table.items():
        if axis not in (*reaches, "world", "embedding") and reaches.keys() >= set(parts):
            reaches[axis] = Reach(layout.size(axis), math.prod(reaches[part].together for part in parts))
    return reaches


# ---- messages -------------------------------------------------------------------------------------------------------
# Links under NCCL's protocol for small messages, as a decode step sends them.


# NCCL's LL protocol has these latencies a hop where Simple, which the catalogue has for training, has
# the ones on the left (src/graph/tuning.cc, `hwLat`); it sends a flag with every word, hence half the bandwidth. Within
# a node servers have kernels of their own that cost about a launch beside the hops (vLLM's and SGLang's one-shot and
# two-shot all-reduces: 4-10 us for KBs, 20-45 us for 2 MB, on 2-8 H100s); between nodes NCCL adds its base latency.
LL_LATENCY = {LINKS["NVLink4"].latency: 0.6e-6, LINKS["PCIe5"].latency: 1.0e-6, LINKS["InfiniBand-NDR"].latency: 2.7e-6}
LL_BANDWIDTH = 0.5
NCCL_BASE = 6.8e-6


def with_small_message_links(topology: Topology) -> Topology:
    own = topology.device.accelerator
    links = structs.replace(own, inside=_small_message_link(own.inside), across=_small_message_link(own.across))
    return replace(topology, device=Device(links, topology.device.achieved))


def _small_message_link(link: Link) -> Link:
    """A link of the catalogue, for small messages; links with measured latencies are left as they are."""
    if link.latency not in LL_LATENCY:
        return link
    return structs.replace(link, latency=LL_LATENCY[link.latency], bandwidth=LL_BANDWIDTH * link.bandwidth)
