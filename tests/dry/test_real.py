"""The dry run against real ranks: the same step, counted by the same counters."""

import pytest
import torch

from fivefold.dry.rank import dry_run_rank, empty_batch
from fivefold.job.reading import read_job
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.trainer.engine import Engine
from fivefold.trainer.ledger import Ledger
from tests.ranks import run_ranks

SMALL = ["model=tiny", "model.layers=4", "data.seq=64", "train.batch=8"]


def real(rank: int, world: int, layout: str, *changes: str) -> tuple[int, float, list[object]]:
    """The same step on real ranks."""
    job = read_job(None, [*SMALL, *changes, f"layout={layout}"])
    mesh = Mesh.of(job.layout, torch.device("cpu"), spec=job.model)
    engine = Engine(job, mesh)
    counter = TrafficCounter(mesh)
    ledger = Ledger(engine, counter)
    with ledger:
        engine.forward_backward(empty_batch(job))
        engine.step(1e-3, engine.gradient_norm())
        engine.weights.wait_params()
    return ledger.peak, ledger.flops, list(counter.rows())


REAL = [
    "dp=2,tp=2,zero=2,microbatches=2",
    *(pytest.param(text, marks=pytest.mark.slow) for text in ("pp=2,tp=2,sp,microbatches=4", "pp=2,cp=2,zero=1")),
]


@pytest.mark.parametrize("layout", REAL)
def test_a_real_run_holds_and_sends_what_the_dry_one_says(layout: str) -> None:
    job = read_job(None, [*SMALL, f"layout={layout}"])
    results = run_ranks(job.layout.world, real, layout)
    for rank in (0, job.layout.world - 1):
        peak, flops, traffic = results[rank]
        dry = dry_run_rank(job, rank, kernels="cpu")
        assert traffic == list(dry.traffic)
        assert flops == dry.flops
        assert peak == pytest.approx(dry.peak, rel=0.02)  # gloo's threads let go of a buffer a little later


def test_real_experts_send_and_compute_together_what_dry_ones_do() -> None:
    """Where tokens go is stated in the one and chosen in the other. Gathered tokens are the same bytes, and all ranks
    together compute as many rows."""
    layout = "dp=2,ep=2,dispatch=allgather,zero=1,recompute=full"
    job = read_job(None, [*SMALL, "model=tiny-moe", "model.layers=2", f"layout={layout}"])
    results = run_ranks(2, real, layout, "model=tiny-moe", "model.layers=2")
    dry = [dry_run_rank(job, rank, kernels="cpu") for rank in range(2)]
    assert [traffic for _, _, traffic in results] == [list(one.traffic) for one in dry]
    assert sum(flops for _, flops, _ in results) == sum(one.flops for one in dry)
