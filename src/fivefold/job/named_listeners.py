"""The listeners that have a name, and those of a job."""

from collections.abc import Iterator, Sequence
from typing import Any

from fivefold.job.listeners import RunListener, TensorBoard
from fivefold.job.trackers import MLflow, WandB
from fivefold.support.errors import Problem, UserError, not_installed
from fivefold.support.plugins import Registry

LISTENERS = Registry("run.listeners", RunListener, {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow})


def listener_problems(names: Sequence[str], *, trusted: bool = False) -> list[str]:
    """Problems of a job's listeners, which are imported if `trusted`; else, the listeners that were not imported."""
    problems = []
    for name in names:
        try:
            LISTENERS.named(name, trusted=trusted)
        except UserError as error:
            problems += error.coded
    return problems


def names_in(value: Any) -> Sequence[str]:
    """Of a section's setting, which may be a list or names with commas between them."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def missing_packages(names: Sequence[str]) -> Iterator[Problem]:
    """The packages that named listeners need and that are not installed; each is an extra of its listener's name."""
    for name in names:
        if name in LISTENERS.table and not_installed(name):
            how = f'pip install "fivefold[{name}]"'
            yield Problem(f"install.{name}", f"the listener {name} needs {name}: {how}")
