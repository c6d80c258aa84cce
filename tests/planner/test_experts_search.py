"""Plans of models with experts: ep in the search, its neighbours, imbalance."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from benchmarks.plan import QUESTIONS

from fivefold.cost.moe import IMBALANCE, imbalance_for
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.explain import ep_changes, neighbours
from fivefold.planner.option import evaluate
from fivefold.planner.plan import plan, question, simulate
from fivefold.planner.search import search
from fivefold.planner.space import SearchQuery, space
from fivefold.render.blocks import to_text
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

QWEN = preset("qwen3-30b-a3b")
WORKLOAD = Workload(QWEN, Layout(), Cluster.parse("2x8xH100"), 4096, 64, imbalance=1.2)
DENSE = Workload(preset("llama3-8b"), Layout(), WORKLOAD.cluster, 4096, 64)


def test_closed_forms_are_near_what_is_timed():
    every = space(SearchQuery(WORKLOAD, {"recompute": "full", "samples": 1, "sp": False, "tp": 1}))
    assert every.dealt is not None
    errors, sizes = [], []
    for at in range(0, len(every), max(1, len(every) // 40)):
        layout = every.layout(at)
        assert not layout.problems(QWEN, world=16, seq=4096, batch=64)
        one = evaluate(replace(WORKLOAD, layout=layout))
        errors.append(abs(every.seconds[at] / one.seconds - 1))
        sizes.append(abs(every.memory[at] / one.footprint.total - 1))
    assert sum(errors) / len(errors) < 0.1
    assert sum(sizes) / len(sizes) < 0.1


def test_every_ep_that_divides_ranks_and_experts_is_searched():
    every = space(SearchQuery(WORKLOAD, {"recompute": "full", "samples": 1, "zero": 1}))
    assert set(every.dealt.ep.tolist()) == {1, 2, 4, 8, 16}
    gathered = {int(ep) for ep, kind in zip(every.dealt.ep, every.dealt.dispatch, strict=True) if kind}
    assert gathered == {2, 4, 8}  # at most top_k


def test_fixed_ep_is_kept():
    found = search(WORKLOAD, top=3, ep=8, dispatch="alltoall", recompute="full", samples=1)
    assert {(one.layout.ep, one.layout.dispatch) for one in found.options} == {(8, "alltoall")}


def test_a_plan_says_why_not_its_neighbours_in_ep():
    found = plan("qwen3-30b-a3b", "2x8xH100", batch=64, seq=4096, fix="recompute=full,ep=8,microbatch=1,zero=1,tp=1")
    changes = {one.change: one.sentence for one in found.neighbours}
    assert {"ep=16", "ep=4", "dispatch=allgather"} <= set(changes)
    assert "tokens on their way to experts" in changes["ep=16"]
    assert "because ep then leaves the node" in changes["ep=16"]
    text = to_text(found.blocks(), 400)
    assert "3.042B parameters that a token is multiplied with" in text
    assert f"{IMBALANCE} times the mean" in text
    assert found.to_dict()["best"]["imbalance"] == IMBALANCE


def test_a_default_that_is_of_fewer_experts_a_rank_says_so():
    layout, sizes = "dp=16,zero=3,recompute=full", {"batch": 16, "seq": 1024}
    even, wide, given = (
        to_text(simulate("qwen3-30b-a3b", f"{layout},ep={ep}", "2x8xH100", imbalance=stated, **sizes).blocks(), 400)
        for ep, stated in ((8, None), (2, None), (2, 1.2))
    )
    assert "with 16 experts a rank (ep=8)" in even
    assert "it is likely less" not in even
    assert "with 64 a rank, as here, it is likely less" in wide
    assert "a rank" not in given.split("times the mean of the tokens")[1].splitlines()[0]


def test_an_uneven_load_costs_time_and_memory_where_experts_are_dealt_out():
    layout = "dp=16,ep=16,zero=1,recompute=full,microbatches=1"
    even, uneven = (
        simulate("qwen3-30b-a3b", layout, "2x8xH100", batch=64, seq=4096, imbalance=imbalance).option
        for imbalance in (1.0, 2.0)
    )
    assert uneven.seconds > 1.2 * even.seconds
    assert uneven.footprint.total > even.footprint.total


def test_ep_has_neighbours_only_with_experts():
    layout = Layout(dp=16, ep=2, dispatch="allgather")
    assert dict(ep_changes(Workload(QWEN, layout, WORKLOAD.cluster, 4096, 64))) == {
        "ep=4": Layout(dp=16, ep=4, dispatch="allgather"),
        "ep=1": Layout(dp=16),
        "dispatch=alltoall": Layout(dp=16, ep=2),
    }
    assert not [*ep_changes(replace(DENSE, layout=Layout(dp=16)))]


def test_imbalance_is_one_of_experts_and_at_least_even() -> None:
    assert imbalance_for(QWEN) == IMBALANCE
    assert imbalance_for(preset("llama3-8b")) == 1.0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: simulate("llama3-8b", "dp=8,zero=3", "8xH100", batch=8, imbalance=1.2), "has none; leave it out"),
        (lambda: plan("qwen3-30b-a3b", "2x8xH100", imbalance=0.5), r"imbalance=0\.5 must be"),
        (lambda: search(WORKLOAD, ep=3), r"^layout\.ep=3 does not divide the 128 experts"),
        (lambda: search(DENSE, ep=2), r"^ep=2 is of experts, and llama3-8b has none; leave it out$"),
        (lambda: search(replace(WORKLOAD, cluster=Cluster.parse("1x8xH100+1x8xA100"))), "unlike nodes"),
    ],
)
def test_what_cannot_be_planned_with_experts_says_so(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        asked()


def test_the_benchmark_asks_for_deepseek_on_2048():
    assert ("deepseek-v3", "256x8xH100", 10.0) in {(one.model, one.cluster, one.most) for one in QUESTIONS}


@pytest.mark.slow
def test_nothing_fits_is_said_only_after_exact_counts() -> None:
    """The fastest by closed forms all seem to fit there, and need more by exact counts; others fit."""
    workload = replace(question("qwen3-30b-a3b", "2x8xH100", batch=1024, seq=4096, software="nemo"), imbalance=1.0)
    best = search(workload).best
    assert best.fits
    assert best.seconds <= search(workload, ep=16, zero=1).best.seconds


def test_zero_is_tried_where_only_experts_have_copies() -> None:
    """Mixtral's experts twice over eight tp ranks do not fit without it."""
    workload = Workload(preset("mixtral-8x7b"), Layout(), Cluster.parse("8xH200"), 4096, 8)
    every = space(SearchQuery(workload, {"tp": 8, "recompute": "full", "samples": 1}))
    found = {(layout.ep, layout.zero) for layout in map(every.layout, range(len(every)))}
    assert {(4, zero) for zero in (1, 2, 3)} <= found
    assert (8, 0) in found
    assert all(layout.has_copies(workload.spec) for layout in map(every.layout, range(len(every))) if layout.zero)
    options = search(workload, tp=8, ep=4).options
    assert {option.layout.zero for option in options} <= {2, 3}
    assert all(option.fits for option in options)
    assert "zero=2" in [
        one.change for one in neighbours(evaluate(replace(workload, layout=Layout(tp=8, ep=4, zero=1))))
    ]


def test_zero_3_of_experts_alone_needs_whole_weights_where_a_rank_has_both_ends() -> None:
    """Even if all else has no copies: `Layout.problems` refuses such layouts, and the search does not offer them."""
    spec = preset("mixtral-8x7b", tied=True)
    workload = Workload(spec, Layout(), Cluster.parse("2x8xH200"), 4096, 8)
    fixed = {"tp": 8, "pp": 2, "recompute": "full", "samples": 1, "schedule": "zb-v"}
    every = space(SearchQuery(workload, fixed))
    assert len(every)
    for layout in map(every.layout, range(len(every))):
        assert not layout.problems(spec, world=16, seq=4096, batch=8)
