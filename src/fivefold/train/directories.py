"""Directories of runs of one name: NAME, NAME-2, NAME-3 ..."""

from pathlib import Path


def numbered(name: str, number: int) -> str:
    return name if number < 2 else f"{name}-{number}"


def next_number(parent: Path, name: str) -> int:
    """The first that is not there."""
    number = 1
    while (parent / numbered(name, number)).exists():
        number += 1
    return number


def newest(parent: Path, name: str) -> Path:
    return parent / numbered(name, next_number(parent, name) - 1)
