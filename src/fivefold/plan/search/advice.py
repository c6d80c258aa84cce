"""Which of the ranked layouts to take: the simplest among those that nobody could tell apart.

Published runs of one configuration differ by 6% between releases of the same software, and the model's own error is of
that size. A layout that wins by less and needs one axis more is not worth its trouble.
"""

from collections.abc import Sequence

from fivefold.layout.layout import Layout
from fivefold.plan.search.search import Option

ALIKE = 0.03  # of a step


def trouble(layout: Layout) -> int:
    """How much there is to get right: axes in use, and a schedule to trust."""
    axes = (layout.pp > 1) * 2 + (layout.tp > 1) + (layout.cp > 1)
    return axes + (layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved")) + (layout.replicate > 1)


def simplest(options: Sequence[Option]) -> Option:
    """Of those within 3% of the fastest."""
    fastest = min(option.seconds for option in options)
    near = [option for option in options if option.seconds <= (1 + ALIKE) * fastest]
    return min(near, key=lambda option: (trouble(option.layout), option.seconds))
