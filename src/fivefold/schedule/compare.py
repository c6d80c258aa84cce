"""One wish, any schedule: build, prove and time schedules by name for the same ranks, microbatches and durations."""

from dataclasses import dataclass, field
from pathlib import Path

from fivefold.errors import UserError
from fivefold.schedule.catalogue import CATALOGUE, build, entry_of
from fivefold.schedule.check import prove
from fivefold.schedule.files import load
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.schedule.times import Times

SCHEDULE_FILES = (".txt", ".json")


@dataclass(frozen=True)
class Wish:
    """What a command line asks for. `chunks`, `group` and `memory` go to the schedules that have them, so that several
    can be compared in one command."""

    pp: int | None
    microbatches: int | None
    chunks: int | None = None
    group: int | None = None
    memory: int | None = None
    times: Times = field(default_factory=Times)

    def simulate(self, name: str) -> Simulation:
        """A schedule of the catalogue, or of a file, on the clock."""
        schedule = self.load(name) if _is_file(name) else self.build(name)
        return simulate(schedule, self.times.costs(schedule.placement))

    def compare(self) -> dict[str, Simulation | UserError]:
        """Every schedule of the catalogue, or why it is refused."""
        results: dict[str, Simulation | UserError] = {}
        for name in CATALOGUE:
            try:
                results[name] = self.simulate(name)
            except UserError as refusal:
                results[name] = refusal
        return results

    def build(self, name: str) -> Schedule:
        entry = entry_of(name)
        if self.pp is None or self.microbatches is None:
            options = {"--pp": self.pp, "--microbatches": self.microbatches}
            missing = " and ".join(option for option, value in options.items() if value is None)
            raise UserError(f"{name} needs {missing}, as in --pp 4 --microbatches 8")
        if self.pp < 1:
            raise UserError(f"--pp is {self.pp}, and must be at least 1")
        chunks = self.chunks if entry.any_chunks else None
        group = self.group if name == "interleaved" else None
        memory = self.memory if name == "auto" else None
        costs = self.times.costs(entry.place(self.pp, chunks or entry.chunks))
        return prove(build(name, self.pp, self.microbatches, chunks=chunks, group=group, costs=costs, memory=memory))

    def load(self, name: str) -> Schedule:
        schedule = load(Path(name))
        for option, given, held in (("--pp", self.pp, schedule.p), ("--microbatches", self.microbatches, schedule.m)):
            if given not in (None, held):
                raise UserError(f"{option} is {given}, and {name} is a schedule for {held}; leave the option out")
        return schedule


def _is_file(name: str) -> bool:
    return name not in CATALOGUE and (Path(name).suffix in SCHEDULE_FILES or "/" in name or Path(name).is_file())
