"""Runs with checkpoints on real ranks, in one call each."""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.store import Store
from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.parallel.collectives import digest, full_tensor
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.files import hash_file
from fivefold.trainer import loop
from fivefold.trainer.checkpointing import Checkpoints
from fivefold.trainer.loop import Trainer
from fivefold.trainer.records import Evaluation, Step

SMALL = ["model.layers=2", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=8", "train.steps=6",
         "optimizer.warmup=2", "optimizer.lr=1e-2", "train.device=cpu", "train.eval_samples=0",
         "train.timeout=20"]  # fmt: skip


def small_job(tokens: Path, *changes: str) -> Job:
    return read_job(None, [*SMALL, f"data.path={tokens}", *changes])


class Recorder:
    """What a run says, and which samples it saw."""

    def __init__(self) -> None:
        self.losses: dict[int, tuple[float, float]] = {}

    def on_step(self, record: Step) -> None:
        self.losses[record.step] = record.loss, record.grad_norm

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...


class Run:
    """A trainer, its checkpointing and what it has said so far."""

    def __init__(self, job: Job, world: int, directory: Path):
        mesh = Mesh.of_job(job, torch.device("cpu"), job.train.timeout)
        self.said: list[str] = []
        self.trainer = Trainer(job, preflight(job, world), mesh)
        self.keeper = Checkpoints(Store(directory), Control(mesh), self.trainer, self.said.append)
        self.recorder = Recorder()
        self.samples: list[int] = []
        plain = self.trainer.engine.forward_backward

        def watched(batch: Batch) -> torch.Tensor:
            self.samples += batch.samples.tolist()
            return plain(batch)

        self.trainer.engine.forward_backward = watched  # type: ignore[method-assign]

    def state(self) -> dict[str, str]:
        """Digests of all that is kept of this rank's stages, gathered."""
        kept = self.trainer.engine.optimizer.state()
        buffers = {name: digest(buffer) for name, buffer in self.trainer.engine.buffers.items()}
        return {f"{key}.{name}": digest(full_tensor(kept[name][key])) for name in kept for key in kept[name]} | buffers


Story = tuple[dict[int, tuple[float, float]], dict[str, str], list[int]]


def train(rank: int, world: int, job: Job, directory: Path) -> Story:
    """Goes on from what there is to the job's last step: losses and norms by step, the state, the samples it saw."""
    run = Run(job, world, directory)
    run.keeper.restore()
    if run.trainer.done < job.train.steps:
        run.trainer.run([run.recorder], checkpointing=run.keeper)
    return run.recorder.losses, run.state(), run.samples


def loaded(rank: int, world: int, job: Job, directory: Path) -> tuple[int, dict[str, str], list[str]]:
    """The step and state after loading, and what was said of it."""
    run = Run(job, world, directory)
    run.keeper.restore()
    return run.trainer.done, run.state(), run.said


def each(rank: int, world: int, function: Any, cases: list[tuple[Any, ...]]) -> list[Any]:
    """What a function of ranks makes of several cases, one after the other on the same ranks."""
    with patch.object(loop, "same_calls", lambda mesh: nullcontext()):  # calls are numbered for one run
        return [function(rank, world, *case) for case in cases]


def gathered(ranks: list[dict[str, str]]) -> dict[str, str]:
    """The stages of a pipeline together; ranks that hold the same must agree."""
    found: dict[str, str] = {}
    for one in ranks:
        for name, value in one.items():
            assert found.setdefault(name, value) == value, f"{name} differs between ranks"
    return found


def resealed(path: Path, **changes: Any) -> None:
    """What a checkpoint says of itself, changed, with the sums of its files as they are and a seal that holds."""
    table = json.loads((path / MANIFEST).read_bytes()) | changes
    if "files" not in changes:
        table["files"] = [msgspec.to_builtins(hash_file(path / file["name"])) for file in table["files"]]
    table["seal"] = ""
    table["seal"] = hashlib.sha256(msgspec.json.encode(table)).hexdigest()
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
