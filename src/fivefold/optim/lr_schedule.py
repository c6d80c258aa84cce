"""The learning rate of every step: a pure function of the step, so that a resumed run needs no state."""

import math

from fivefold.optim.base import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of `step` (from 0) of a run of `steps`: a linear warm-up, then the schedule, whose last rate stays."""
    steps = config.schedule_steps or steps
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    falling = {
        "constant": 0.0,
        "cosine": 0.5 - 0.5 * math.cos(math.pi * _passed_share(step, config.warmup, steps)),
        "wsd": _passed_share(step, max(config.warmup, steps - round(config.decay * steps)), steps),
    }[config.schedule]
    return config.lr * (1.0 - falling * (1.0 - config.final))


def _passed_share(step: int, start: int, steps: int) -> float:
    """The fraction of the steps from `start` to the last one that have passed, 0 to 1."""
    if step < start:
        return 0.0
    if step >= steps - 1:
        return 1.0
    return (step - start + 1) / (steps - start)
