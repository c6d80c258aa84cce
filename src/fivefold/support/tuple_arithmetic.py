"""Arithmetic on tuples of numbers, field by field; fields may be such tuples themselves.

plus(Point(1, 2), Point(3, 4)) == Point(4, 6)
"""

from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])  # all of numbers, or all of such tuples


def plus(first: T, *others: T) -> T:
    make: Any = type(first)
    columns = zip(first, *others, strict=True)
    return make(*((plus(*column) for column in columns) if isinstance(first[0], tuple) else map(sum, columns)))


def scaled(values: T, factor: float) -> T:
    make: Any = type(values)
    nested = isinstance(values[0], tuple)
    return make(*([scaled(value, factor) for value in values] if nested else [factor * value for value in values]))
