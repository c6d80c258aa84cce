"""Small things that reading and refusing have in common: numbers as people write them, long lists cut short."""

from collections.abc import Sequence

MOST = 20  # sentences; one mistake can break thousands of messages


def whole_number(word: str) -> int | None:
    """A number as people write one; '²' is a digit to Python too, and thousands of digits are a slip."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 18 else None


def figure(value: float) -> str:
    """A number to read: 25.5, 0.0125, 33005.5, 1234568; an exponent only where digits would not help."""
    return f"{value:.0f}" if 1e6 <= abs(value) < 1e12 else f"{value:.6g}"


def shortened(sentences: Sequence[str], about: str) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(sentences) - MOST
    return [*sentences[:MOST], f"{about}: and {more} more problems"] if more > 0 else list(sentences)
