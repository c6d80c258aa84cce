"""The commands that a checkup runs, and the words of their command lines.

    task = Task(kind="train", token="0c1d2e3f", layout="dp=2", steps=8)
    task_words(task, base)      # ["train", "model=tiny", "layout=dp=2", ...]

Under srun or torchrun rank 0 tells the other ranks which task is next. A task says what kind it is and a few numbers,
and every rank makes the words from these and from its own command line: no rank runs words that another one has sent.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import PRESETS
from fivefold.support.errors import UserError
from fivefold.support.parsing import path_of

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
LOST_STEPS, LOST_EVERY, LOST_AT = 8, 2, 5  # steps of the run that loses a rank, between checkpoints, and of the loss
WARM_STEPS, TRACED_STEPS = 3, 2  # steps before the timed ones of a layout's run, and the traced ones after them
CALIBRATED = "calibrated.toml"
_LONGEST_WAIT_S = 300.0  # seconds that a rank waits for another, where the time of a part does not end it first
TOKENS = "tokens"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command, which all ranks run as one world, or (verify) the first rank of each node by itself."""

    kind: Literal["doctor", "verify", "lose", "calibrate", "train"]
    token: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]  # names the folder of this checkup in run.dir
    device: Literal["cpu", "cuda"]
    limit: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0  # seconds
    layout: Annotated[str, msgspec.Meta(max_length=400)] = ""
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{0,40}$")] = ""  # of a run
    model: Annotated[str, msgspec.Meta(max_length=60)] = ""  # a preset; empty: the user's own job
    layers: Count = 0
    seq: Count = 0
    batch: Count = 0
    steps: Count = 0
    sample: Count = 0  # layouts to prove
    ranks: Count = 1  # of the world; of verify, on each node
    lost: int = -1  # the rank that is killed; -1: none
    quick: bool = True  # of calibrate
    start: Count = 0  # which start of a run this is
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0  # where the ranks of several launched processes meet

    @property
    def by_node(self) -> bool:
        return self.kind == "verify"


@dataclass(frozen=True)
class TypedJob:
    """What every rank knows from its own command line."""

    job: Job
    words: tuple[str, ...]  # a job file, and changes
    own_model: bool  # the words name a model, which the layouts train

    def folder(self, token: str) -> Path:
        """Where the runs of a checkup lie, until it ends."""
        return path_of(self.job.run.dir) / f"checkup-{token}"

    def common(self, task: Task) -> list[str]:
        train = self.job.train
        return [
            f"run.dir={self.folder(task.token)}",
            f"train.device={'mixed' if train.device == 'mixed' else task.device}",
            f"train.share_gpu={train.share_gpu}",
            f"train.timeout={min(train.timeout, _LONGEST_WAIT_S):g}",  # the same in all starts of a run
        ]


def check_task(value: Any) -> Task:
    """A task that another rank has told; raises an error for one that names anything but what is in the package."""
    task = msgspec.convert(value, Task)
    if task.model and task.model not in PRESETS:
        raise UserError(f"rank 0 names the model {task.model!r}, which is no preset here", "checkup.task")
    if task.layout and Layout.parse(task.layout).schedule not in CATALOGUE:
        raise UserError(f"rank 0 names a schedule in {task.layout!r} that is not the package's own", "checkup.task")
    return task


def task_words(task: Task, base: TypedJob, *, launched: bool) -> list[str]:
    """The words of the task's command line; `launched`: the ranks are there, and each runs the command."""
    nproc = [] if launched or task.ranks == 1 else ["--nproc", str(task.ranks)]
    match task.kind:
        case "doctor":
            return ["doctor", *base.common(task), f"layout={task.layout}", "--json", *nproc]
        case "verify":
            return _verify_words(task, base)
        case "calibrate":
            file = str(base.folder(task.token) / CALIBRATED)
            quick = ["--quick"] if task.quick else []
            alone = ["calibrate", *quick, "--device", task.device, "-o", file, "--json"]
            share = ["--share-gpu", base.job.train.share_gpu]
            return [*alone, "--ranks", *share, *nproc] if task.ranks > 1 else alone
        case "lose":
            restarts = ["--restarts", "1"] if nproc and task.lost >= 0 else []
            return ["train", *_short_run(task), *base.common(task), *nproc, *restarts]
        case "train":
            return ["train", *_measured_run(task, base), *base.common(task), *nproc]


def _verify_words(task: Task, base: TypedJob) -> list[str]:
    on_gpu = task.device == "cuda"
    shared = on_gpu and task.ranks > 1 and base.job.train.share_gpu == "nccl"
    changes = [*(["train.share_gpu=nccl"] if shared else []), *(["train.compile=off"] if on_gpu else [])]
    return [
        "verify", "--all", "--world", str(task.ranks), "--sample", str(task.sample),
        "--device", task.device, "--timeout", f"{max(10.0, task.limit):.0f}", *changes, "--json",
    ]  # fmt: skip


def _short_run(task: Task) -> list[str]:
    """A small model that trains for a few steps, with checkpoints; the same bits whenever it is run."""
    return [
        "model=tiny", f"layout={task.layout}", "data.seq=64", f"train.batch={4 * task.ranks}", "train.dtype=float32",
        f"train.steps={LOST_STEPS}", f"checkpoint.every={LOST_EVERY}", "train.compile=off", "train.eval_samples=0",
        f"run.name={task.name}",
    ]  # fmt: skip


def _measured_run(task: Task, base: TypedJob) -> list[str]:
    """The run that times a layout, and then traces it."""
    model = [f"model={task.model}", f"model.layers={task.layers}"] if task.model else [*base.words]
    sizes = [f"data.seq={task.seq}", f"train.batch={task.batch}"] if task.model else []
    dtype = [f"train.dtype={'float32' if task.device == 'cpu' else 'bfloat16'}"] if task.model else []
    data = [f"data.path={base.folder(task.token) / TOKENS}"] if task.model else []
    steps = WARM_STEPS + task.steps
    return [
        *model, *sizes, *dtype, *data, f"layout={task.layout}", f"train.steps={steps + TRACED_STEPS}",
        f"trace.after={steps}", f"trace.steps={TRACED_STEPS}", "train.deterministic=false", "train.eval_samples=0",
        "train.eval_every=0", "checkpoint.save=false", "checkpoint.url=", "elastic.whole=", f"run.name={task.name}",
        "run.listeners=",
    ]  # fmt: skip


def task_env(task: Task) -> dict[str, str | None]:
    """The environment of the task's command, beside that of its ranks."""
    if task.kind != "lose":
        return {}
    return {"FIVEFOLD_FAULT": f"kill@rank={task.lost},step={LOST_AT}" if task.lost >= 0 else None}
