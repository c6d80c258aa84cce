"""Long lists of problems, cut short: one mistake can break thousands of messages."""

from collections.abc import Sequence

MOST = 20


def shortened(sentences: Sequence[str], about: str) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(sentences) - MOST
    return [*sentences[:MOST], f"{about}: and {more} more problems"] if more > 0 else list(sentences)
