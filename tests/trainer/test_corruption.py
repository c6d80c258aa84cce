"""Bits that flip in mid-run: each is found by the watcher that is said to find it, and a clean run is left alone."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.checkpoint.store import Store
from fivefold.data.prepare import prepare
from fivefold.launch import faults
from fivefold.trainer import loop
from tests.checkpoint.runs import Run, small_job
from tests.ranks import run_ranks

BFLOAT16 = "train.dtype=bfloat16"
SHARED_KV = ["model.heads=4", "model.kv_heads=1"]
EXPERTS = ["model=tiny-deepseek", "model.layers=3", "model.hidden=32", "model.experts.ffn=16"]
EVERY = ["watch.digests=1", "watch.shards=1", "watch.replay=1"]
NEVER = ["watch.digests=0"]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("A text that is long enough for a few steps of a small model. " * 200)
    prepare([folder], folder / "tokens")
    return folder / "tokens"


def trained(job: Any, world: int, directory: Path, fault: str = "") -> tuple[str, dict[int, tuple[float, float]]]:
    """Why the run ended early, and its losses."""
    run = Run(job, world, directory)
    # Calls are numbered for one run, and these ranks make several.
    once = patch.object(loop, "same_calls", lambda mesh: nullcontext())
    try:
        with patch.dict(os.environ, FIVEFOLD_FAULT=fault), once:
            run.keeper.restore()
            run.trainer.run([run.recorder], checkpointing=run.keeper)
    except Exception as error:
        return f"{type(error).__name__}: {error}", run.recorder.losses
    return "", run.recorder.losses


def counted(rank: int, world: int, jobs: list[Any], directory: Path) -> list[dict[str, Any]]:
    """What each of several runs has counted in its second step."""
    found = []
    for number, job in enumerate(jobs):
        run = Run(job, world, directory / str(number))
        with patch.object(loop, "same_calls", lambda mesh: nullcontext()):
            run.trainer.run([run.recorder])
        found.append(run.trainer.counted.to_dict())
    return found


def stories(rank: int, world: int, jobs: list[tuple[Any, str]], directory: Path) -> list[Any]:
    """Several runs, one after the other, on the same ranks."""
    return [trained(job, world, directory / str(number), fault) for number, (job, fault) in enumerate(jobs)]


def told(tokens: Path, directory: Path, world: int, cases: list[tuple[list[str], str]]) -> list[str]:
    """What all ranks say alike of each case: settings and a fault."""
    jobs = [(small_job(tokens, "train.steps=4", "checkpoint.save=false", *changes), fault) for changes, fault in cases]
    ranks = run_ranks(world, stories, jobs, directory)
    said = [[sentence for sentence, _ in of_rank] for of_rank in ranks]
    assert all(one == said[0] for one in said), "ranks do not decide alike"
    return said[0]


def test_flips_in_what_two_ranks_hold_or_one_alone_and_in_compute_are_found(tokens: Path, tmp_path: Path) -> None:
    """Within N steps; a flip that the next gather of weights mends is seen in the step that used it."""
    shard = "flip@rank=1,step=2,at=shard"
    cases: list[tuple[list[str], str]] = [
        (["layout=dp=2", "watch.digests=3"], "flip@rank=1,step=1"),
        (["layout=dp=2,zero=1", BFLOAT16, "watch.digests=3"], "flip@rank=1,step=2"),
        (["layout=dp=2,zero=2", "watch.shards=3", "watch.digests=0"], shard),
        (["layout=dp=2,zero=3", "watch.shards=3"], shard),
        (["layout=dp=2,zero=1,microbatches=2", "watch.replay=3"], "flip@rank=1,step=3,at=compute"),
        (["layout=dp=2,zero=3,microbatches=2", "watch.replay=3"], "flip@rank=0,step=3,at=compute"),
        (["layout=dp=2,zero=2", "watch.shards=4", "watch.digests=0"], shard),  # not the window that is audited
        (["layout=dp=2,zero=1", "watch.digests=4"], "flip@rank=1,step=1"),  # used, and mended before they look
    ]
    weight, copy, in_two, in_three, compute, gathered, *missed = told(tokens, tmp_path, 2, cases)
    assert weight.startswith(
        "Corrupt: step 3: rank 0 (dp 0) and rank 1 (dp 1) should hold the same bits of embedding.weight, but do not"
    )
    assert "after step 0 all copies were the same" in weight
    assert "embedding.weight as the model has it" in copy
    for one in (in_two, in_three):
        assert "between the updates of steps 2 and 3, on rank 1 (dp 1): exp_avg of embedding.weight;" in one
    assert "step 3: rank 1 (dp 1) got different gradients for the same microbatch in two runs;" in compute
    assert "gradients of steps 1 to 3 may be wrong" in compute
    assert "step 3: rank 0 (dp 0) got different gradients" in gathered
    assert missed == ["", ""]


@pytest.mark.parametrize("changes", [["layout.microbatches=2"], [BFLOAT16]])
def test_a_rank_alone_checks_what_it_holds_and_what_it_computes(
    tokens: Path, tmp_path: Path, changes: list[str]
) -> None:
    """Compute against itself: a flip that does not repeat."""
    every = ["train.steps=4", "checkpoint.save=false", "watch.shards=2", "watch.replay=3", *changes]
    ends = {at: trained(small_job(tokens, *every), 1, tmp_path, f"flip@step=3,at={at}")[0] for at in faults.FLIP_PLACES}
    held = "step 4: what nobody else holds has changed between the updates of steps 3 and 4, on rank 0: "
    model = " as the model has it" if BFLOAT16 in changes else ""
    assert f"{held}embedding.weight{model};" in ends["weight"]
    assert f"{held}exp_avg of embedding.weight;" in ends["shard"]
    assert "step 3: rank 0 got different gradients for the same microbatch in two runs;" in ends["compute"]
    assert trained(small_job(tokens, *every), 1, tmp_path)[0] == ""


@pytest.mark.slow
def test_of_three_copies_the_odd_one_is_named(tokens: Path, tmp_path: Path) -> None:
    cases = [
        (["layout=dp=3", "train.batch=6", "watch.digests=2"], f"flip@rank=2,step=1,at={at}")
        for at in ("weight", "shard")
    ]
    weight, moment = told(tokens, tmp_path, 3, cases)
    assert "step 2: rank 2 (dp 2) holds different bits than ranks 0, 1 of embedding.weight;" in weight
    assert "step 2: rank 2 (dp 2) holds different bits than ranks 0, 1 of exp_avg of embedding.weight;" in moment


def saved(rank: int, world: int, jobs: list[tuple[Any, str]], directory: Path) -> list[Any]:
    """Several starts of one run."""
    return [trained(job, world, directory, fault) for job, fault in jobs]


def test_damaged_state_is_not_saved_and_what_may_be_is_set_aside(tokens: Path, tmp_path: Path) -> None:
    """Copies are compared before a save, whenever else they are; and the run goes on as if nothing had been."""
    common = ["layout=dp=2,zero=1", "checkpoint.every=2", "checkpoint.keep=9", "watch.digests=100", "watch.shards=5"]
    job = small_job(tokens, *common)
    before, again = saved_runs = tmp_path / "flipped", tmp_path / "clean"
    flip = [(job, "flip@rank=1,step=4,at=shard"), (job, "")]
    (first, second), _ = run_ranks(2, saved, flip, before), [path.mkdir(exist_ok=True) for path in saved_runs]
    (found, _), (ended, losses) = first
    assert "on rank 1 (dp 1): exp_avg of embedding.weight; " in found
    assert "from the last checkpoint before step 4" in found
    assert ended == second[1][0] == ""
    assert [path.name for path in Store(before).set_aside_folders()] == ["step-00000004.suspect"]
    ((_, uninterrupted),), _ = run_ranks(2, saved, [(job, "")], again)
    assert losses == {step: uninterrupted[step] for step in (3, 4, 5, 6)}

    replicated = small_job(tokens, "layout=dp=2", "checkpoint.every=3", "watch.digests=100")
    ((found, _),), _ = run_ranks(2, saved, [(replicated, "flip@rank=0,step=2")], tmp_path / "weight")
    assert found.startswith("Corrupt: step 3: rank 0 (dp 0) and rank 1 (dp 1) should hold the same bits")
    assert "it was not saved" in found
    assert Store(tmp_path / "weight").complete() == []


@pytest.mark.slow
def test_counts_of_a_step_do_not_see_the_watchers(tokens: Path, tmp_path: Path) -> None:
    changes = ["layout=dp=2,zero=3,microbatches=2", "train.steps=2", "train.count=true"]
    for watched, plain in run_ranks(
        2, counted, [small_job(tokens, *changes, *how) for how in (EVERY, NEVER)], tmp_path
    ):
        # The highest moment depends on when FSDP2's gathers end, with watchers and without.
        assert {**watched, "peak_bytes": 0} == {**plain, "peak_bytes": 0}
        assert plain["traffic"]


LAYOUTS = {
    2: [
        ["layout=dp=2", BFLOAT16],
        ["layout=dp=2,zero=2"],
        ["layout=dp=2,zero=3,microbatches=2", BFLOAT16],
        ["layout=tp=2", *SHARED_KV],
        ["layout=pp=2,microbatches=4", "model.tied=true", "layout.zero=1"],
        ["layout=dp=2,ep=2,zero=1", "model.dropout=0.1", *EXPERTS],
    ],
    4: [
        ["layout=dp=2,tp=2,zero=1,sp=true", *SHARED_KV],
        ["layout=dp=2,pp=2,zero=2,microbatches=2,schedule=zb-h1", "model.tied=true"],
        ["layout=dp=2,pp=2,zero=3,microbatches=2,schedule=zb-h1"],
        ["layout=dp=4,zero=3,replicate=2,microbatches=2"],
        ["layout=dp=2,pp=2,ep=2,schedule=dualpipe-v,microbatches=4", "model=tiny-moe", "model.layers=4"],
        ["layout=dp=2,tp=2,ep=2", *EXPERTS],
        ["layout=dp=4,ep=2,zero=3", *EXPERTS],
        ["layout=dp=2,cp=2,zero=1"],
        ["layout=tp=2,pp=2,microbatches=2", "model.tied=true"],
    ],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_clean_run_finds_nothing_and_its_losses_are_the_same_bits(tokens: Path, tmp_path: Path, world: int) -> None:
    few = ["train.steps=3", "checkpoint.save=false"]
    jobs = [(small_job(tokens, *one, *few, *how), "") for one in LAYOUTS[world] for how in (EVERY, NEVER)]
    for of_rank in run_ranks(world, stories, jobs, tmp_path):
        assert [sentence for sentence, _ in of_rank] == [""] * len(jobs)
        for number, changes in enumerate(LAYOUTS[world]):
            (_, watched), (_, plain) = of_rank[2 * number : 2 * number + 2]
            assert len(plain) == 3
            assert watched == plain, changes
