"""Everything that can be known to be wrong before any process starts."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.data.corpus import stdlib_corpus
from fivefold.data.index import NAME as INDEX
from fivefold.data.integrity import CheckedData, verify
from fivefold.data.tokens import Split, TokenStore
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.stages import schedule_of
from fivefold.schedules.check import prove
from fivefold.support.errors import Problem, UserError, absent, needs
from fivefold.support.parsing import path_of
from fivefold.support.places import remote_of
from fivefold.support.progress import Report, quiet
from fivefold.support.text import si

BUILT_IN = 100_000_000  # parameters of the largest model that trains on the standard library's source
QUICK = 1 << 28  # bytes that are hashed before the start, in a second or two; those of larger sets, during training


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    train: Split
    valid: Split | None  # documents kept apart when the data was prepared, if any
    path: Path

    @property
    def fingerprint(self) -> str:
        """Of all tokens: the index has the sha256 of every file."""
        return hashlib.sha256((self.path / INDEX).read_bytes()).hexdigest()


def preflight(job: Job, world: int, progress: Report = quiet) -> Sources:
    """All problems of a job on `world` ranks, raised together; otherwise its data, opened.

    `progress` is told how far the hashing of the data is.
    """
    problems = job_problems(job, world)
    if absent("torch"):
        problems.append(Problem("install.torch", needs("torch")))
    if job.run.tensorboard and absent("tensorboard"):
        how = 'pip install "fivefold[tensorboard]"'
        problems.append(Problem("install.tensorboard", f"run.tensorboard needs tensorboard: {how}"))
    if not problems and job.checkpoint.url and (missing := remote_of(job.checkpoint.url).missing):
        problems.append(Problem("install.storage", f"checkpoint.url={missing}"))
    try:
        problems += run_directory_problems(path_of(job.run.dir))
    except UserError as error:
        problems += error.framed("run.dir: ")
    sources = open_data(job, problems, progress)
    if problems or sources is None:
        raise UserError(problems)
    return sources


def job_problems(job: Job, world: int) -> list[str]:
    """Those that are the same on every machine."""
    return job.problems(world, _ranks_by(job)) or _schedule(job)


def _ranks_by(job: Job) -> str:
    """How to get the ranks of a job: one that was planned for several nodes is not started by --nproc."""
    with suppress(UserError):  # a file that is not on this machine
        if job.run.cluster and Cluster.read(job.run.cluster).nodes > 1:
            return f"`fivefold launch` for the {job.run.cluster} of run.cluster, with its"
    return "--nproc"


def _schedule(job: Job) -> list[str]:
    """What only the builder of a schedule knows; and what is run is proven first, as what is drawn is."""
    try:
        prove(schedule_of(job.model, job.layout, job.data.seq))
    except UserError as error:
        return error.coded
    return []


def run_directory_problems(parent: Path) -> list[str]:
    existing = next(folder for folder in (parent, *parent.absolute().parents) if os.path.exists(folder))
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    closed = f"run.dir={str(parent)!r}: {existing} is not a directory that can be written to"
    return [Problem("run.dir.write", closed)]


def needs_data(job: Job) -> bool:
    """Whether data.path must be filled in: the standard library's own source is no corpus for a large model."""
    return not job.data.path and not job.model.problems() and job.model.parameter_count > BUILT_IN


def open_data(job: Job, problems: list[str], progress: Report = quiet) -> Sources | None:
    """The data of a job; what is wrong with it joins the problems."""
    if needs_data(job):
        problems.append(
            Problem(
                "data.path.missing",
                f"data.path is not filled in, and {job.model.name} has {si(job.model.parameter_count)} parameters: "
                f"the built-in text is for models of up to {si(BUILT_IN)}; give a directory made by `fivefold data "
                "prepare`",
            )
        )
        return None
    try:
        path = path_of(job.data.path) if job.data.path else stdlib_corpus()
        store = TokenStore.open(path)
        if store.vocab > job.model.vocab:
            has = f"data {path} has a vocabulary of {store.vocab}, and model.vocab={job.model.vocab}"
            # Given weights have their vocabulary, and their tokenizer.
            way_out = "prepare the text with the tokenizer of run.weights" if job.run.weights else ""
            problems.append(Problem("data.vocab", f"{has}; {way_out or f'nearest: model.vocab={store.vocab}'}"))
        elif store.index.bytes <= QUICK:
            verify(store, CheckedData(path), progress)
        valid = store.split("valid") if "valid" in store.index.splits and job.train.eval_samples else None
        sources = Sources(store.split("train"), valid, path)
    except UserError as error:
        problems += error.coded
        return None
    for split in filter(None, (sources.train, sources.valid)):
        if split.tokens <= job.data.seq:
            way_out = ", or train.eval_samples=0" if split is valid else ""
            problems.append(
                Problem(
                    "data.seq.tokens",
                    f"the {split.name} split of {path} has {split.tokens} tokens, fewer than a sample of data.seq="
                    f"{job.data.seq} and its last target; nearest: data.seq={max(1, split.tokens - 1)}{way_out}",
                )
            )
    return sources
