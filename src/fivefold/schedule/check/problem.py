"""What a proof finds."""

from typing import NamedTuple


class Problem(NamedTuple):
    """A broken obligation: a sentence with rank, action and cause, and where to look."""

    sentence: str
    rank: int | None = None
    place: int | None = None  # in the rank's list, counted from 0
    obligation: str = ""

    def __str__(self) -> str:
        return f"{self.obligation}: {self.sentence}" if self.obligation else self.sentence
