"""Build, prove and time schedules by name or file, all for the same ranks, microbatches and durations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.schedule.catalogue import CATALOGUE, build, is_file, record_of
from fivefold.schedule.check import prove
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.schedule.times import Times
from fivefold.support.errors import UserError

OPTIONS = ("chunks", "group", "memory")


@dataclass(frozen=True)
class Query:
    """What is asked for: schedules by name or file, for these numbers.

    `chunks`, `group` and `memory` go to the schedules that take them, so that several can be compared in one command;
    where none of them does, the option is passed on all the same, to be refused.
    """

    names: Sequence[str]
    pp: int | None
    microbatches: int | None
    chunks: int | None = None
    group: int | None = None
    memory: int | None = None
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        for option in ("pp", "microbatches", *OPTIONS):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UserError(f"--{option} is {value}, and must be at least 1")

    def simulate(self, name: str) -> Simulation:
        """A schedule of the catalogue, or of a file, on the clock."""
        schedule = self.load(name) if is_file(name) else self.build(name)
        return simulate(schedule, self.times.costs(schedule.placement))

    def compare(self) -> dict[str, Simulation | UserError]:
        """Every schedule, or why it is refused. What refuses all of them is an error of the query."""
        results: dict[str, Simulation | UserError] = {}
        for name in self.names:
            try:
                results[name] = self.simulate(name)
            except UserError as refusal:
                results[name] = refusal
        refusals = [result for result in results.values() if isinstance(result, UserError)]
        if len(refusals) == len(results):
            raise UserError(dict.fromkeys(map(str, refusals)))
        return results

    def build(self, name: str) -> Schedule:
        record = record_of(name)
        if self.pp is None or self.microbatches is None:
            options = {"--pp": self.pp, "--microbatches": self.microbatches}
            missing = " and ".join(option for option, value in options.items() if value is None)
            raise UserError(f"{name} needs {missing}, as in --pp 4 --microbatches 8")
        given = {option: value for option, value in self.options().items() if record.takes(option)} | self.untaken()
        costs = self.times.costs(record.placement(self.pp, given.get("chunks", 0)))
        return prove(build(name, self.pp, self.microbatches, costs=costs, **given))

    def load(self, name: str) -> Schedule:
        schedule = record_of(name).schedule
        assert schedule is not None
        for option, given, held in (("--pp", self.pp, schedule.p), ("--microbatches", self.microbatches, schedule.m)):
            if given not in (None, held):
                raise UserError(f"{option} is {given}, and {name} is a schedule for {held}; leave the option out")
        for option in self.untaken():
            raise UserError(f"{name} is a schedule as it stands, and --{option} cannot change it; leave the option out")
        return schedule

    def options(self) -> dict[str, int]:
        values = {option: getattr(self, option) for option in OPTIONS}
        return {option: value for option, value in values.items() if value is not None}

    def untaken(self) -> dict[str, int]:
        """The options that none of the schedules takes."""
        records = [CATALOGUE[name] for name in self.names if name in CATALOGUE]
        return {option: n for option, n in self.options().items() if not any(one.takes(option) for one in records)}
