"""Whole numbers."""

import math


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
