"""Everything that can be known to be wrong before any process starts."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fivefold.data.integrity import CheckedData, verify
from fivefold.data.rows import Splits
from fivefold.data.source_check import check
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.named_listeners import missing_packages
from fivefold.layout.stages import schedule_of
from fivefold.schedules.check import prove
from fivefold.support.errors import Problem, UserError, missing_package_sentence, not_installed
from fivefold.support.parsing import path_of
from fivefold.support.progress import Report, quiet
from fivefold.support.storage_place import remote_of
from fivefold.support.text import si

MAX_BUILT_IN = 100_000_000  # parameters of the largest model that trains on the standard library's source
HASHED_FIRST = 1 << 28  # bytes of the largest data that is hashed before the start; of larger data, during training


def preflight(job: Job, world: int, progress: Report = quiet) -> Splits:
    """All problems of a job on `world` ranks, raised together; otherwise its data, opened.

    `progress` is told how far the hashing of the data is.
    """
    problems = job_problems(job, world)
    if not_installed("torch"):
        problems.append(Problem("install.torch", missing_package_sentence("torch")))
    problems += missing_packages(job.run.heard)
    if not problems and job.checkpoint.url and (missing := remote_of(job.checkpoint.url).missing_package_message):
        problems.append(Problem("install.storage", f"checkpoint.url={missing}"))
    try:
        problems += run_directory_problems(path_of(job.run.dir))
    except UserError as error:
        problems += error.framed("run.dir: ")
    splits = open_data(job, problems, progress)
    if problems or splits is None:
        raise UserError(problems)
    return splits


def job_problems(job: Job, world: int) -> list[str]:
    """The problems of a job that are the same on every machine."""
    return job.problems(world, _way_to_ranks(job)) or _schedule_problems(job)


def run_directory_problems(parent: Path) -> list[str]:
    """Whether a run can make its directory in `parent`, which may not exist yet."""
    existing = next(folder for folder in (parent, *parent.absolute().parents) if os.path.exists(folder))
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    closed = f"run.dir={str(parent)!r}: {existing} is not a directory that can be written to"
    return [Problem("run.dir.write", closed)]


def needs_data(job: Job) -> bool:
    """Whether data.path must be filled in: the standard library's own source is no corpus for a large model."""
    return job.data.usual and not job.model.problems() and job.model.parameter_count > MAX_BUILT_IN


def open_data(job: Job, problems: list[str], progress: Report = quiet) -> Splits | None:
    """The data of a job; what is wrong with it joins the problems."""
    if needs_data(job):
        problems.append(
            Problem(
                "data.path.missing",
                f"data.path is not filled in, and {job.model.name} has {si(job.model.parameter_count)} parameters: "
                f"the built-in text is for models of up to {si(MAX_BUILT_IN)}; give a directory made by `fivefold data "
                "prepare`",
            )
        )
        return None

    def hash_files(splits: Splits) -> None:
        """A damaged file is named as such, before its tokens are looked at."""
        for store in splits.stores:
            if store.index.bytes <= HASHED_FIRST:
                verify(store, CheckedData(store.path), progress)

    try:
        splits = check(job.data, hash_files)
        problems += _vocab_problems(job, splits)
    except UserError as error:
        problems += error.coded
        return None
    if not job.train.eval_samples:
        splits = replace(splits, valid=None)
    problems += _length_problems(job, splits)
    return splits


def _way_to_ranks(job: Job) -> str:
    """How a user gets more ranks, for errors: a job that was planned for several nodes is not started by --nproc."""
    with suppress(UserError):  # its cluster is a file that is not on this machine
        if job.run.cluster and Cluster.read(job.run.cluster).nodes > 1:
            return f"`fivefold launch` for the {job.run.cluster} of run.cluster, with its"
    return "--nproc"


def _schedule_problems(job: Job) -> list[str]:
    """What only the builder of a schedule knows; and what is run is proven first, as what is drawn is."""
    try:
        prove(schedule_of(job.model, job.layout, job.data.seq))
    except UserError as error:
        return error.coded
    return []


def _vocab_problems(job: Job, splits: Splits) -> list[str]:
    """Whether the data has tokens that the model does not know."""
    vocab = max(row.vocab for row in splits.rows.values())
    if vocab <= job.model.vocab:
        return []
    has = f"data {splits.where} has a vocabulary of {vocab}, and model.vocab={job.model.vocab}"
    # Given weights have their vocabulary, and their tokenizer.
    way_out = "prepare the text with the tokenizer of run.weights" if job.run.weights else ""
    return [Problem("data.vocab", f"{has}; {way_out or f'nearest: model.vocab={vocab}'}")]


def _length_problems(job: Job, splits: Splits) -> list[str]:
    """Whether a split is shorter than one sample."""
    problems: list[str] = []
    for name, row in splits.rows.items():
        if row.tokens <= job.data.seq:
            way_out = ", or train.eval_samples=0" if name == "valid" else ""
            problems.append(
                Problem(
                    "data.seq.tokens",
                    f"the {name} split of {splits.where} has {row.tokens} tokens, fewer than a sample of data.seq="
                    f"{job.data.seq} and its last target; nearest: data.seq={max(1, row.tokens - 1)}{way_out}",
                )
            )
    return problems
