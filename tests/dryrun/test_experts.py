"""The dry run with experts: where tokens go is stated, and what follows is what the closed forms say."""

import pytest
import torch

from fivefold.dryrun.routing import StatedRouting, dealt
from fivefold.dryrun.run import RankRun, dry_run
from fivefold.job.config import Job
from fivefold.plan.cost.dispatch import even_rows
from fivefold.plan.cost.executed import rank_flops
from fivefold.plan.cost.memory import state_of
from fivefold.plan.cost.traffic import Seat, expected
from tests.dryrun.test_dryrun import job_of

SMALL = [
    ("tiny-moe", "dp=4,ep=2"),
    ("tiny-moe", "dp=4,ep=4,zero=2,dispatch=allgather,microbatches=2,recompute=selective"),
    ("tiny-deepseek", "dp=2,tp=2,ep=4,zero=1,recompute=full"),
    ("tiny-deepseek", "dp=4,tp=2,sp,ep=4,zero=3,microbatches=2"),
    ("tiny-deepseek", "dp=2,pp=2,ep=2,schedule=zb-h1,microbatches=4"),
]


def check_counts(job: Job, dry: RankRun, imbalance: float = 1.0) -> None:
    """State, traffic and FLOPs are equal."""
    spec, layout, seq, batch = job.model, job.layout, job.data.seq, job.train.batch
    seat = Seat.of(layout, dry.rank)
    state = state_of(spec, layout, job.train.dtype, job.optimizer, **seat._asdict(), seq=seq)
    assert (dry.parameters, dry.gradients, dry.optimizer) == state
    tokens = batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
    layers = sum(dry.layers) - (spec.dense_layers if seat.pp == 0 else 0)
    rows = even_rows(spec, layout, tokens, range(layers), seat.tp, imbalance)
    assert list(dry.traffic) == expected(spec, layout, seq, batch, job.train.dtype, seat=seat, rows=rows)
    assert dry.flops == pytest.approx(rank_flops(spec, layout, seq, batch, pp=seat.pp, tp=seat.tp, rows=rows))
    assert dry.live == dry.allowed


@pytest.mark.parametrize("imbalance", [1.0, 1.3])
@pytest.mark.parametrize(("model", "layout"), SMALL)
def test_experts_hold_send_and_compute_what_closed_forms_say(model: str, layout: str, imbalance: float) -> None:
    job = job_of(model, layout, 64, 8)
    check_counts(job, dry_run(job, 1, imbalance=imbalance), imbalance)


def test_the_rank_that_runs_is_the_fullest() -> None:
    going, due = StatedRouting(rank=1, ranks=4, imbalance=1.5).by_rank(*torch.zeros(2, 8), 4, 1000)
    assert sum(map(sum, due)) == 1500
    assert sum(map(sum, going)) == 1000  # all that it sends
    assert sum(going[1]) == sum(due[1]) == 375  # to itself
    assert [sum(rows) for at, rows in enumerate(going) if at != 1] == [209, 208, 208]
    assert dealt(7, 3) == [3, 2, 2]
