"""Layouts against one process, over real NCCL: ranks that share a GPU, and stay up from layout to layout."""

from dataclasses import replace

import pytest

import fivefold.trainer.engine
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.schedules.actions import RECEIVE_KINDS
from fivefold.schedules.check import check
from fivefold.schedules.schedule import Schedule
from fivefold.spec.model import ModelSpec
from fivefold.verifier.compare import OPTIMIZER
from fivefold.verifier.result import VerifyResult
from fivefold.verifier.verify import Judge, verify
from tests.gpu.nccl import needs_a_gpu

pytestmark = needs_a_gpu
NCCL = ["train.share_gpu=nccl", "train.compile=off"]


def failures(found: VerifyResult) -> list[str]:
    return [f"{case.job.layout} {case.variant}: {verdict.broken or verdict.problems}\n{verdict.details}"
            for case, verdict in found.verdicts if not verdict.passed]  # fmt: skip


@pytest.mark.parametrize(("world", "sample"), [(4, 24), (8, 6)])
def test_layouts_compute_what_one_process_computes(world: int, sample: int) -> None:
    found = verify(changes=NCCL, device="cuda", everything=True, world=world, sample=sample, jobs=2, timeout=100)
    assert len(found.verdicts) == sample
    assert not failures(found)


@pytest.mark.parametrize(("world", "sample"), [(2, 6), (4, 3)])
def test_compiled_blocks_in_bfloat16_hold(world: int, sample: int) -> None:
    """The defaults on a GPU: stages compile before the first message, while no receive is posted."""
    found = verify(
        changes=["train.share_gpu=nccl"], device="cuda", dtype="bfloat16", everything=True, world=world, sample=sample,
        timeout=200,
    )  # fmt: skip
    assert any(case.job.layout.pp > 1 for case, _ in found.verdicts)
    assert all(verdict.graphs for _, verdict in found.verdicts)
    assert not failures(found)


def test_ranks_that_stay_up_forget_the_groups_of_the_layout_before() -> None:
    """Both have the same mesh for DTensor, whose backward passes remember it in a thread of their own; a model of
    experts has more groups, so that one of the first may not exist in the second."""
    layout = "layout=dp=2,tp=2,zero=3,replicate=2,sp,microbatches=2"
    jobs = [_job(f"model={model}", layout) for model in ("tiny-moe", "tiny", "tiny-moe")]
    with Judge(100) as judge:
        found = judge.with_persistent_ranks(jobs, 1, lambda *_: None)
    assert [verdict.problems for verdict in found] == [[], [], []]


def plant_early_receives() -> None:
    """Before the first action, each rank posts all receives that buffers allow: as safe as can be on gloo."""
    fivefold.trainer.engine.schedule_of = early  # type: ignore[attr-defined]


def early(spec: ModelSpec, layout: Layout, seq: int) -> Schedule:
    schedule = schedule_of(spec, layout, seq)
    return replace(schedule, ranks=tuple(map(_first, schedule.ranks)), buffers=schedule.microbatches)


def _first(order: tuple) -> tuple:  # type: ignore[type-arg]
    receives = tuple(action for action in order if action.kind in RECEIVE_KINDS)
    return receives + tuple(action for action in order if action.kind not in RECEIVE_KINDS)


def _job(model: str = "model=tiny", layout: str = "layout=pp=2,microbatches=4") -> Job:
    small = [model, "model.hidden=64", "model.ffn=96", "model.layers=2", layout]
    more = ["data.seq=32", "train.batch=8", "train.steps=1", "train.dtype=float64", "train.device=cuda", *NCCL]
    return read_job(None, [*small, *more, *(f"optimizer.{key}={value}" for key, value in OPTIMIZER.items())])


def test_an_early_receive_is_refused_and_hangs_where_nobody_checks() -> None:
    job = _job()
    (problem,) = check(early(job.model, job.layout, job.data.seq))
    assert problem.obligation == "rendezvous"
    assert "that is a circle of 2" in problem.sentence
    with Judge(timeout=25) as judge:
        assert judge(job).passed
    with Judge(timeout=25, hook="tests.gpu.test_nccl_layouts:plant_early_receives") as judge:
        verdict = judge(job)
    assert "gave no answer within 25 s" in verdict.broken
