"""How a job is read: from a file, an example or a stored run, with KEY=VALUE changes on top.

    job = read_job("job.toml", ["optimizer.lr=3e-4", "train.steps=200", "layout=dp=2,tp=2"])

A file that came with a run is a stranger's: what it names is imported only where the user named it, too.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fivefold.job.aliases import apart, dtype_problem, explain
from fivefold.job.config import NAMED_SECTIONS, SECTION_KEYS, SECTIONS, Job, RunConfig, TrainConfig
from fivefold.job.named_listeners import LISTENERS, listener_problems, names_in
from fivefold.job.table import Table, apply, model_of
from fivefold.layout.layout import Layout, schedule_named
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import is_file
from fivefold.spec.model import ModelSpec
from fivefold.spec.pattern import KIND_REGISTRIES, names_in_pattern
from fivefold.spec.presets import preset
from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import Note, UserError
from fivefold.support.parsing import Missing, number_problems, path_of, read, read_toml, unknown_key
from fivefold.support.plugins import Sections, find_value, is_plugin
from fivefold.support.text import did_you_mean

EXAMPLES_DIR = Path(__file__).parent.parent / "examples"  # jobs that are installed with the package
RECIPES_DIR = EXAMPLES_DIR.parent / "recipes"
_SCHEDULES = ("layout", "layout.schedule")
# How changes that name a plugin begin.
NAMING_PREFIXES = tuple(
    f"{name}=" for name in (*(its.setting for its in NAMED_SECTIONS.values()), LISTENERS.setting, *_SCHEDULES)
)


def read_job(path: str | Path | None = None, changes: Sequence[str] = ()) -> Job:
    """The job of the file `path` (none: all defaults) with `changes`, KEY=VALUE; raises all problems of form at once.

    >>> ff.read_job(None, ["optimizer.lr=3e-4", "layout=dp=2"]).optimizer.lr
    0.0003
    """
    file = path_of(path) if path is not None else None
    table = _table_of(file) if file else {}
    return resolve(table, changes, file.stem if file else "run", stored=file is not None and lies_in_run(file))


def lies_in_run(file: Path) -> bool:
    """Whether a job file lies in a run's directory, at any depth: then it came with the run, not from its user."""
    for folder in {Path(os.path.abspath(file)).parent, file.resolve().parent}:
        here = ("checkpoints", "claim", "progress.json")
        if "checkpoints" in folder.parts or any(os.path.lexists(folder / name) for name in here):
            return True
        # Further up only what no other directory has: that of a user's projects may well have one of checkpoints.
        above = ("metrics.jsonl", "environment.json")
        if any(os.path.lexists(parent / name) for parent in (folder, *folder.parents) for name in above):
            return True
    return False


def _table_of(file: Path) -> Table:
    table = _read_job(_file_of(file))
    if isinstance(layout := table.get("layout"), dict) and isinstance(name := layout.get("schedule"), str):
        beside = file.parent / name  # a schedule file may lie beside the job
        if os.path.isfile(beside) and not os.path.exists(name):
            table["layout"] = layout | {"schedule": str(beside)}
    return table


def resolve(table: Table, changes: Sequence[str] = (), name: str = "run", *, stored: bool = False) -> Job:
    """The job of a table with changes, which are laid over the table itself; a run without a name gets `name`.

    What a `stored` table names is not imported (support/plugins.py); what the changes name is.
    """
    of_its_own = "model" in table
    problems: list[str] = []
    layouts = [change.removeprefix("layout=") for change in changes if change.startswith("layout=")]
    problems += apart(changes, "".join(layouts[-1:]), "layout=")
    before = {name: _name_in(table, registry) for name, registry in NAMED_SECTIONS.items()}
    for change in [] if problems else changes:
        apply(table, change, problems)
    table = _move_loss_settings(table)
    given, after = {change.partition("=")[0] for change in changes}, list[str]()  # the model's are reported first

    def kind(name: str, named: Callable[..., Any], *settings: str) -> Any:
        """The class of a section, whose plugins are imported if they may be; None where there is none."""
        try:
            return named(table.get(name), trusted=not stored or bool(given.intersection(settings)))
        except UserError as error:
            after.extend(error.coded)
            return None

    kinds = {name: kind(name, registry.of, registry.setting) for name, registry in NAMED_SECTIONS.items()}
    known = dict[str, list[str]]()
    for section, registry in NAMED_SECTIONS.items():
        its, was = kinds[section], before[section]
        if its and was not in (None, _name_in(table, registry)):
            _drop_settings_of(was, table[section], registry, its, given)
        # Of a class that is not here nobody knows the settings.
        known[section] = registry.keys(its) if its else [*table.get(section, ())]
    explain(table, SECTION_KEYS | known, problems)
    problems += [unknown_key("", key, ["model", *SECTIONS]) for key in table if key not in ("model", *SECTIONS)]
    kinds["layout"] = kind("layout", _layout_kind, *_SCHEDULES)
    kinds["run"] = kind("run", _run_kind, LISTENERS.setting)
    sections = {name: _section(name, table.get(name, {}), after, its) for name, its in (SECTIONS | kinds).items()}
    _import_kinds(table.get("model"), problems, trusted=not stored or "model.pattern" in given)
    model = model_of(table.get("model", {}), sections["data"], problems, of_its_own=of_its_own)
    problems += after
    unread = [key for key, section in (sections | {"model": model}).items() if section is None]
    if problems or unread or model is None:
        rest = {key: section for key, section in sections.items() if section is not None}
        others = Job(model=model or preset("tiny"), **rest).problems(unread=unread)
        raise UserError([*problems, *others])
    if not sections["run"].name:
        sections["run"] = msgspec.structs.replace(sections["run"], name=name)
    return Job(model=model, **sections)


def _name_in(table: Table, registry: Sections[Any]) -> Any:
    """What a table calls the class of a section; None if it does not say."""
    section = table.get(registry.section)
    return section.get(registry.key) if isinstance(section, dict) else None


def _drop_settings_of(before: Any, section: Table, registry: Sections[Any], kind: type[Any], given: set[str]) -> None:
    """Take out of a section what only the class had that it named before a change gave it another one."""
    keys = registry.keys(kind)
    dropped = [key for key in section if key not in keys and f"{registry.section}.{key}" not in given]
    for key in dropped:
        del section[key]
    if dropped:
        settings = ", ".join(f"{registry.section}.{key}" for key in dropped)
        warnings.warn(Note(f"{settings} of {before} fell away: {section[registry.key]} does not have it"), stacklevel=3)


def _move_loss_settings(table: Table) -> Table:
    """The table with the loss's settings in their own section: in the first releases they were in [train]."""
    train, loss = table.get("train"), table.get("loss", {})
    if not isinstance(train, dict) or not isinstance(loss, dict):
        return table
    moved = {key: train[key] for key in ("label_smoothing", "z_loss") if key in train}
    rest = {key: value for key, value in train.items() if key not in moved}
    return table | {"train": rest, "loss": loss | moved} if moved else table


def _import_kinds(model: Any, problems: list[str], *, trusted: bool) -> None:
    """Import the plugins that a model's pattern names, if it is `trusted`; what cannot be used is taken out of it."""
    refused = set[tuple[str, str]]()  # a plugin in several entries is refused once
    for number, place, name in names_in_pattern(model.get("pattern")) if isinstance(model, dict) else ():
        if is_plugin(name) and (place, name) in refused:
            continue
        try:
            KIND_REGISTRIES[place].named(name, trusted=trusted)
        except UserError as error:
            problems += number_problems(error.coded, f"model.pattern[{number}]")
            model.pop("pattern", None)
            refused.add((place, name))


def _file_of(path: Path) -> Path:
    """The file; where there is none, the example or recipe of that name that comes with the package."""
    example = installed_job(path)
    if os.path.isfile(path) or example is None:
        return path
    warnings.warn(Note(f"there is no file {path} here; the job is Fivefold's own example {example}"), stacklevel=3)
    return example


def installed_job(path: Path) -> Path | None:
    """The job of that name that comes with the package."""
    name = path.name.removesuffix(".toml") + ".toml"
    homes = [home for home in (EXAMPLES_DIR, RECIPES_DIR) if path.parent in (Path(), Path(home.name))]
    return next((home / name for home in homes if os.path.isfile(home / name)), None)


def _read_job(path: Path) -> Table:
    try:
        return read_toml(path)
    except Missing:
        beside = path.parent if os.path.isdir(path.parent) else Path()
        others = sorted(str(file) for file in beside.glob("*.toml") if file.name != "pyproject.toml")
        hint = did_you_mean(str(path), others) if others else "'fivefold train' without one trains the built-in demo"
        raise UserError(f"no job file {path}; {hint}", "job.file") from None


def _layout_kind(value: Any, *, trusted: bool) -> type[Layout]:
    """A layout, once there is the schedule that it names."""
    if isinstance(value, str | dict) and is_plugin(name := schedule_named(value)) and not is_file(name):
        find_value("layout.schedule", name, ScheduleInfo, trusted=trusted)
    return Layout


def _run_kind(value: Any, *, trusted: bool) -> type[RunConfig]:
    """A run, once the listeners that it names are imported."""
    names = names_in(value.get("listeners", ())) if isinstance(value, dict) else ()
    if problems := listener_problems(names if isinstance(names, list | tuple) else (), trusted=trusted):
        raise UserError(problems)
    return RunConfig


def _section(section: str, value: Any, problems: list[str], kind: Any) -> Any:
    """An object of the section's class; None where there are problems."""
    if kind is None:
        return None
    try:
        if kind is Layout and isinstance(value, str | dict):
            return Layout.parse(value) if isinstance(value, str) else Layout.from_dict(value)
        if not isinstance(value, dict):
            raise UserError(f"{section}={value!r} is not a table of settings", f"{section}.type")
        if isinstance(word := value.get("dtype") if section == "train" else None, str):
            sentence = dtype_problem(word)
            problems += [sentence] if sentence else []
            value = value | {"dtype": "bfloat16" if sentence else dtype_of(word)}
        if kind is RunConfig and "listeners" in value:
            value = value | {"listeners": names_in(value["listeners"])}
    except UserError as error:
        problems += error.coded
        return None
    return read(kind, value, section, problems)


def job_from(table: Table) -> Job:
    """A job as a checkpoint has it. The first releases knew one scaling of rotary positions, and did not name it."""
    table = _move_loss_settings(table)
    model, own = (
        table["model"],
        {name: registry.stored(table.get(name, {})) for name, registry in NAMED_SECTIONS.items()},
    )
    if scaling := model.get("rope_scaling"):
        model = model | {"rope_scaling": {"kind": "llama3"} | scaling}
    others = {key: section for key, section in table.items() if key not in NAMED_SECTIONS}
    return msgspec.structs.replace(msgspec.convert(others | {"model": model}, Job), **own)


def job_of(model: str | Path | ModelSpec | Job, changes: Sequence[str] = ()) -> tuple[Job, set[str]]:
    """A job for commands that ask about a model, and the keys that were given: a job file's batch and sequence are, and
    its dtype, where it has one.

    `model` is a preset's name, a config.json or its directory, a job file, or an object; `changes` are KEY=VALUE. Its
    optimizer and loss are checked as for training: what they hold and compute is planned.
    """
    job, given = _job_of(model, changes)
    others = {"model", *SECTIONS} - {"optimizer", "loss"}
    if problems := job.problems(unread=others):
        raise UserError(problems)
    return job, given


def _job_of(model: str | Path | ModelSpec | Job, changes: Sequence[str]) -> tuple[Job, set[str]]:
    strange = [change for change in changes if "=" not in change]
    if strange:
        example = "write KEY=VALUE, for example model.layers=40"
        raise UserError(f"{strange[0]!r} is not a change; {example}", "change.form")
    named = {change.partition("=")[0] for change in changes}
    of_a_job = named | {"data.seq", "train.batch"}
    if isinstance(model, (ModelSpec, Job)):
        if changes:
            instead = "changes a model that is given as an object; change the object instead"
            raise UserError(f"{changes[0]!r} {instead}", "change.object")
        if isinstance(model, ModelSpec):
            return Job(model=model), named
        return model, of_a_job | ({"train.dtype"} if model.train.dtype != TrainConfig().dtype else set())
    name = str(model)
    if "=" in name:
        first = "is a change, and the model comes first; for example llama3-8b"
        raise UserError(f"{name!r} {first} {name}", "change.first")
    if name.endswith(".toml"):
        table = _table_of(file := path_of(name))
        said = isinstance(train := table.get("train"), dict) and "dtype" in train
        job = resolve(table, changes, file.stem, stored=lies_in_run(file))
        return job, of_a_job | ({"train.dtype"} if said else set())
    kind = "model.config" if os.path.exists(path_of(name)) or name.endswith(".json") else "model"
    return read_job(None, [f"{kind}={name}", *changes]), named
