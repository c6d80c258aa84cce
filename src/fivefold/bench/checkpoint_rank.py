"""One rank of `fivefold bench checkpoint`."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fivefold.bench.checkpoint import Times
from fivefold.checkpoint.load import load, newest
from fivefold.checkpoint.pieces import SavePlan, quietly
from fivefold.checkpoint.save import write
from fivefold.checkpoint.state import held, written
from fivefold.checkpoint.store import Checkpoint, Store
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_device
from fivefold.launch.ranks import Rank
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.files import sync
from fivefold.train.checkpointing import Checkpoints
from fivefold.train.loop import Trainer


def run(rank: Rank, job: Job, directory: str, rounds: int, plain_steps: int) -> Times:
    if rank.world > 1:
        rank.join("gloo")
    mesh = Mesh.of(job.layout, choose_device(job.train.device, rank.number))
    control = Control(mesh)
    trainer = Trainer(job, preflight(job, rank.world), mesh)
    checkpointing = Checkpoints(Store(Path(directory) / "run"), control, trainer, lambda _: None)
    steps = enumerate(trainer.reads(), start=1)

    def step() -> float:
        number, read = next(steps)
        batch = read()
        start = time.perf_counter()
        trainer.step(number, batch)
        trainer.done = number
        return time.perf_counter() - start

    checkpointing.prepare()
    for _ in range(2):
        step()
    times = Times()
    for _ in range(rounds):
        usual = median(step() for _ in range(plain_steps))
        start = time.perf_counter()
        checkpointing.save(trainer.done)
        times.snapshot.append(time.perf_counter() - start)
        beside = [step() for _ in range(plain_steps)]  # on every rank as many: they wait for each other
        times.usual.append(usual)
        times.lost.append(times.snapshot[-1] + sum(beside) - plain_steps * usual)
        checkpointing.saver.finish()
    _files(rank, control, checkpointing, Path(directory), rounds, times)
    return times


def _files(
    rank: Rank, control: Control, checkpointing: Checkpoints, directory: Path, rounds: int, times: Times
) -> None:
    """Save and load of the same state, in turns: ours, DCP alone, torch.save of what each rank holds."""
    engine, store = checkpointing.trainer.engine, Store(directory / "files")
    mine = written(engine.weights, checkpointing.shapes, engine.optimizer)
    into = held(engine.weights, checkpointing.shapes, engine.optimizer)
    plain = {name: piece.make() for name, piece in mine.items()}
    times.bytes = sum(control.from_all(sum(tensor.nbytes for tensor in plain.values())))
    wide, bare = directory / "dcp", directory / f"torch-{rank.number}.pt"

    def ours() -> None:
        write(store, control, mine, checkpointing.manifest(1))

    def dcp() -> None:
        writer, single = FileSystemWriter(wide, overwrite=True), control.size == 1
        with quietly():
            state_dict_saver.save(
                dict(mine), storage_writer=writer, planner=SavePlan(), process_group=control.group, no_dist=single
            )

    def alone() -> None:
        torch.save(plain, bare)
        sync(bare)

    def load_ours() -> None:
        found = newest(store, control, lambda _: None)
        assert found is not None
        load(found, into)

    def load_dcp() -> None:
        load(Checkpoint(wide), into)

    def load_alone() -> None:
        for name, tensor in torch.load(bare, weights_only=True).items():
            plain[name].copy_(tensor)

    for _ in range(rounds):
        for name, saves, loads in (("ours", ours, load_ours), ("dcp", dcp, load_dcp), ("torch", alone, load_alone)):
            times.save.setdefault(name, []).append(_timed(saves))
            times.load.setdefault(name, []).append(_timed(loads))
        if rank.number == 0:
            for old in store.complete():
                shutil.rmtree(old.path)
            shutil.rmtree(wide)
            os.sync()
        control.from_all(None)


def _timed(do: Callable[[], None]) -> float:
    """From when all ranks begin to when the last one ends."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    do()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start
