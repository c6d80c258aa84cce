"""Time of mixtures: what a layer computes, sends and waits for."""

import math
from itertools import combinations

import pytest
from msgspec import structs

from fivefold.cost.moe import collapsed_imbalance, stage_share
from fivefold.cost.software import FIVEFOLD
from fivefold.cost.step import Workload, estimate, rank_flops
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.layout.stages import stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.presets import preset

QWEN, DEEPSEEK = preset("qwen3-30b-a3b"), preset("deepseek-v3")


def workload(layout: str, spec=QWEN, cluster: str = "2x8xH100", batch: int = 64, **changes) -> Workload:
    return Workload(spec, Layout.parse(layout), Cluster.parse(cluster), 4096, batch, **changes)


def mixture(layout: str, **changes):
    return workload(layout, **changes).block_cost.moe


def test_balanced_experts_compute_a_tokens_visits():
    one = mixture("dp=16,ep=8,microbatches=4")
    assert one.slots == one.rows == 4096 * 8
    assert mixture("dp=8,tp=2,ep=8,sp,microbatches=8").slots == 4096 * 8 // 2
    rate = 3 * 2 * one.rows * 3 * QWEN.hidden * 768 / sum(one.gemm_seconds)
    assert 0.3 * 989e12 < rate < 0.65 * 989e12


def test_fewer_tokens_an_expert_are_slower_each():
    def per_row(samples: int) -> float:
        one = mixture("dp=16,ep=16", batch=16 * samples)
        return sum(one.gemm_seconds) / one.rows

    assert per_row(1) > per_row(4)
    few = Workload(QWEN, Layout(dp=16, ep=16), Cluster.parse("2x8xH100"), 64, 16).block_cost.moe
    assert sum(few.gemm_seconds) / few.rows > 3 * per_row(4)  # weights are read for few rows


def test_the_fullest_rank_holds_up_its_layer_and_nobody_where_all_have_all_experts():
    even, full = (mixture("dp=16,ep=8,microbatches=4", imbalance=i) for i in (1.0, 2.0))
    assert full.rows == 2 * even.rows
    assert sum(full.gemm_seconds) == pytest.approx(2 * sum(even.gemm_seconds), rel=0.1)
    assert full.ep_seconds[0] == pytest.approx(2 * even.ep_seconds[0], rel=0.02)
    alone = [estimate(workload("dp=16,microbatches=4", imbalance=i), exact=False).seconds for i in (1.0, 2.0)]
    assert alone[0] == alone[1]


def test_all_to_alls_are_slower_where_ep_leaves_the_node():
    inside, across = mixture("dp=16,ep=8,microbatches=4"), mixture("dp=16,ep=16,microbatches=4")
    assert inside.topology.reaches["ep"].nodes == 1
    assert across.topology.reaches["ep"].nodes == 2
    assert across.ep_seconds[0] > 3 * inside.ep_seconds[0]
    assert mixture("dp=16,microbatches=4").ep_seconds == (0.0, 0.0)
    # Of the ranks of a stage a node has few, where stages lie between them.
    assert mixture("dp=4,pp=4,ep=4,microbatches=16").topology.reaches["ep"].together == 2


def test_tokens_that_travel_once_to_a_node_take_less_of_the_network():
    once = FIVEFOLD.but(experts=structs.replace(FIVEFOLD.experts, once=True))
    every, fewer = (mixture("dp=16,ep=16,microbatches=4", software=software) for software in (FIVEFOLD, once))
    visits = 2 * (1 - 0.5**8)  # nodes of a token
    assert fewer.ep_seconds[0] < every.ep_seconds[0] * visits / 8 * 1.6


def test_gathering_all_tokens_is_for_ep_as_small_as_top_k():
    def slower(spec, ep: int) -> float:
        gathered, sent = (mixture(f"dp=16,ep={ep}{kind}", spec=spec) for kind in (",dispatch=allgather", ""))
        return gathered.ep_seconds[0] / sent.ep_seconds[0]

    assert slower(preset("mixtral-8x7b"), 8) > 2 * slower(QWEN, 8) > 0


def test_routers_that_agree_fill_the_rank_with_most_of_the_chosen():
    experts = Experts(count=16, top_k=4, ffn=8)
    most = [max(sum(one // 2 == rank for one in chosen) for rank in range(8)) for chosen in combinations(range(16), 4)]
    assert collapsed_imbalance(experts, 8) == pytest.approx(sum(most) / len(most) * 8 / 4)
    assert collapsed_imbalance(Experts(count=8, top_k=2, ffn=8), 8) == pytest.approx(4.0)
    assert collapsed_imbalance(experts, 1) == pytest.approx(1.0)


def test_shares_of_all_ranks_are_the_model():
    layout = Layout(dp=32, pp=4, ep=32, microbatches=8)
    stages = stages_of(DEEPSEEK, layout, 4096)
    shares = [stage_share(DEEPSEEK, 1, 32, stage) for stage in stages]
    whole = sum(share.dense + 32 * share.experts for share in shares)
    assert whole == pytest.approx(DEEPSEEK.parameter_count, rel=1e-9)


def test_first_layers_without_experts_are_lighter_stages():
    layout = "dp=4,pp=4,ep=4,microbatches=16,split=3,19,19,20"
    found = workload(layout, DEEPSEEK, cluster="2x8xH100")
    works = found.block_cost
    plain = works.of(DEEPSEEK.kinds(0))
    assert plain.moe is None
    assert plain.block.forward.ep == 0.0 < works.block.forward.ep
    assert plain.block.forward.total < works.block.forward.total


def test_flops_of_all_ranks_are_those_of_active_parameters():
    layout = Layout(dp=4, tp=2, pp=2, ep=8, microbatches=4, sp=True)
    found = (
        sum(rank_flops(DEEPSEEK, layout, 4096, 64, at=RankCoords(pp=pp, tp=tp)) for pp in range(2) for tp in range(2))
        * 4
    )
    attention = 3.5 * DEEPSEEK.layers * DEEPSEEK_SCORES
    model = (6 * DEEPSEEK.matmul_parameters + attention) * 64 * 4096
    assert math.isclose(found, model, rel_tol=0.001)


DEEPSEEK_SCORES = 2 * 2048 * 128 * (192 + 192)  # FLOPs of a query's scores and padded values, half of 4,096 keys


def test_a_host_that_is_slow_sets_the_pace_unless_a_step_is_one_graph():
    slow = FIVEFOLD.but(experts=structs.replace(FIVEFOLD.experts, host=20.0))
    graphs = FIVEFOLD.but(experts=structs.replace(FIVEFOLD.experts, host=20.0, graphs=True))
    waits = [
        workload("dp=16,ep=8,microbatches=4", software=software).block_cost.block.forward.host
        for software in (slow, graphs)
    ]
    assert waits[0] > 0.0 == waits[1]
