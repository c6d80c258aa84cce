"""What a collective costs, and how traffic is told apart: by axis and kind. Shared by who counts and who predicts.

Payload is the larger side of a collective on one rank: what an all-reduce, a reduce-scatter, an all-to-all or a send is
given, and what an all-gather makes. Wire is what that rank then sends around a ring of N: payload x (N-1)/N, twice that
for an all-reduce (a reduce-scatter and an all-gather), and the payload itself for a send.

Axes that are the same ranks are one axis: with cp=1, zero is dp, and with nothing else world is, too. Traffic goes to
the first of AXES that has those ranks, so that a count does not depend on whether torch made one group or two for them.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from fivefold.layout.layout import Layout

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]
AXES = ("dp", "cp", "tp", "pp", "replicate", "zero", "data", "world", "ends")


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


def wire(kind: Kind, payload: int, size: int) -> Fraction:
    """Bytes that each of `size` ranks sends for a payload."""
    if kind == "send":
        return Fraction(payload)
    return payload * Fraction(size - 1, size) * (2 if kind == "all-reduce" else 1)


def total(parts: Iterable[Traffic]) -> list[Traffic]:
    """One row for each axis and kind, in the order of AXES."""
    sums: dict[tuple[str, Kind], Traffic] = {}
    for part in parts:
        seen = sums.get((part.axis, part.kind))
        if seen is not None:
            part = Traffic(*part[:2], seen.calls + part.calls, seen.payload + part.payload, seen.wire + part.wire)
        sums[part[:2]] = part
    order = {axis: place for place, axis in enumerate(AXES)}
    return sorted(sums.values(), key=lambda row: (order.get(row.axis, len(AXES)), row.axis, row.kind))


def times(row: Traffic, steps: int) -> Traffic:
    return Traffic(*row[:2], steps * row.calls, steps * row.payload, steps * row.wire)


def sizes(layout: Layout) -> dict[str, int]:
    """Ranks along each axis. The ends of a pipeline are two ranks, if they are not one (V placements)."""
    shards = layout.dp // layout.replicate * layout.cp
    degrees = {axis: getattr(layout, axis) for axis in ("dp", "cp", "tp", "pp", "replicate")}
    ends = 1 + (layout.placement.owner[-1] > 0)
    return degrees | {"zero": shards, "data": layout.dp * layout.cp, "world": layout.world, "ends": ends}


def same_axis(layout: Layout, axis: str) -> str:
    """The first of AXES that has the ranks of `axis`."""
    degrees = {"shard": layout.dp // layout.replicate} | sizes(layout)
    data = ("replicate", "shard", "cp")
    made_of = {"dp": data[:2], "zero": data[1:], "data": data, "world": (*data, "tp", "pp")}
    if layout.pp == 2 == degrees["ends"]:
        made_of["ends"] = ("pp",)

    def ranks(name: str) -> set[str]:
        return {part for part in made_of.get(name, (name,)) if degrees[part] > 1}

    return next(name for name in AXES if ranks(name) == ranks(axis))
