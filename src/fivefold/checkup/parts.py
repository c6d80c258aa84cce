"""The parts of a checkup in their order, and the time that each of them may take.

budget = Budget(minutes=10)
budget.share(PARTS[0])      # seconds that it should take: it does as much as fits into them
budget.limit(PARTS[0])      # seconds after which it is ended; what it leaves unused, the later parts have
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean

PartName = Literal["machines", "proofs", "lost-rank", "calibration", "layouts"]
USUAL_MINUTES = 10.0
LEAST_MINUTES, MOST_MINUTES = 0.5, 24 * 60.0
_REPORTING_S = 5.0  # seconds that are left for the page
_KEPT = 0.6  # of the shares of later parts, that no part may take


class CheckupPart(NamedTuple):
    name: PartName
    title: str
    weight: float  # of the time
    does: str


PARTS = (
    CheckupPart("machines", "Machines", 1.5, "examines every rank, link, disk and clock, and compares them (doctor)"),
    CheckupPart("proofs", "Proofs", 2.5, "proves a sample of layouts against one process, on these devices (verify)"),
    CheckupPart(
        "lost-rank", "A lost rank", 2.0, "kills a rank of a short run, starts again and compares the loss curves"
    ),
    CheckupPart("calibration", "Calibration", 2.5, "measures matmuls, memory and links for the planner (calibrate)"),
    CheckupPart("layouts", "Layouts", 4.5, "trains the planner's best layout and two rivals, beside what it predicted"),
)
NAMES = tuple(part.name for part in PARTS)


def chosen_parts(skip: str) -> tuple[CheckupPart, ...]:
    """The parts that are left without those of a list with commas."""
    skipped = [word.strip() for word in skip.split(",") if word.strip()]
    for word in skipped:
        if word not in NAMES:
            raise UserError(f"--skip {word} names no part; {did_you_mean(word, NAMES)}", "option.choice")
    left = tuple(part for part in PARTS if part.name not in skipped)
    if not left:
        raise UserError(f"--skip {skip} leaves no part of {', '.join(NAMES)}; leave one out of it", "option.empty")
    return left


def check_minutes(minutes: float) -> float:
    """The minutes, if they are a time that a checkup can take."""
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:  # nan is refused as well
        raise UserError(
            f"--minutes {minutes:g} is not between {LEAST_MINUTES:g} and {MOST_MINUTES:g}; "
            f"{USUAL_MINUTES:g} are enough for most machines",
            "option.range",
        )
    return minutes


@dataclass
class Budget:
    """The time of a whole checkup, shared by the parts that are left in proportion to their weights."""

    minutes: float
    parts: tuple[CheckupPart, ...] = PARTS
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self.start

    @property
    def left(self) -> float:
        return max(0.0, 60 * self.minutes - _REPORTING_S - self.spent)

    def share(self, part: CheckupPart) -> float:
        """Seconds that a part should take if it begins now."""
        return self.left * self._fraction(part)

    def limit(self, part: CheckupPart) -> float:
        """Seconds that it may take: slow machines get more than the share, and most of the others' shares are kept."""
        return self.left * (1 - _KEPT * (1 - self._fraction(part)))

    def _fraction(self, part: CheckupPart) -> float:
        return part.weight / sum(other.weight for other in self.parts[self.parts.index(part) :])

    def planned(self) -> dict[PartName, float]:
        """The share of each part, if every one takes all of its own."""
        total = sum(part.weight for part in self.parts)
        return {part.name: (60 * self.minutes - _REPORTING_S) * part.weight / total for part in self.parts}
