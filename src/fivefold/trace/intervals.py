"""Sets of moments, as sorted lists of (start, end) that do not touch."""

from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]


def union(parts: Iterable[Interval]) -> Intervals:
    """All moments of any parts, which may overlap and be in any order."""
    found: Intervals = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def minus(whole: Intervals, taken: Intervals) -> Intervals:
    """The moments of `whole` that are not in `taken`."""
    found: Intervals = []
    next_ = 0
    for start, end in whole:
        while next_ < len(taken) and taken[next_][1] <= start:
            next_ += 1
        place = next_  # what is taken here may reach into the next of the whole
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > start:
                found.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            place += 1
        if start < end:
            found.append((start, end))
    return found


def common(a: Intervals, b: Intervals) -> Intervals:
    return minus(a, minus(a, b))


def length(parts: Intervals) -> float:
    return sum(end - start for start, end in parts)
