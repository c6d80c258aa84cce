"""Memory of experts in closed form: what a mixture keeps, who holds which state, and what imbalance adds."""

import pytest

from fivefold.cost.activations import ExpertActivationMemory, saved_activations
from fivefold.cost.model_state import state_of
from fivefold.cost.peak_memory import footprint, footprint_of
from fivefold.cost.software import FIVEFOLD
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.spec.presets import preset

MIXTRAL = preset("mixtral-8x7b")
T, E, F, X, K = 4096, 4096, 14336, 8, 2  # tokens of a microbatch; hidden, expert's width, experts, visits of a token


def workload(model: str, layout: str, imbalance: float = 1.0, batch: int = 64) -> Workload:
    chosen = Layout.parse(layout)
    cluster = Cluster.parse(f"{chosen.world // 8}x8xH100")
    return Workload(preset(model), chosen, cluster, 4096, batch, imbalance=imbalance)


def mixture(layout: str, imbalance: float = 1.0) -> ExpertActivationMemory:
    chosen = Layout.parse(layout)
    return ExpertActivationMemory(
        spec=MIXTRAL, layer=MIXTRAL.kinds(0), layout=chosen, software=FIVEFOLD, tokens=T, imbalance=imbalance
    )


def test_what_a_mixture_keeps_is_the_page_s_table() -> None:
    """docs/experts.md; the rest is the router's weight, its scores, and the numbers of slots."""
    rest = 4 * X * E + 4 * T * X + 40 * T * K
    table = 4 * T * E + 2 * T * K * E + 8 * T * K * F + 2 * T * K * E
    assert mixture("dp=8,ep=8").saved == table + rest
    gathered = mixture("dp=8,ep=8,dispatch=allgather").saved
    assert gathered - mixture("dp=8,ep=8").saved == 6 * T * K * E


def test_the_fullest_rank_has_more_rows_and_no_more_slots() -> None:
    even, full = mixture("dp=8,ep=8"), mixture("dp=8,ep=8", 1.5)
    assert full.saved - even.saved == pytest.approx(0.5 * T * K * (2 * E + 8 * F))
    assert mixture("dp=8", 1.5).saved == mixture("dp=8").saved  # all experts are here


def test_tp_ranks_route_apart() -> None:
    whole, quarter = mixture("dp=8,ep=8"), mixture("dp=2,tp=4,ep=8")
    assert (quarter.slots, quarter.rows) == (whole.slots // 4, whole.rows / 4)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])  # experts wider than the model, and narrower
def test_recompute_keeps_less_of_experts_too(model: str) -> None:
    sizes = [
        saved_activations(preset(model), Layout.parse(f"dp=8,ep=8,recompute={how}"), FIVEFOLD, 1, T).total
        for how in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] == 2 * T * preset(model).hidden


def test_a_first_layer_without_experts_keeps_what_a_dense_one_does() -> None:
    spec, layout = preset("deepseek-v3"), Layout.parse("dp=8,ep=8")
    plain = saved_activations(spec, layout, FIVEFOLD, 1, T, layer=spec.kinds(0))
    assert plain.experts == 0.0
    assert plain.mlp == 2 * T * 4 * 18432  # gate, up, their activation and product
    assert plain.attention == saved_activations(spec, layout, FIVEFOLD, 1, T).attention


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("layout", ["dp=8,ep=8", "dp=16,ep=4", "dp=4,tp=4,ep=8,sp", "dp=8,pp=2,ep=8,microbatches=4"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_state_is_what_the_exact_count_says(model: str, layout: str, zero: int) -> None:
    one = workload(model, f"{layout},zero={zero}")
    for rank in range(one.layout.pp):
        exact = state_of(one.spec, one.layout, "bfloat16", at=RankCoords(pp=rank), seq=one.seq)
        for mine, theirs in zip(footprint_of(one, rank).state, exact, strict=True):
            assert mine == pytest.approx(theirs, rel=0.001)


def test_a_plan_s_memory_is_that_of_the_fullest_rank() -> None:
    layout = "dp=16,ep=16,zero=1,microbatches=4"
    even, full = footprint(workload("qwen3-30b-a3b", layout)), footprint(workload("qwen3-30b-a3b", layout, 1.5))
    assert full.activations.experts > even.activations.experts
    assert full.total > even.total
    assert sum(full.parts.values()) == pytest.approx(full.total)
