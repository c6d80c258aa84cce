"""Text for messages: the nearest name, numbers in readable form."""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def nearest(name: str, choices: Iterable[str], most: int = 1) -> list[str]:
    """The choices most similar to a misspelled name, best first; empty if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[hit] for hit in get_close_matches(name.lower(), by_lower, n=most, cutoff=0.5)]


def did_you_mean(name: str, choices: Sequence[str]) -> str:
    """The tail of an "unknown X" sentence: the nearest name, or all of them when nothing is near."""
    hits = nearest(name, choices)
    return f"did you mean {hits[0]!r}?" if hits else f"known: {', '.join(choices) or 'none'}"


def printable(text: str) -> str:
    """The text with "?" for characters that a terminal would act on, or that end a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def either(values: Sequence[object]) -> str:
    """The values as text: 'a', 'a or b', 'a, b or c'."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def first_of_many(names: Sequence[str], most: int = 3) -> str:
    """The first of many names: 'a, b, c and 4 more'."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def si(value: float, digits: int = 3) -> str:
    """8030261248 -> '8.03B': decimal prefixes, for parameters, tokens and FLOPs."""
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}" if abs(value) < 1000 * size else f"{value / size:.0f}{suffix}"
    return f"{value:.{digits}g}"


def bytes_text(count: float) -> str:
    """1610612736 -> '1.50 GiB': binary prefixes, for memory and files."""
    for size, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {suffix}"
    return f"{count:.0f} B"


def plural(number: int, what: str) -> str:
    """A number of things as text: 'no graphs', '1 graph', '2 graphs'."""
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def graphs_text(graphs: int, breaks: dict[str, int], *, blocks: bool = True) -> str:
    """How many graphs were compiled, and the reasons for the breaks between them; `blocks`: whether blocks were."""
    total = sum(breaks.values())
    why = "".join(f"\n  {count} x {reason.strip().splitlines()[0]}" for reason, count in breaks.items())
    text = f"compiled: {plural(graphs, 'graph')}, {plural(total, 'break')} between them{why}"
    return text if blocks else f"{text}\nblocks are not: with recompute=selective this layout would break their graphs"


def whole_number(word: str) -> int | None:
    """The whole number that a word is, None if it is none. '²', a digit to Python, and more than 18 digits are none."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 18 else None


def figure(value: float) -> str:
    """A number as text: 25.5, 0.0125, 33005.5, 1234568; with an exponent only if it is very large or small."""
    return f"{value:.0f}" if 1e6 <= abs(value) < 1e12 else f"{value:.6g}"


# ---- numbers --------------------------------------------------------------------------------------------------------
# Whole numbers.


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
