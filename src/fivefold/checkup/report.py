"""What a checkup has found, as the data that its JSON has: one file that a person can send, and that others read."""

from typing import Any, Literal

import msgspec

from fivefold.checkup.parts import PartName

FORMAT = 1
Status = Literal["passed", "found", "failed", "out of time", "interrupted", "not run", "left out"]
GOOD: tuple[Status, ...] = ("passed", "left out")


class PartReport(msgspec.Struct, kw_only=True):
    """One part: how it ended, and what is to be said of it."""

    name: PartName
    title: str
    status: Status = "not run"
    limit: float = 0.0  # seconds
    seconds: float = 0.0
    says: list[str] = []
    findings: list[str] = []  # what was found wrong, a sentence each
    data: dict[str, Any] = {}

    @property
    def good(self) -> bool:
        return self.status in GOOD


class LayoutStep(msgspec.Struct, frozen=True, kw_only=True):
    """A layout's step, measured or predicted: seconds of it, and bytes of the fullest rank."""

    seconds: float
    exposed: float | None = None  # seconds of collectives that nothing hides
    bubble: float | None = None
    memory: float | None = None  # bytes that the allocator has given out; None: not comparable


class LayoutRun(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was trained, beside what the planner predicted."""

    layout: str
    role: str  # "the planner's best", "rival"
    measured: LayoutStep | None = None  # None: it did not run
    catalogue: LayoutStep | None = None  # predicted with the catalogue's figures; None: it does not know the device
    calibrated: LayoutStep | None = None  # predicted with those that were measured here
    failed: str = ""  # why it did not run
    out_of_time: bool = False  # whether that was the time that it may take

    def error(self, which: str) -> float | None:
        """The relative error of a prediction of the step: predicted / measured - 1."""
        predicted: LayoutStep | None = getattr(self, which)
        return predicted.seconds / self.measured.seconds - 1 if predicted and self.measured else None


class CheckupReport(msgspec.Struct, kw_only=True):
    """The whole, as its file has it."""

    checkup: int = FORMAT
    fivefold: str
    day: str
    command: str
    minutes: float  # that it was allowed
    seconds: float = 0.0
    setup: dict[str, Any] = {}
    parts: list[PartReport] = []
    job: dict[str, Any] = {}  # model, data.seq, train of the layouts, as the planner reads a job
    clusters: dict[str, Any] = {}  # "catalogue" and "calibrated", as `plan --cluster` reads them
    runs: list[LayoutRun] = []
    corrections: list[str] = []

    @property
    def ok(self) -> bool:
        return all(part.good for part in self.parts)

    def part(self, name: PartName) -> PartReport | None:
        return next((part for part in self.parts if part.name == name), None)
