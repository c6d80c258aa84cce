"""Which of the ranked layouts to take, and whether another batch would do better.

The choice is the simplest layout among those that nobody could tell apart. Published runs of one configuration differ
by 6% between releases of the same software, and the model's own error is of that size. A layout that wins by less and
needs one axis more is not worth its trouble.
"""

from collections.abc import Sequence
from dataclasses import replace

from fivefold.layout.layout import Layout
from fivefold.plan.search.search import Option, search

ALIKE = 0.03  # of a step
WORTH = 0.05  # more tokens per second: from here on another batch is worth a sentence


def complexity(layout: Layout) -> int:
    """How much there is to get right: axes in use, and a schedule to trust."""
    axes = (layout.pp > 1) * 2 + (layout.tp > 1) + (layout.cp > 1)
    return axes + (layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved")) + (layout.replicate > 1)


def simplest(options: Sequence[Option]) -> Option:
    """Of those within 3% of the fastest."""
    fastest = min(option.seconds for option in options)
    near = [option for option in options if option.seconds <= (1 + ALIKE) * fastest]
    return min(near, key=lambda option: (complexity(option.layout), option.seconds))


def better_batch(option: Option) -> str:
    """A sentence about a batch nearby that divides better over the devices; empty where the given one is good."""
    case, unit = option.case, option.case.cluster.groups[0].gpus
    if case.batch % unit == 0 or case.groups:
        return ""
    near = max(unit, round(case.batch / unit) * unit)
    better = search(replace(case, batch=near), top=1).best
    gain = better.tokens_per_second / option.tokens_per_second - 1
    if gain < WORTH:
        return ""
    return (
        f"a batch of {case.batch} divides badly over {case.cluster.world} devices; batch={near} gives {gain:.0%} more "
        f"tokens/s, with {better.layout}"
    )
