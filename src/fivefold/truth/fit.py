"""Fits the constants to measured runs by least absolute error; every source has the same weight.

A prior pulls each constant to its first guess, like one more observation. So a constant of which the runs say little
stays plausible, and leaving a source out does not set others free.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from fivefold.plan.cost.time import estimate
from fivefold.truth.cases import Measured
from fivefold.truth.constants import FITTED, Constants

MOST = 100  # rows of a source: a larger one is sampled, because its errors are alike
PRIOR = 0.08  # weight of the guesses beside that of a source
NEAR = 0.03  # errors below it are noise: identical runs differ by more
ROUNDS = 5


def fit(runs: Sequence[Measured], progress: Callable[[], None] = lambda: None) -> Constants:
    """Gauss-Newton on the logarithms, reweighted towards absolute errors."""
    rows = _sample([run for run in runs if run.seconds])
    sizes = Counter(run.row.file for run in rows)
    weights = np.array([1 / sizes[run.row.file] for run in rows])
    measured = np.log([run.seconds or 1.0 for run in rows])
    guesses = np.log([one.guess for one in FITTED])
    spread = np.array([one.spread for one in FITTED])

    def errors(values: np.ndarray) -> np.ndarray:
        constants = Constants.of(list(np.exp(values)))
        return np.array([math.log(predict(run, constants)) for run in rows]) - measured

    def loss(found: np.ndarray, values: np.ndarray) -> float:
        return float((weights * np.abs(found)).sum() + PRIOR / 2 * (((values - guesses) / spread) ** 2).sum())

    values, found = guesses, errors(guesses)
    for _ in range(ROUNDS):
        columns = []
        for step in 1e-3 * np.eye(len(values)):
            columns.append((errors(values + step) - found) / 1e-3)
            progress()
        jacobian = np.stack(columns, axis=1)
        pull = weights / np.maximum(np.abs(found), NEAR)
        curvature = jacobian.T @ (pull[:, None] * jacobian) + np.diag(PRIOR / spread**2)
        descent = -jacobian.T @ (pull * found) - PRIOR * (values - guesses) / spread**2
        move = np.clip(np.linalg.solve(curvature, descent), -0.3, 0.3)
        tries = [(values + share * move, errors(values + share * move)) for share in (1.0, 0.5, 0.25)]
        values, found = min(tries, key=lambda one: loss(one[1], one[0]))
    return Constants.of(list(np.exp(values)))


STEPS = ROUNDS * len(FITTED)  # calls of `progress` in one fit


def predict(run: Measured, constants: Constants | None = None, exact: bool = False) -> float:
    """Seconds of a run's step. The fit uses closed forms for pipelines; the evaluation (`exact`) runs the schedules."""
    case = constants.on(run.case) if constants else run.case
    return estimate(case, exact).seconds


def _sample(rows: list[Measured]) -> list[Measured]:
    chosen = []
    for name in dict.fromkeys(run.row.file for run in rows):
        mine = [run for run in rows if run.row.file == name]
        chosen += mine if len(mine) <= MOST else random.Random(0).sample(mine, MOST)
    return chosen
