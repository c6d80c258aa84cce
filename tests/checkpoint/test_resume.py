"""Runs that are cut by SIGKILL, again and again, and runs that change their layout on the way."""

import os
import random
from pathlib import Path

import pytest

from fivefold.checkpoint.store import Store
from fivefold.launch.processes import RankError
from tests.checkpoint.runs import gathered, small_job, train
from tests.ranks import run_ranks


@pytest.mark.parametrize(("steps", "deaths"), [(6, 3), pytest.param(40, 20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_every_other_step_is_the_whole_run_to_the_bit(
    tokens: Path, tmp_path: Path, steps: int, deaths: int
) -> None:
    """Whoever is killed, and whether in a step, while files are written, or before the manifest is renamed."""
    job = small_job(tokens, "layout=dp=2,zero=1", f"train.steps={steps}", "checkpoint.every=1", "checkpoint.keep=2")
    want = run_ranks(2, train, job, tmp_path / "whole")
    chance = random.Random(0)
    directory, kills = tmp_path / "cut", 0
    while kills < deaths:
        done = next((one.step for one in Store(directory).complete()), 0)
        step = done + chance.randint(1, 3)
        assert step <= steps, "the kills were to be over before the run is"
        # A kill for every two steps: some must not get far.
        at = chance.choice(["step", "step", "commit"]) if done < 2 * kills + 1 else "commit"
        victim = 0 if at == "commit" else chance.randrange(2)
        fault = f"kill@at={at},rank={victim},step={min(step, done + 2 if at == 'step' else done + 1)}"
        with pytest.raises(RankError) as failure:
            run_ranks(2, train, job, directory, env=dict(os.environ) | {"FIVEFOLD_FAULT": fault})
        assert failure.value.error == "SIGKILL"
        kills += 1
    story = run_ranks(2, train, job, directory)
    for one, two in zip(want, story, strict=True):
        assert two[1] == one[1]
        assert all(one[0][step] == numbers for step, numbers in two[0].items())


def test_a_run_through_four_layouts_follows_one_process(tokens: Path, tmp_path: Path) -> None:
    """2 steps each. How far float32 strays by the order of additions alone, a control shows: one process with its
    samples in other microbatches. Three times that is allowed, and every sample is seen once."""
    chain = ["dp=2,zero=3", "tp=2,pp=2,microbatches=2", "cp=2,dp=2", "dp=1"]
    losses: dict[int, float] = {}
    samples: list[int] = []
    for number, layout in enumerate(chain, start=1):
        job = small_job(tokens, f"layout={layout}", f"train.steps={2 * number}", "optimizer.schedule=constant")
        stories = run_ranks(job.layout.world, train, job, tmp_path / "chain")
        losses |= {step: loss for step, (loss, _) in stories[0][0].items()}
        samples += stories[0][2]
        gathered([state for _, state, _ in stories])

    def alone(name: str, microbatches: int) -> dict[int, float]:
        settings = [f"layout.microbatches={microbatches}", "train.steps=8", "optimizer.schedule=constant"]
        losses, _, _ = train(0, 1, small_job(tokens, *settings), tmp_path / name)
        return {step: loss for step, (loss, _) in losses.items()}

    want, control = alone("alone", 1), alone("control", 4)
    noise = max(abs(want[step] - control[step]) / want[step] for step in want)
    strayed = max(abs(want[step] - losses[step]) / want[step] for step in want)
    print(f"strayed {strayed:.2e}, the control {noise:.2e}")
    assert 0 < noise < 1e-3
    assert strayed <= 3 * noise
    assert samples == list(range(8 * 8))
