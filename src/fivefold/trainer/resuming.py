"""Resuming a run: `fivefold train runs/first`, and a start by hand whose job has the name of an earlier run.

job = job_of_run(Path("runs/first"), ["train.steps=80"])     # the job of that directory, changed
resume_refusals(Path("runs/first"), job, sources, named=True)    # why the run cannot continue with it
"""

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fivefold.checkpoint.find import find, reachable, run_of, store_of, stored_job
from fivefold.checkpoint.hf_extras import TOKENIZER_FILES
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint, Damaged
from fivefold.checkpoint.store import Store
from fivefold.data.index import TOKENIZER_FILE
from fivefold.data.rows import Splits
from fivefold.data.tokenizer import tokenizer_mismatches
from fivefold.job.config import Job, RunConfig
from fivefold.job.reading import NAMING_PREFIXES, installed_job, resolve
from fivefold.job.resume_rules import NEVER, Change, changes, resume_problems
from fivefold.spec.hf import END_NAMED_IN, HF_CONFIG
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Note, UserError
from fivefold.support.parsing import Missing, path_of, read_toml
from fivefold.support.storage_place import Place, RemotePlace, place_of
from fivefold.support.text import did_you_mean
from fivefold.trainer.directories import JOB_FILE, earlier_directory, existing_run_directory, resumable_checkpoints

SCHEDULE_FILE = "schedule.txt"  # a pipeline schedule that the job took from a file


@dataclass(frozen=True)
class Start:
    """Where a command trains: in the directory that it names, in a `fresh` one, or in one of its job's name."""

    named: Path | None = None
    fresh: bool = False

    def checked(self, job: Job, sources: Splits) -> Path | None:
        """The directory in which the job continues; None for a new one. UserError if the job does not fit the run."""
        directory = self.named or existing_run_directory(job, fresh=self.fresh)
        if directory is None:
            if problems := misbegun(job, sources):
                raise UserError(problems, "run.weights.refused")
            return None
        problems = resume_refusals(directory, job, sources, named=self.named is not None)
        if problems and not self.named and (own := earlier_directory(job, directory)):
            directory, problems = own, resume_refusals(own, job, sources, named=False)
        if problems:
            raise UserError(problems, "run.resume.weights")
        return directory


def run_named(word: str | None) -> Place | None:
    """The directory or URL of a run that an argument of the command line names; None for a job file."""
    path = place_of(word) if word else None
    if isinstance(path, RemotePlace):
        return path
    if path is None or os.path.isfile(path):
        return None
    if not os.path.isdir(path):
        near = str(path_of(RunConfig().dir) / path)  # its name alone; an example or a recipe may have the same
        same = len(path.parts) == 1 and near in _runs(path_of(RunConfig().dir)) and not installed_job(path)
        others = [near] if same else _runs(path.parent) if len(path.parts) > 1 else []
        if path.suffix != ".toml" and others:
            raise UserError(
                f"there is neither a run nor a job file {path}; {did_you_mean(str(path), others)}", "run.missing"
            )
        return None
    if inside := next((folder for folder in (path, *path.parents) if folder.name == "checkpoints"), None):
        run, complete_ones = inside.parent, Store(inside).complete()
        newest = complete_ones[0].path.name if complete_ones else "none is complete"
        of_one = path != inside and (path / MANIFEST).is_file()
        step = f" --step {Checkpoint(path).manifest.step}" if of_one else ""
        raise UserError(
            f"{path} {'is a checkpoint' if of_one else 'has checkpoints'}; 'fivefold train {run}' resumes from the "
            f"newest ({newest}), and 'fivefold checkpoint reshard {run}{step} --layout dp=1 -o NEW' makes a run of one",
            "run.resume.checkpoint",
        )
    if not (path / JOB_FILE).exists() and not newest_of(Store(path / "checkpoints").complete()):
        others = _runs(path) or _runs(path.parent)
        known = f"; there is: {', '.join(others[:5])}" if others else ""
        raise UserError(
            f"{path} is not the directory of a run: it has neither {JOB_FILE} nor a checkpoint{known}", "run.missing"
        )
    return path


def directory_named(run: Place | None, job: Job) -> Path | None:
    """The directory of the named run; for a URL, the directory by the job's run.dir and run.name."""
    return path_of(job.run.dir) / job.run.name if isinstance(run, RemotePlace) else run


def job_of_run(directory: Place, words: Sequence[str] = ()) -> Job:
    """The job of a run's directory, with KEY=VALUE changes; for a URL, the job of the newest checkpoint.

    run.dir and run.name are set to the directory, which may have been moved or renamed.
    """
    places = ("run=", "run.name=", "checkpoint.url=" if isinstance(directory, RemotePlace) else "run.dir=")
    if moved := [word for word in words if word.startswith(places)]:
        way_out = (
            "--fresh"
            if isinstance(directory, RemotePlace)
            else f"'fivefold train {directory / JOB_FILE} run.name=NAME'"
        )
        raise UserError(
            f"{moved[0]} is not {directory}, in which the run resumes; a run of its own with the same job is {way_out}",
            "run.resume.directory",
        )
    if isinstance(directory, RemotePlace):
        with reachable(directory):
            newest = newest_of(store_of(directory).complete())
        if newest is None:
            raise UserError(f"{directory} has no checkpoint to resume from", "checkpoint.none")
        table = msgspec.to_builtins(stored_job(newest))
        table["run"]["name"], table["checkpoint"]["url"] = directory.name, str(directory.parent)
        return resolve(table, words, stored=True)
    table = _table(directory)
    absolute = Path(os.path.abspath(directory))
    near = str(directory.parent) if directory.name not in ("", "..") else str(absolute.parent)
    table["run"] = table.get("run", {}) | {"name": absolute.name, "dir": near}
    if (directory / HF_CONFIG).is_file() and (first := _imported_checkpoint(absolute)):
        table["run"]["weights"] = str(first)
    layout = table.get("layout", {})
    if Path(str(layout.get("schedule"))).name == SCHEDULE_FILE and (directory / SCHEDULE_FILE).is_file():
        layout["schedule"] = str((directory / SCHEDULE_FILE).absolute())
    try:
        resolve(copy.deepcopy(table), stored=True)
    except UserError as error:  # what may not be imported may also be replaced
        if {*error.codes} != {"plugin.untrusted"} or not any(word.startswith(NAMING_PREFIXES) for word in words):
            raise UserError(error.framed(f"{directory / JOB_FILE}: ")) from None
    return resolve(table, words, stored=True)


def model_with_experts(directory: Path) -> ModelSpec | None:
    """The model of a run's directory, if it has experts. Only the plugins of its pattern have to be here."""
    own = {key: value for key, value in _table(directory).items() if key == "model"}
    if isinstance(model := own.get("model"), dict) and not model.keys() & {"experts", "preset", "config"}:
        return None
    try:
        found = resolve(own, stored=True).model
    except UserError as error:
        raise UserError(error.framed(f"{directory / JOB_FILE}: ")) from None
    return found if found.experts else None


def with_moved_weights(job: Job, file: str | Path | None) -> Job:
    """The job, with run.weights next to the job file if they are no longer where it says: both may have been moved."""
    run = Path(os.path.abspath(file)).parent if file else Path()
    if not job.run.weights or os.path.exists(path_of(job.run.weights)) or not (file and (run / HF_CONFIG).is_file()):
        return job
    first = _imported_checkpoint(run)
    return replace(job, run=replace(job.run, weights=str(first))) if first else job


def _imported_checkpoint(directory: Path) -> Place | None:
    """The checkpoint of step 0 of an imported run, in the directory's present place."""
    checkpoints = Store(directory / "checkpoints").complete()
    return next((checkpoint.path for checkpoint in checkpoints if checkpoint.step == 0), None)


def _table(directory: Path) -> dict[str, Any]:
    """The stored job as a table: from job.toml, or if there is none, from the newest checkpoint."""
    newest = newest_of(Store(directory / "checkpoints").complete())
    try:
        table = read_toml(directory / JOB_FILE)
        if any(not isinstance(table.get(section, {}), dict) for section in ("run", "layout")):
            raise UserError(f"{directory / JOB_FILE} has settings where it should have sections", "file.syntax")
        return table
    except Missing:
        if newest is None:
            raise UserError(
                f"{directory} is not a run: it has neither job.toml nor a checkpoint", "run.missing"
            ) from None
        return msgspec.to_builtins(stored_job(newest))
    except UserError as error:
        way_out = f"repair or delete it: {newest.path} also has the job" if newest else "repair it"
        raise UserError(error.framed(after=f"; {way_out}")) from None


def newest_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The newest complete checkpoint whose manifest is undamaged; its tensors are not checked."""
    for checkpoint in checkpoints:
        try:
            _ = checkpoint.manifest
        except Damaged:
            continue
        return checkpoint
    return None


def resume_refusals(directory: Path, job: Job, sources: Splits, *, named: bool) -> list[str]:
    """Why the run of a directory cannot continue with a job, or was probably not meant to; [] if it can."""
    checkpoints = resumable_checkpoints(job, directory)
    newest = newest_of(checkpoints)
    if named and not checkpoints:
        return [f"{directory} has no checkpoint to resume from; --fresh starts its job over in a directory of its own"]
    if newest is None:  # the load says which are damaged
        return []
    if not (newest.manifest.step or newest.manifest.optimizer or named or job.run.weights):
        return [
            f"{directory} has imported weights, and this job of the same name does not say that it is meant for them: "
            f"it may have a rate of pretraining (optimizer.lr={job.optimizer.lr:g}); run.weights={newest.path} says "
            "so, and run.name=NAME or --fresh trains random ones in a directory of its own"
        ]
    changed, done = differences(newest, job, sources), newest.manifest.step
    return resume_problems(stored_job(newest), job, done, changed, directory, named=named) + _foreign(
        directory, sources
    )


def misbegun(job: Job, sources: Splits) -> list[str]:
    """Why a new run cannot start from the weights that its job names."""
    if not job.run.weights:
        return []
    way_out = "run.weights=RUN starts from another run's weights, and run.weights= from random ones"
    try:
        weights = find(job.run.weights)
        before = stored_job(weights)
    except UserError as error:
        return error.framed(f"run.weights={job.run.weights}: ", f"; {way_out}")
    if other := [str(change) for change in changes(before, job) if change.rule == NEVER]:
        return [f"run.weights={job.run.weights} belong to another model: {', '.join(other[:6])}; {way_out}"]
    return _foreign(run_of(weights), sources)


def _foreign(run: Place, sources: Splits) -> list[str]:
    """The problems if the data has another tokenizer than the weights of a run."""
    if not isinstance(run, Path):
        return []
    if (run / HF_CONFIG).is_file() and not (run / TOKENIZER_FILE).is_file():
        warnings.warn(
            Note(f"{run} has no {TOKENIZER_FILE}: nothing shows whether its model has these tokens"),
            stacklevel=2,
        )
    return [
        problem
        for store in sources.stores
        for problem in tokenizer_mismatches(run, store.path, TOKENIZER_FILES, END_NAMED_IN)
    ]


def differences(checkpoint: Checkpoint, job: Job, sources: Splits) -> list[Change]:
    """The changes of the job since the checkpoint, and of the data."""
    return changes(stored_job(checkpoint), job, (checkpoint.manifest.data, sources.fingerprint))


def misfits(checkpoint: Checkpoint, job: Job) -> list[str]:
    """Why a job cannot load a checkpoint: its model differs; [] if it can."""
    before = stored_job(checkpoint)
    return resume_problems(before, job, 0, changes(before, job), checkpoint.path, named=False)


def _runs(parent: Path) -> list[str]:
    return sorted(str(other.parent) for other in parent.glob(f"*/{JOB_FILE}")) if parent.is_dir() else []
