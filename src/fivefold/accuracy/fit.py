"""Fits constants of accelerators and of software to measured runs, by least absolute error.

Every source has the same weight. A prior pulls each constant towards its first guess, like one more observation, so
that a constant about which the runs say little stays plausible even when a source is left out.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from msgspec import structs

from fivefold.accuracy.cases import MeasuredRun
from fivefold.cost.kernels import Device
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.accelerators import LIKE, Achieved, Software, achieved, known, software, write

POWER_LIMITED = "H100-96"  # to 500 of 700 W: one factor, "clock", slows all its compute


class FittedConstant(NamedTuple):
    """A constant that is fitted: its table, a first guess, and the guess's relative standard deviation."""

    where: str  # an accelerator, or "software"
    name: str
    guess: float
    spread: float


# The guesses are from kernel benchmarks and papers; a constant that no run depends on stays at its guess.
FITTED_CONSTANTS = (
    FittedConstant("A100-80", "gemm", 0.78, 0.15),
    FittedConstant("A100-80", "stream", 0.80, 0.15),
    FittedConstant("A100-80", "flash1", 0.30, 0.40),
    FittedConstant("A100-80", "flash2", 0.55, 0.30),
    FittedConstant("A100-80", "inside", 0.75, 0.20),
    FittedConstant("A100-80", "across", 0.80, 0.30),
    FittedConstant("H100", "gemm", 0.70, 0.15),
    FittedConstant("H100", "fp8", 0.60, 0.20),
    FittedConstant("H100", "stream", 0.80, 0.15),
    FittedConstant("H100", "flash1", 0.20, 0.40),
    FittedConstant("H100", "flash2", 0.36, 0.20),
    FittedConstant("H100", "flash3", 0.55, 0.20),
    FittedConstant("H100", "inside", 0.75, 0.20),
    FittedConstant("H100", "across", 0.80, 0.30),
    FittedConstant("B200", "gemm", 0.55, 0.20),
    FittedConstant("B200", "fp8", 0.55, 0.20),
    FittedConstant("B200", "fp4", 0.45, 0.30),
    FittedConstant("B200", "stream", 0.80, 0.15),
    FittedConstant("B200", "flash3", 0.50, 0.20),
    FittedConstant("B200", "inside", 0.75, 0.20),
    FittedConstant(POWER_LIMITED, "clock", 0.85, 0.10),
    FittedConstant("software", "tp", 0.80, 0.20),
    FittedConstant("software", "tp_backward", 0.80, 0.20),
    FittedConstant("software", "cp", 0.80, 0.20),
    FittedConstant("software", "zero", 0.80, 0.20),
    FittedConstant("software", "dp", 0.90, 0.20),
    FittedConstant("software", "pp", 0.80, 0.20),
    FittedConstant("software", "norm", 1.5, 0.30),
    FittedConstant("software", "host", 1.1e-3, 0.30),
)
COMPUTE_RATES = ("gemm", "fp8", "flash1", "flash2", "flash3")
MULTIPROCESSORS = {"A100-80": 108, "H100": 132, "B200": 148}  # from the makers' papers
FALLBACK_DEVICE = {"B200": "H100"}  # whose constants a device has where none are fitted for it
RAMP = 180.0  # not fitted: kernels have the same tiles on all of these devices


@dataclass(frozen=True)
class Constants:
    devices: dict[str, Achieved]
    software: Software

    @classmethod
    def shipped(cls) -> Self:
        names = {fitted.where for fitted in FITTED_CONSTANTS} - {"software"}
        return cls({name: achieved(name) for name in names}, software())

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """The constants from values in the order of FITTED_CONSTANTS."""
        tables: dict[str, dict[str, float]] = {}
        for fitted, value in zip(FITTED_CONSTANTS, values, strict=True):
            tables.setdefault(fitted.where, {})[fitted.name] = float(value)
        devices = {}
        for name, units in MULTIPROCESSORS.items():
            shares = tables.get(FALLBACK_DEVICE.get(name, ""), {}) | tables[name]
            devices[name] = Achieved(**shares, units=units, ramp=RAMP, source=FIT_SOURCE)
        clock = tables[POWER_LIMITED]["clock"]
        slower = {part: clock * getattr(devices["H100"], part) for part in COMPUTE_RATES}
        devices[POWER_LIMITED] = structs.replace(devices["H100"], **slower)
        return cls(devices, Software(**tables["software"]))

    def value(self, fitted: FittedConstant) -> float:
        if fitted.name == "clock":
            return self.devices[POWER_LIMITED].gemm / self.devices["H100"].gemm
        return float(getattr(self.software if fitted.where == "software" else self.devices[fitted.where], fitted.name))

    def write(self) -> None:
        """Write the constants to the file that the planner reads."""
        tables = {name: structs.asdict(reached) for name, reached in self.devices.items()}
        write(tables | {"software": structs.asdict(self.software)})

    def on(self, workload: Workload) -> Workload:
        """The workload with these constants."""
        accelerator = workload.cluster.groups[0].accelerator
        name = constants_device(accelerator.name)
        device = Device(accelerator, self.devices[name]) if name in self.devices else workload.first_device
        return replace(workload, device=device, software=workload.software.but(achieved=self.software))


def constants_device(accelerator: str) -> str:
    """The accelerator whose fitted constants an accelerator has; empty if `calibrate` measured its own."""
    if accelerator in MULTIPROCESSORS or accelerator == POWER_LIMITED:
        return accelerator
    return "" if accelerator in known() else LIKE.get(accelerator, "")


FIT_SOURCE = "fitted by `fivefold accuracy --fit` to the runs in accuracy/data"


MAX_ROWS = 100  # of a source; a larger one is sampled, as its errors are similar
PRIOR_WEIGHT = 0.08  # of the guesses, relative to that of a source
ERROR_NOISE = 0.03  # smaller errors count as noise: identical runs differ by more
NEWTON_STEPS = 5  # each with new slopes
REFINING_STEPS = 20  # with known slopes, which cost nothing
LOG_GUESSES = np.log([constant.guess for constant in FITTED_CONSTANTS])
SPREADS = np.array([constant.spread for constant in FITTED_CONSTANTS])


def fit(runs: Sequence[MeasuredRun], progress: Callable[[], None] = lambda: None) -> Constants:
    """Gauss-Newton on the logarithms, reweighted towards absolute errors."""
    return _constants(_fit_logarithms(_sample(runs), progress))


class FullFit(NamedTuple):
    """The fit to all runs, and how their errors change around it."""

    rows: list[MeasuredRun]
    values: np.ndarray  # logarithms of the constants
    errors: np.ndarray  # of each row at `values`
    slopes: np.ndarray  # of each row's error by each constant

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], progress: Callable[[], None] = lambda: None) -> Self:
        rows = _sample(runs)
        values = _fit_logarithms(rows, progress)
        errors = _errors(rows, values)
        return cls(rows, values, errors, _slopes(rows, values, errors, progress))


def fits_without(
    fitted_to_all: FullFit, runs: Sequence[MeasuredRun], group: Callable[[MeasuredRun], str]
) -> dict[str, Constants]:
    """By group: the constants fitted to the runs outside it. All are near those fitted to all runs, so the slopes there
    are used for each."""
    (rows, all_values, all_errors, slopes), constants = fitted_to_all, {}
    for name in dict.fromkeys(map(group, runs)):
        others = [index for index, run in enumerate(rows) if group(run) != name]
        weights, values = _weights([rows[index] for index in others]), all_values
        for _ in range(REFINING_STEPS):
            errors = all_errors[others] + slopes[others] @ (values - all_values)
            values = values + _move(weights, errors, slopes[others], values)
        constants[name] = _constants(values)
    return constants


def _fit_logarithms(rows: Sequence[MeasuredRun], progress: Callable[[], None]) -> np.ndarray:
    """The logarithms of the constants fitted to rows, in the order of FITTED_CONSTANTS."""
    weights = _weights(rows)

    def loss(values: np.ndarray, errors: np.ndarray) -> float:
        return float(
            (weights * np.abs(errors)).sum() + PRIOR_WEIGHT / 2 * (((values - LOG_GUESSES) / SPREADS) ** 2).sum()
        )

    values, errors = LOG_GUESSES, _errors(rows, LOG_GUESSES)
    for _ in range(NEWTON_STEPS):
        move = _move(weights, errors, _slopes(rows, values, errors, progress), values)
        tries = [(values + share * move, _errors(rows, values + share * move)) for share in (1.0, 0.5, 0.25)]
        values, errors = min(tries, key=lambda tried: loss(*tried))
    return values


def _sample(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The timed runs, at most MAX_ROWS of each source."""
    rows: list[MeasuredRun] = []
    for name in dict.fromkeys(run.row.file for run in runs):
        of_source = [run for run in runs if run.seconds and run.row.file == name]
        rows += of_source if len(of_source) <= MAX_ROWS else random.Random(0).sample(of_source, MAX_ROWS)
    return rows


def _weights(rows: Sequence[MeasuredRun]) -> np.ndarray:
    """The weight of each row: those of a source add up to 1."""
    sizes = Counter(run.row.file for run in rows)
    return np.array([1 / sizes[run.row.file] for run in rows])


def _constants(values: np.ndarray) -> Constants:
    return Constants.of(list(np.exp(values)))


def _errors(rows: Sequence[MeasuredRun], values: np.ndarray) -> np.ndarray:
    """log(predicted / measured) of each row."""
    constants = _constants(values)
    return np.array([math.log(predict(run, constants) / (run.seconds or 1.0)) for run in rows])


def _slopes(
    rows: Sequence[MeasuredRun], values: np.ndarray, errors: np.ndarray, progress: Callable[[], None]
) -> np.ndarray:
    """How each row's error, `errors` at `values`, changes with each constant."""
    slopes = np.zeros((len(rows), len(values)))
    for column, (constant, step) in enumerate(zip(FITTED_CONSTANTS, 1e-3 * np.eye(len(values)), strict=True)):
        affected = [index for index, run in enumerate(rows) if _affects(constant, run)]
        changed = _errors([rows[index] for index in affected], values + step)
        slopes[affected, column] = (changed - errors[affected]) / 1e-3
        progress()
    return slopes


def _affects(constant: FittedConstant, run: MeasuredRun) -> bool:
    """Whether a run's prediction can depend on a constant."""
    name = constants_device(run.workload.first_device.accelerator.name)
    return constant.where in ("software", name, FALLBACK_DEVICE.get(name)) or (
        name == POWER_LIMITED and constant.where == "H100"
    )


def _move(weights: np.ndarray, errors: np.ndarray, slopes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One Gauss-Newton step towards the least sum of absolute errors and of the distance from the guesses."""
    pull = weights / np.maximum(np.abs(errors), ERROR_NOISE)
    curvature = slopes.T @ (pull[:, None] * slopes) + np.diag(PRIOR_WEIGHT / SPREADS**2)
    descent = -slopes.T @ (pull * errors) - PRIOR_WEIGHT * (values - LOG_GUESSES) / SPREADS**2
    return np.asarray(np.clip(np.linalg.solve(curvature, descent), -0.3, 0.3))


FIT_STEPS = NEWTON_STEPS * len(FITTED_CONSTANTS)  # calls of `progress` in one fit
FIT_STEPS_WITHOUT = FIT_STEPS + len(FITTED_CONSTANTS)  # calls of `progress` in `FullFit.of`


def predict(run: MeasuredRun, constants: Constants | None = None, *, exact: bool = False) -> float:
    """Seconds of a run's step: by closed forms for pipelines, as the fit needs, or exact, by running the schedules."""
    workload = constants.on(run.workload) if constants else run.workload
    return estimate(workload, exact=exact).seconds


# ---- unseen ---------------------------------------------------------------------------------------------------------
# Predictions with constants that were fitted without the run's source, or without its accelerator.


class Unseen(NamedTuple):
    run: MeasuredRun
    seconds: float  # predicted


def by_source(run: MeasuredRun) -> str:
    return run.row.file


def by_accelerator(run: MeasuredRun) -> str:
    return run.workload.first_device.accelerator.name


def predict_unseen(
    runs: Sequence[MeasuredRun],
    group: Callable[[MeasuredRun], str],
    tick: Callable[[], None] = lambda: None,
    fitted_to_all: FullFit | None = None,
) -> Iterator[Unseen]:
    """Yields every timed run, predicted with constants that were fitted without its group. `fitted_to_all` is the fit
    to all runs, if there is one already."""
    timed = [run for run in runs if run.seconds]
    if len(set(map(group, timed))) < 2:
        return
    constants = fits_without(fitted_to_all or FullFit.of(timed, tick), timed, group)
    for run in timed:
        if group(run) in constants:
            yield Unseen(run, predict(run, constants[group(run)], exact=True))
