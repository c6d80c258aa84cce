"""What two runs were told and made with: the settings and versions that differ, and what each can change.

Settings are read from job.toml as they stand, and versions from environment.json: no plugin is imported, and a file
that is missing or damaged is a note. Both files are those of a run's last start.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fivefold.job.resume_rules import FREE, NEVER, RATE, flat, rule_of
from fivefold.support.errors import UserError
from fivefold.support.parsing import Missing, read_json, read_toml
from fivefold.trainer.directories import JOB_FILE

ENVIRONMENT_FILE = "environment.json"
Effect = Literal["nothing", "rounding", "the start", "the data", "updates", "the learning rate", "the model", "code"]

_OWN = {"run.name", "run.dir"}  # each run has its own
_ROUNDS = ("train.device", "train.share_gpu", "train.compile", "train.deterministic")
_OF_ENVIRONMENT: dict[str, Effect] = {
    **dict.fromkeys(("torch", "python", "platform", "device", "ranks", "deterministic", "fivefold"), "rounding"),
    "tokens": "the data",
    "plugins": "code",
}


class Setting(NamedTuple):
    """A setting or version that differs; None where a run has none."""

    name: str
    values: tuple[Any, Any]
    effect: Effect


class Told(NamedTuple):
    """What the files of a run say of it; None where there is no such file, or not one that can be read."""

    job: dict[str, Any] | None
    environment: dict[str, Any] | None
    notes: list[str]


def told(directory: Path) -> Told:
    """What a run was told and made with."""
    notes: list[str] = []
    job = _read(directory / JOB_FILE, "its settings are not compared", notes)
    environment = _read(directory / ENVIRONMENT_FILE, "its versions are not compared", notes)
    if environment is not None and isinstance(after := environment.get("resumed_after"), int) and after > 0:
        notes.append(
            f"{directory} was last started after step {after}: {JOB_FILE} and {ENVIRONMENT_FILE} are of that start"
        )
    return Told(job, environment, notes)


def _read(path: Path, without: str, notes: list[str]) -> dict[str, Any] | None:
    try:
        table = (read_toml if path.suffix == ".toml" else read_json)(path)
        if isinstance(table, dict):
            return table
        notes.append(f"{path} is no table: {without}")
    except Missing:
        notes.append(f"there is no {path}: {without}")
    except UserError as error:
        notes.append(f"{error.problems[0]}: {without}")
    return None


def differing(first: Told, second: Told) -> list[Setting]:
    """The settings and versions that differ, those that can change most first."""
    found = []
    if first.job is not None and second.job is not None:
        found += _differing(_flat(first.job), _flat(second.job), _effect)
    if first.environment is not None and second.environment is not None:
        # A release before may not have written one of them.
        both = [key for key in _OF_ENVIRONMENT if key in first.environment and key in second.environment]
        versions = [{key: table[key] for key in both} for table in (first.environment, second.environment)]
        found += _differing(versions[0], versions[1], _OF_ENVIRONMENT.__getitem__)
    order: list[Effect] = ["the model", "code", "the data", "the start", "updates", "the learning rate", "rounding"]
    return sorted(found, key=lambda one: [*order, "nothing"].index(one.effect))


def bits_expected(first: Told, second: Told, settings: list[Setting]) -> bool:
    """Whether the two should compute the same bits, as far as their files tell."""
    if any(it.job is None or not (it.environment or {}).get("deterministic") for it in (first, second)):
        return False
    return not any(setting.effect == "rounding" for setting in settings)


def dtype_of_both(first: Told, second: Told) -> str:
    """The coarser of the dtypes that the two compute in; float32 where nobody says."""
    dtypes = {str((it.job or {}).get("train", {}).get("dtype", "float32")) for it in (first, second)}
    return next((dtype for dtype in ("bfloat16", "float32", "float64") if dtype in dtypes), "float32")


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in job.items()
        for key, value in (flat(table) if isinstance(table, dict) else {"": table}).items()
    }


def _differing(first: Mapping[str, Any], second: Mapping[str, Any], effect: Callable[[str], Effect]) -> list[Setting]:
    keys = [key for key in {**first, **second} if key not in _OWN and first.get(key) != second.get(key)]
    return [Setting(key.rstrip("."), (first.get(key), second.get(key)), effect(key.rstrip("."))) for key in keys]


def _effect(key: str) -> Effect:
    rule = FREE
    with suppress(KeyError):  # a section of another release
        rule = rule_of(key)
    if key.startswith("layout") or key in _ROUNDS:
        return "rounding"
    if key == "run.weights":
        return "the start"
    if rule == FREE:
        return "nothing"
    if rule == NEVER:
        return "the model"
    if rule == RATE:
        return "the learning rate"
    return "the data" if key.startswith("data.") else "updates"
