"""The steps of `fivefold bench steps`: the trainer's own, on batches that are made up; one rank of it."""

import time
from dataclasses import replace
from statistics import median
from typing import cast

import torch

from fivefold.bench.steps import Case, Timed
from fivefold.job.config import CheckpointConfig, Compile, DataConfig, Dtype, Job, TrainConfig
from fivefold.job.preflight import Sources
from fivefold.launch.device import choose_device, peak_memory
from fivefold.launch.ranks import Rank
from fivefold.parallel.mesh import Mesh
from fivefold.train.loop import Trainer
from fivefold.verify.batches import plain_batch

WARM = 3  # steps before the timed ones, at least: kernels are chosen, and the allocator finds its blocks


def job_of(case: Case, dtype: Dtype, steps: int) -> Job:
    return Job(
        model=case.spec,
        layout=case.layout,
        data=DataConfig(seq=case.seq),
        train=TrainConfig(
            steps=WARM + steps, batch=case.batch, dtype=dtype, compile=cast(Compile, case.compile), deterministic=False
        ),
        checkpoint=CheckpointConfig(save=False),
    )


def run(rank: Rank, case: Case, wanted: str, dtype: str, steps: int, warm: float) -> Timed:
    """The median time from one step's end to the next one's, with all that a trainer does in between."""
    device = choose_device(wanted)
    kind = cast(Dtype, dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    unfit = Timed(case, name, str(torch.__version__), kind, steps)
    try:
        seconds = _steps(job_of(case, kind, steps), case, device, warm)
    except torch.OutOfMemoryError:
        return unfit
    middle, fastest, slowest = (round(value, 6) for value in (median(seconds), min(seconds), max(seconds)))
    return replace(unfit, seconds=middle, fastest=fastest, slowest=slowest, memory=peak_memory(device))


def _steps(job: Job, case: Case, device: torch.device, warm: float) -> list[float]:
    trainer = Trainer(job, cast(Sources, None), Mesh.of(job.layout, device))  # batches come from here: it reads none
    batches = [plain_batch(case.spec.vocab, case.batch, case.seq, seed) for seed in range(2)]
    ends: list[float] = []
    start, timed = time.perf_counter(), 0
    while timed < job.train.steps - WARM:
        trainer.step(min(len(ends) + 1, job.train.steps), batches[len(ends) % 2])
        ends.append(time.perf_counter())
        timed += len(ends) > WARM and ends[-2] - start > warm
    return [after - before for before, after in zip(ends[-timed - 1 : -1], ends[-timed:], strict=True)]
