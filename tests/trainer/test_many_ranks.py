"""A run on many ranks is the run on one: losses, norms and held-out losses, with samples that do not divide."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.parallel.mesh import Mesh
from fivefold.trainer import loop
from fivefold.trainer.loop import Trainer
from tests.ranks import run_ranks
from tests.trainer.test_loop import Recorder, small_job

LAYOUTS = {
    2: ["tp=2,sp", "pp=2,microbatches=2,schedule=zb-v"], 4: ["dp=2,cp=2,zero=3", "dp=4,zero=1", "dp=2,pp=2,zero=2"]
}  # fmt: skip
COMMON = ["train.dtype=float64", "train.steps=3", "train.eval_every=2", "train.eval_samples=5", "model.dropout=0.1"]


def run(rank: int, world: int, jobs: list[Job]) -> list[list[float]]:
    """Losses, norms and held-out losses of several runs, one after the other on the same ranks."""
    found = []
    for job in jobs:
        trainer, recorder = Trainer(job, preflight(job, world), Mesh.of(job.layout, torch.device("cpu"))), Recorder()
        with patch.object(loop, "same_calls", lambda mesh: nullcontext()):  # calls are numbered for one run
            trainer.run([recorder])
        numbers = [number for step in recorder.steps for number in (step.loss, step.grad_norm)]
        found.append(numbers + [evaluation.held_out_loss for evaluation in recorder.evaluations])
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_run_on_many_ranks_is_the_run_on_one(tokens: Path, world: int) -> None:
    (want,) = run(0, 1, [small_job(tokens, *COMMON)])
    assert len(want) == 8
    for of_rank in run_ranks(world, run, [small_job(tokens, *COMMON, f"layout={one}") for one in LAYOUTS[world]]):
        assert dict(zip(LAYOUTS[world], of_rank, strict=True)) == {
            layout: pytest.approx(want, rel=1e-9) for layout in LAYOUTS[world]
        }


def test_padding_adds_samples_without_loss() -> None:
    arrays = np.arange(12).reshape(3, 4)
    batch = Batch(np.arange(3), arrays, arrays, np.ones((3, 4), bool), arrays)
    padded = batch.padded(2)
    assert padded.tokens.shape == (4, 4)
    assert padded.loss_tokens == batch.loss_tokens == 12
    assert padded.loss_mask[3].sum() == 0
    assert batch.padded(3) is batch
