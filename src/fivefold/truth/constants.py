"""All constants that measured runs decide: what each accelerator reaches, and what software does.

constants = Constants.shipped()
constants.on(case)          # the same case under them
"""

from dataclasses import dataclass, replace
from typing import Self

from msgspec import structs

from fivefold.hardware.efficiency import LIKE, Achieved, Software, achieved, software, write
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.time import Case

CLOCK = "H100-96"  # a board at 500 of 700 W: one factor slows all its compute


@dataclass(frozen=True)
class Fitted:
    """A constant: where it belongs, a first guess, and the guess's relative standard deviation."""

    where: str  # an accelerator, or "software"
    name: str
    guess: float
    spread: float


# Guesses are what kernel benchmarks and papers report; runs that say nothing of a constant leave it there.
FITTED = (
    Fitted("A100-80", "gemm", 0.78, 0.15),
    Fitted("A100-80", "stream", 0.80, 0.15),
    Fitted("A100-80", "flash1", 0.30, 0.40),
    Fitted("A100-80", "flash2", 0.55, 0.30),
    Fitted("A100-80", "inside", 0.75, 0.20),
    Fitted("A100-80", "across", 0.80, 0.30),
    Fitted("H100", "gemm", 0.70, 0.15),
    Fitted("H100", "fp8", 0.60, 0.20),
    Fitted("H100", "stream", 0.80, 0.15),
    Fitted("H100", "flash1", 0.20, 0.40),
    Fitted("H100", "flash2", 0.36, 0.20),
    Fitted("H100", "flash3", 0.55, 0.20),
    Fitted("H100", "inside", 0.75, 0.20),
    Fitted("H100", "across", 0.80, 0.30),
    Fitted(CLOCK, "clock", 0.85, 0.10),
    Fitted("software", "tp", 0.80, 0.20),
    Fitted("software", "tp_backward", 0.80, 0.20),
    Fitted("software", "cp", 0.80, 0.20),
    Fitted("software", "zero", 0.80, 0.20),
    Fitted("software", "dp", 0.90, 0.20),
    Fitted("software", "pp", 0.80, 0.20),
    Fitted("software", "norm", 1.5, 0.30),
    Fitted("software", "host", 1.1e-3, 0.30),
)
COMPUTE = ("gemm", "fp8", "flash1", "flash2", "flash3")
UNITS = {"A100-80": 108, "H100": 132}  # multiprocessors, from the makers' papers
RAMP = 180.0  # the same kernels' tiles on both


@dataclass(frozen=True)
class Constants:
    devices: dict[str, Achieved]
    software: Software

    @classmethod
    def shipped(cls) -> Self:
        names = {one.where for one in FITTED} - {"software"}
        return cls({name: achieved(name) for name in names}, software())

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """From numbers in the order of FITTED."""
        tables: dict[str, dict[str, float]] = {}
        for one, value in zip(FITTED, values, strict=True):
            tables.setdefault(one.where, {})[one.name] = float(value)
        devices = {}
        for name, units in UNITS.items():
            devices[name] = Achieved(**tables[name], units=units, ramp=RAMP, source=SOURCE)
        clock = tables[CLOCK]["clock"]
        slower = {part: clock * getattr(devices["H100"], part) for part in COMPUTE}
        devices[CLOCK] = structs.replace(devices["H100"], **slower)
        return cls(devices, Software(**tables["software"]))

    def value(self, one: Fitted) -> float:
        if one.name == "clock":
            return self.devices[CLOCK].gemm / self.devices["H100"].gemm
        return float(getattr(self.software if one.where == "software" else self.devices[one.where], one.name))

    def write(self) -> None:
        """Write them to the file that the planner reads."""
        tables = {name: structs.asdict(reached) for name, reached in self.devices.items()}
        write(tables | {"software": structs.asdict(self.software)})

    def on(self, case: Case) -> Case:
        accelerator = case.cluster.groups[0].accelerator
        name = accelerator.name if accelerator.name in self.devices else LIKE.get(accelerator.name, "")
        # What was measured on a device, and not fitted to these runs, stays.
        device = Device(accelerator, self.devices[name]) if name in self.devices else case.on
        return replace(case, device=device, stack=case.stack.but(software=self.software))


SOURCE = "fitted by `fivefold truth --fit` to the runs in truth/data"
