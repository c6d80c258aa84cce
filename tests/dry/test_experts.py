"""The dry run with experts: where tokens go is stated, and what follows is what the closed forms say."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cost.model_state import state_of
from fivefold.cost.routing import even_rows
from fivefold.cost.step import rank_flops
from fivefold.cost.traffic import expected_traffic
from fivefold.dry.fake import StatedRouting, evenly
from fivefold.dry.rank import RankRun, dry_run_rank
from fivefold.dry.result import vs_plan
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.rank_part import RankCoords
from fivefold.support.errors import UserError
from tests.dry.test_dryrun import job_of

# Model, layout, how much fuller the rank is than the mean.
SMALL = [
    ("tiny-moe", "dp=4,ep=2", 1.3),
    ("tiny-moe", "dp=4,ep=4,zero=2,dispatch=allgather,microbatches=2,recompute=selective", 1.0),
    ("tiny-deepseek", "dp=4,tp=2,sp,ep=4,zero=3,microbatches=2", 1.0),
    ("tiny-deepseek", "dp=2,pp=2,ep=2,schedule=zb-h1,microbatches=4", 1.3),
]
MORE_SMALL = [
    ("tiny-deepseek", "dp=2,tp=2,ep=4,zero=1,recompute=full", 1.3),
    ("tiny-moe", "dp=2,cp=2,cp_kind=allgather,ep=4", 1.0),
    ("tiny-deepseek", "tp=2,cp=2,ep=4,zero=1", 1.3),
    ("tiny-deepseek", "dp=2,cp=2,cp_kind=ulysses,ep=4,zero=3,recompute=full", 1.0),
]
OTHER_WAY = [(model, layout, 2.3 - imbalance) for model, layout, imbalance in SMALL + MORE_SMALL]

# Model, layout, sequence, batch, rank, imbalance. Fewer layers than the real ones have: blocks are alike, or dense.
QUICK = [
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8,zero=1", 4096, 8, 0, 1.25),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=4,zero=2,dispatch=allgather,microbatches=2,recompute=selective", 4096, 16,
     3, 1.0),
]  # fmt: skip
REST = [
    # Latent attention makes keys of all heads: what cp exchanges is as wide as the queries.
    ("deepseek-v3 model.layers=5", "dp=4,cp=8,cp_kind=allgather,ep=32,zero=1", 8192, 4, 3, 1.0),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8", 4096, 8, 0, 1.0),
    ("mixtral-8x7b model.layers=2", "dp=4,tp=2,ep=8,zero=1,sp,microbatches=2", 4096, 8, 1, 1.0),
    ("mixtral-8x7b model.layers=6", "dp=8,ep=8,zero=1,recompute=full", 4096, 8, 0, 1.0),
    ("qwen3-30b-a3b model.layers=4", "dp=16,ep=8,zero=3,microbatches=2,recompute=full", 4096, 32, 3, 1.0),
    ("qwen3-30b-a3b model.layers=4", "dp=2,tp=4,ep=8,zero=1", 4096, 2, 5, 1.0),
    ("qwen3-30b-a3b model.layers=4", "dp=2,cp=4,ep=8,zero=1,microbatches=2,recompute=selective", 8192, 4, 3, 1.0),
    ("qwen3-235b-a22b model.layers=8", "dp=8,pp=4,ep=8,zero=1,microbatches=8", 4096, 64, 9, 1.2),
    ("qwen3-235b-a22b model.layers=8", "dp=4,pp=2,tp=2,ep=8,zero=1,sp,schedule=interleaved,microbatches=4", 4096, 16,
     1, 1.0),
    ("qwen3-235b-a22b model.layers=8", "dp=4,pp=4,ep=4,schedule=zb-h1,microbatches=8", 4096, 32, 0, 1.0),
    ("deepseek-v3 model.layers=5", "dp=32,ep=32,zero=1", 4096, 32, 3, 1.0),
    ("deepseek-v3 model.layers=8", "dp=16,pp=4,ep=16,zero=1,schedule=zb-v,microbatches=8", 4096, 128, 17, 1.0),
    ("deepseek-v3 model.layers=16", "dp=64,pp=4,ep=64,zero=1,schedule=dualpipe-v,microbatches=8,recompute=full", 4096,
     512, 64, 1.0),
    ("deepseek-v3 model.layers=5", "dp=8,tp=4,ep=32,zero=2,sp,recompute=selective", 4096, 8, 3, 1.0),
    ("deepseek-v3 model.layers=5", "dp=64,ep=32,zero=3,recompute=full", 4096, 64, 3, 1.0),
    ("deepseek-v2-lite model.layers=4", "dp=2,tp=2,ep=2,zero=1,dispatch=allgather", 4096, 2, 1, 1.0),
    ("gpt-oss-20b model.layers=4", "dp=4,ep=4,zero=1", 4096, 4, 1, 1.0),
    ("qwen3-30b-a3b model.layers=4", "dp=2,cp=4,cp_kind=ulysses,ep=8,zero=1,recompute=selective", 8192, 4, 3, 1.0),
    ("qwen3-30b-a3b model.layers=4", "dp=2,cp=4,cp_kind=allgather,ep=8,zero=1,recompute=full", 8192, 4, 3, 1.2),
    ("mixtral-8x7b model.layers=2", "dp=2,cp=4,cp_kind=ulysses,ep=8,zero=1", 8192, 2, 3, 1.0),
    ("deepseek-v3 model.layers=5", "dp=4,cp=8,ep=32,zero=1,recompute=full", 32768, 4, 3, 1.0),
    ("deepseek-v3 model.layers=5", "dp=4,cp=8,cp_kind=ulysses,ep=32,zero=1,recompute=full", 32768, 4, 3, 1.0),
    # Few tokens: the last gradient, the embedding's, is more than any activation.
    ("deepseek-v3 model.layers=5", "dp=4,cp=8,cp_kind=ulysses,ep=32,zero=1,recompute=full", 8192, 4, 3, 1.0),
    ("mixtral-8x7b", "dp=8,pp=4,ep=8,zero=1,microbatches=8", 4096, 64, 0, 1.0),
    ("mixtral-8x7b", "dp=16,ep=8,zero=1,recompute=full", 4096, 16, 3, 1.2),
    ("glm-4.5-air model.layers=4", "dp=4,tp=2,ep=8,zero=1,sp,recompute=full", 4096, 4, 1, 1.0),
]  # fmt: skip
# The same, by the peak: on a rank with far more tokens than the mean two moments can be close, of which one has more
# gradients and the other more activations. The last number is what they may differ by.
UNEVEN = [
    ("grok-1 model.layers=4", "dp=8,ep=8,zero=1", 2048, 8, 0, 1.6, 0.01),
    ("mixtral-8x7b model.layers=4", "dp=8,ep=8,zero=1,dispatch=allgather,recompute=selective", 4096, 8, 0, 1.6, 0.01),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8,zero=3", 4096, 8, 0, 1.6, 0.01),
    ("mixtral-8x7b model.layers=4", "dp=8,pp=2,ep=8,zero=1,schedule=zb-v,microbatches=4,recompute=full", 4096, 32, 0,
     1.6, 0.01),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8,zero=1,dispatch=allgather", 4096, 8, 0, 1.0, 0.01),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8,zero=1,dispatch=allgather,recompute=full", 4096, 8, 0, 1.6, 0.01),
    ("mixtral-8x7b model.layers=2", "dp=8,ep=8,zero=3", 4096, 8, 0, 4.0, 0.01),
    ("mixtral-8x7b model.layers=4", "dp=4,tp=2,ep=8,zero=1", 4096, 4, 0, 1.6, 0.01),
    ("mixtral-8x7b model.layers=4", "dp=4,cp=2,cp_kind=ulysses,ep=8,zero=1,recompute=selective", 4096, 4, 0, 1.0, 0.01),
    ("qwen3-235b-a22b model.layers=2", "dp=16,ep=16,zero=2,recompute=full", 4096, 16, 0, 4.0, 0.02),
    ("qwen3-30b-a3b model.layers=2", "dp=8,ep=8,zero=1,recompute=selective", 4096, 8, 0, 4.0, 0.01),
    ("deepseek-v3 model.layers=5", "dp=8,ep=8,zero=1", 2048, 8, 0, 4.0, 0.01),
    # The planner adds the loss to the most microbatches in flight; they are fewer when it is computed.
    ("mixtral-8x7b model.layers=4", "dp=8,pp=2,ep=8,zero=1,schedule=dualpipe-v,microbatches=4", 4096, 32, 0, 1.0, 0.06),
]  # fmt: skip


def slow(cases: list[tuple[object, ...]]) -> list[object]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def check_counts(job: Job, dry: RankRun, imbalance: float = 1.0) -> None:
    """State, traffic and FLOPs are equal."""
    spec, layout, seq, batch = job.model, job.layout, job.data.seq, job.train.batch
    coords = RankCoords.of(layout, dry.rank)
    state = state_of(spec, layout, job.train.dtype, job.optimizer, coords, seq=seq)
    assert (dry.parameters, dry.gradients, dry.optimizer) == state
    tokens = batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
    layers = sum(dry.layers) - (spec.layers - len(spec.routed_layers) if coords.pp == 0 else 0)
    rows = even_rows(spec, layout, tokens, range(layers), coords, imbalance)
    assert list(dry.traffic) == expected_traffic(
        spec, layout, seq, batch, job.train.dtype, coords=coords, routed_rows=rows
    )
    assert dry.flops == pytest.approx(rank_flops(spec, layout, seq, batch, at=coords, rows=rows))
    assert dry.live == dry.allowed


@pytest.mark.parametrize(("model", "layout", "imbalance"), [*SMALL, *slow(MORE_SMALL + OTHER_WAY)])
def test_experts_hold_send_and_compute_what_closed_forms_say(model: str, layout: str, imbalance: float) -> None:
    job = job_of(f"{model} model.layers=2", layout, 64, 8)
    check_counts(job, dry_run_rank(job, 1, imbalance=imbalance), imbalance)


@pytest.mark.parametrize(("model", "layout", "seq", "batch", "rank", "imbalance"), [*QUICK, *slow(REST)])
def test_the_planner_says_what_experts_need(
    model: str, layout: str, seq: int, batch: int, rank: int, imbalance: float
) -> None:
    job = job_of(model, layout, seq, batch)
    dry = dry_run_rank(job, rank, imbalance=imbalance)
    found = vs_plan(job, dry, Cluster.parse(f"1x{job.layout.world}xH100"), imbalance)
    figures = {figure.name: figure for figure in found.figures}
    assert found.planned == dry.traffic
    for name in ("parameters", "gradients", "optimizer"):
        assert figures[name].dry == figures[name].plan, name
    peak = figures["peak"]
    assert abs(peak.difference) < 0.03
    predicted = found.predicted
    early, late = (
        predicted.non_state - predicted.missing_grads_at_moment,
        predicted.end_of_first_backward - predicted.missing_grads_at_end,
    )
    if abs(early - late) > 0.03 * peak.plan:  # else either moment may be the peak, with other activations
        assert abs(figures["activations at the peak"].difference) < 0.03
    # A window's kernels compute whole tiles around it.
    assert figures["FLOPs executed"].difference == pytest.approx(0.0, abs=3e-3 if job.model.window else 1e-6)
    assert dry.live == dry.allowed


@pytest.mark.parametrize(("rank", "allowed"), [pytest.param(0, 0.01, marks=pytest.mark.slow), (1, 1e-6)])
def test_flops_of_a_rank_are_those_of_its_own_windows(rank: int, allowed: float) -> None:
    """The first has a layer with a window, whose kernels compute whole tiles around it, and the second one without."""
    job = job_of("gpt-oss-20b model.layers=2", "pp=2,microbatches=2,split=1,1", 4096, 2)
    found = vs_plan(job, dry_run_rank(job, rank), Cluster.parse("2xH100"))
    (flops,) = (figure for figure in found.figures if figure.name == "FLOPs executed")
    assert flops.difference == pytest.approx(0.0, abs=allowed)


@pytest.mark.parametrize(
    ("model", "layout", "seq", "batch", "rank", "imbalance", "allowed"), [*UNEVEN[:1], *slow(UNEVEN[1:])]
)
def test_the_planner_knows_the_peak_of_an_uneven_rank(
    model: str, layout: str, seq: int, batch: int, rank: int, imbalance: float, allowed: float
) -> None:
    job = job_of(model, layout, seq, batch)
    dry = dry_run_rank(job, rank, imbalance=imbalance)
    found = vs_plan(job, dry, Cluster.parse(f"1x{job.layout.world}xH100"), imbalance)
    (peak,) = (figure for figure in found.figures if figure.name == "peak")
    assert found.traffic_agrees
    assert abs(peak.difference) < allowed


def test_a_fuller_rank_holds_more() -> None:
    line = "dryrun tiny-moe --layout dp=4,ep=4 --seq 64 --json"
    even, uneven = (
        json.loads(CliRunner().invoke(app, [*line.split(), *more]).output) for more in ([], ["--imbalance", "2"])
    )
    assert (even["imbalance"], uneven["imbalance"]) == (1.0, 2.0)
    assert uneven["ranks"][0]["peak_bytes"] > even["ranks"][0]["peak_bytes"]
    assert even["ranks"][0]["traffic_agrees"]
    assert uneven["ranks"][0]["traffic_agrees"]


@pytest.mark.parametrize(("line", "words"), [
    ("tiny --layout dp=2 --imbalance 1.2", "imbalance=1.2 is for experts, and tiny has none"),
    ("tiny-moe --layout dp=2 --imbalance 1.2", "dp=2 has every expert on every rank"),
    ("tiny-moe --layout dp=4,ep=4 --imbalance 9", "1 to 4; nearest: imbalance=4"),
    ("tiny-moe --layout dp=4,ep=4 --imbalance 0.5", "1 to 4; nearest: imbalance=1"),
    ("tiny-moe --layout dp=4,ep=4 --imbalance nan", "1 to 4; nearest: imbalance=1"),
])  # fmt: skip
def test_an_imbalance_that_cannot_be(line: str, words: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", *line.split()])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


def test_messages_to_experts_are_named_ep_where_dp_has_the_same_ranks() -> None:
    result = CliRunner().invoke(app, ["dryrun", "tiny-moe", "--layout", "dp=4,ep=4", "--seq", "64"])
    assert re.search(r"^ep +4 +all-to-all +.*the same$", result.output, re.MULTILINE)
    assert not re.search(r"^dp .*all-to-all", result.output, re.MULTILINE)


def test_the_rank_that_runs_is_the_fullest() -> None:
    going, due = StatedRouting(rank=1, ranks=4, imbalance=1.5).by_rank(*torch.zeros(2, 8), 4, 1000)
    assert sum(map(sum, due)) == 1500
    assert sum(map(sum, going)) == 1000  # all that it sends
    assert sum(going[1]) == sum(due[1]) == 375  # to itself
    assert [sum(rows) for at, rows in enumerate(going) if at != 1] == [209, 208, 208]
    assert evenly(7, 3) == [3, 2, 2]
