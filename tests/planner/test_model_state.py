"""What the planner says a rank holds is what it holds."""

from functools import cache

import pytest
import torch

from fivefold.cost.model_state import State, state, state_of
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.parallel.mesh import Mesh
from fivefold.spec.presets import preset
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch
from tests.ranks import run_ranks

# Every dim divides by 4, so shards are equal; the vocabulary does not have to.
SMALL = ["model.layers=2", "model.hidden=32", "model.head_dim=8", "model.ffn=48", "model.vocab=64", "data.seq=8"]
LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2,sp", "tp=2,dp=2,zero=2", "cp=2,dp=2,zero=3"]


def job_of(layout: str, dtype: str) -> Job:
    return read_job(None, [*SMALL, f"layout={layout},microbatches=2", "train.batch=8", f"train.dtype={dtype}"])


def resident(layout: str, dtype: str) -> State:
    """Between the microbatches' end and the optimizer's step, where all three are held."""
    job = job_of(layout, dtype)
    engine = Engine(job, Mesh.of(job.layout, torch.device("cpu")))
    for step in range(2):
        engine.forward_backward(make_batch(job, step))
        held = engine.weights.resident()
        engine.step(1e-3, engine.gradient_norm())
    return State(held["parameters"], held["gradients"], held["masters"] + engine.optimizer.resident())


CASES = [
    *((layout, "bfloat16") for layout in LAYOUTS),
    ("dp=2,zero=1", "float32"),
    ("dp=2,zero=3", "float32"),
    ("tp=2,zero=3", "float32"),
]


def each(rank: int, world: int) -> dict[tuple[str, str], State]:
    return {case: resident(*case) for case in CASES if Layout.parse(case[0]).world == world}


@cache
def held(world: int) -> list[dict[tuple[str, str], State]]:
    return run_ranks(world, each)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_resident_bytes_are_those_of_the_table(case: tuple[str, str]) -> None:
    job = job_of(*case)
    assert {one[case] for one in held(job.layout.world)} == {state(job.model, job.layout, case[1])}


ONE_MICROBATCH = ["tp=2,sp", "pp=2", "dp=2", "pp=2,schedule=zb-v"]


def narrow(rank: int, world: int) -> list[tuple[int, float]]:
    """Bytes of gradients that are there, and that should be, if an optimizer reads them as they come, as on a GPU."""
    found = []
    for layout in ONE_MICROBATCH:
        tied = ["model.tied=true", f"layout={layout}", "train.batch=2", "train.dtype=bfloat16"]
        job = read_job(None, [*SMALL, *tied])
        engine = Engine(job, Mesh.of(job.layout, torch.device("cpu")))
        unreduced_grads = engine.weights.unreduced_grads  # type: ignore[attr-defined]
        unreduced_grads.accepts_low_precision = True
        for master in unreduced_grads.masters.values():
            master.grad_dtype = None
        engine.forward_backward(make_batch(job, 0))
        coords = RankCoords.of(job.layout, rank)
        table = state_of(job.model, job.layout, "bfloat16", at=coords, seq=job.data.seq, narrow=True)
        found.append((engine.weights.resident()["gradients"], table.gradients))
    return found


def test_gradients_of_one_microbatch_stay_narrow_where_nobody_adds_to_them() -> None:
    for ranks in run_ranks(2, narrow):
        assert [there for there, _ in ranks] == [expected for _, expected in ranks]


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 18), (1, 2 + 4 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)])
def test_mixed_precision_adam_is_the_textbook_s_18_bytes_and_what_zero_leaves_of_them(
    zero: int, bytes_per_parameter: float
) -> None:
    """2 for the bfloat16 weight, 4 for its gradient, 12 for master and moments: ZeRO's (arXiv 1910.02054) 16 with a
    float32 gradient instead of a bfloat16 one. Stage 3 gathers the bfloat16 weight and does not keep it. A norm's
    weight is its master, and stage 3 leaves it whole."""
    spec = preset("llama3-8b")
    norms = sum(p.size for p in spec.parameters() if p.kind == "norm")
    of_norm = {0: 16, 1: 8 + 8 / 8, 2: 4 + 12 / 8, 3: 16}[zero]
    total = state(spec, Layout(dp=8, zero=zero), "bfloat16").total
    assert total == bytes_per_parameter * (spec.parameter_count - norms) + of_norm * norms
    assert norms < 1e-4 * spec.parameter_count
