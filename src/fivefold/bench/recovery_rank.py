"""One rank of `fivefold bench recovery`."""

import os
import time
from pathlib import Path
from statistics import median

import torch.distributed as dist

from fivefold.checkpoint.memory import PLACE
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.writer import total
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_device
from fivefold.launch.ranks import Rank
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.train.checkpointing import Checkpoints
from fivefold.train.loop import Trainer


def _made(rank: Rank, job: Job, directory: str, memory: str) -> Checkpoints:
    os.environ[PLACE] = memory
    if rank.world > 1:
        rank.join("gloo")
    mesh = Mesh.of(job.layout, choose_device(job.train.device, rank.number), spec=job.model)
    trainer = Trainer(job, preflight(job, rank.world), mesh)
    return Checkpoints(Store(Path(directory) / "checkpoints"), Control(mesh), trainer, lambda _: None)


def lose(
    rank: Rank, job: Job, directory: str, memory: str, rounds: int, plain_steps: int
) -> tuple[int, list[float], list[float], list[float]]:
    """Steps, snapshots in memory beside them, one checkpoint on disk of the last step; then the ranks are gone."""
    kept = _made(rank, job, directory, memory)
    kept.restore()
    trainer = kept.trainer
    steps = enumerate(trainer.reads(), start=1)

    def step() -> float:
        number, read = next(steps)
        batch = read()
        start = time.perf_counter()
        trainer.step(number, batch)
        trainer.done, trainer.samples = number, int(batch.samples[-1]) + 1
        return time.perf_counter() - start

    for _ in range(3):  # each rank has three files, and makes them with its first snapshots
        step()
        kept.remember(trainer.done)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        kept.memory.finish()
        plain = median(step() for _ in range(plain_steps))
        start = time.perf_counter()
        kept.remember(trainer.done)
        blocked = time.perf_counter() - start
        beside = [step() for _ in range(plain_steps)]
        found.append((plain, blocked, blocked + sum(beside) - plain_steps * plain))
    kept.remember(trainer.done)
    kept.save(trainer.done)
    kept.memory.finish()
    kept.ensure()
    size = sum(kept.control.from_all(total(kept.pieces()), int))
    usual, stops, lost = map(list, zip(*found, strict=True))
    return size, usual, stops, lost


def find(rank: Rank, job: Job, directory: str, memory: str, tier: str, asked: float) -> tuple[float, float, float]:
    """Seconds of a new start: until it has a model, until that has its state, and until weights are those."""
    kept = _made(rank, job, directory, memory if tier == "memory" else f"{memory}-none")
    if rank.world > 1:
        dist.barrier()
    begun = time.time() - asked
    kept.restore()
    assert kept.began.startswith("memory") == (tier == "memory"), kept.began
    kept.close()
    return begun, kept.read, kept.seconds - kept.read
