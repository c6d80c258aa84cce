"""What a collective costs. Traffic is counted by axis and kind; the counter and the planner share these definitions.

Payload is the larger side of a collective on one rank: the input of an all-reduce, a reduce-scatter, an all-to-all or a
send, and the output of an all-gather. Wire is what that rank then sends around a ring of N: payload x (N-1)/N, twice
that for an all-reduce (a reduce-scatter and an all-gather), and the payload itself for a send.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from fivefold.layout.axes import shown_order

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


def wire(kind: Kind, payload: int, size: int) -> Fraction:
    """Bytes that each of `size` ranks sends for a payload."""
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
