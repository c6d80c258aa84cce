"""Joined pairs in the planner: what they hide of experts' messages, and that the search knows it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from fivefold.cost.moe import MoEBlock, Travel
from fivefold.cost.software import FIVEFOLD
from fivefold.cost.step import Workload, estimate
from fivefold.cost.systems import MEGATRON_CORE
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.option import evaluate
from fivefold.planner.plan import simulate
from fivefold.planner.search import search
from fivefold.planner.space import SearchQuery, space
from fivefold.render.blocks import to_text
from fivefold.schedules.costs import play_pair, seconds_alone
from fivefold.spec.presets import preset

V3 = preset("deepseek-v3")
APART = FIVEFOLD.but(name="apart", overlap=structs.replace(FIVEFOLD.overlap, ep=0.0))
LAYOUT = Layout(dp=64, pp=16, ep=64, zero=1, microbatches=40, schedule="dualpipe-v")
DEEP = Workload(V3, LAYOUT, Cluster.parse("128x8xH100"), 4096, 2560, imbalance=1.2)
QWEN = Workload(preset("qwen3-30b-a3b"), Layout(), Cluster.parse("4x8xH100"), 4096, 512, imbalance=1.2)


@pytest.fixture(params=["none", "selective", "full"])
def workload(request) -> Workload:
    return replace(DEEP, layout=structs.replace(LAYOUT, recompute=request.param))


def test_halves_are_the_stages_passes_cut_at_their_messages(workload: Workload):
    costs, apart = workload.durations, replace(workload, software=APART).durations
    assert not apart.segments
    for stage, (forward, backward) in enumerate(costs.segments):
        parts = [part for segment in (*forward, *backward) for part in segment]
        assert min(parts) >= 0
        assert seconds_alone(forward) == pytest.approx(costs.f[stage])
        assert seconds_alone(backward) == costs.b[stage] <= costs.i[stage] + costs.w[stage] + 1e-9
        # Nothing is lost: without any overlap they are the passes of software that has none.
        assert sum(parts) == pytest.approx(apart.f[stage] + apart.b[stage])
    # Some stages have dense layers alone, or the head.
    hides = [play_pair(*halves).hidden > 1e-9 for halves in costs.segments]
    assert hides == [any(V3.kinds(layer).routed for layer in stage.layers) for stage in workload.stages]
    assert set(hides) == {False, True}


def test_a_pair_hides_messages_and_no_compute(workload: Workload):
    found, apart = estimate(workload), estimate(replace(workload, software=APART))
    saved = apart.seconds - found.seconds
    whole, shared, paired = found.expert_messages
    assert apart.expert_messages == (pytest.approx(whole), 0.0, 0.0)
    assert 0 < shared < paired < whole - shared
    assert saved > 0.1 * apart.seconds  # a tenth of a step of DeepSeek-V3 on H100s
    assert sum(found.causes.values()) == pytest.approx(found.seconds)
    # The table's row is what the sentence leaves: messages that recomputation sends again are messages.
    assert found.causes["ep"] == pytest.approx(whole - shared - paired)
    assert apart.causes["ep"] == pytest.approx(whole)
    assert min(found.causes.values()) >= 0
    same = ("gemm", "attention", "memory", "host", "optimizer")
    assert all(found.causes[cause] == apart.causes[cause] for cause in same)
    assert found.causes["ep"] + found.causes["recompute"] == pytest.approx(
        apart.causes["ep"] + apart.causes["recompute"] - shared - paired
    )


def test_what_of_it_is_for_whom():
    def hidden_by_pair(**changes) -> float:
        return estimate(replace(DEEP, layout=structs.replace(LAYOUT, **changes))).expert_messages.hidden_by_pair

    shared_alone = estimate(replace(DEEP, layout=structs.replace(LAYOUT, schedule="zb-v"))).expert_messages
    assert shared_alone.hidden_by_shared > 0 == shared_alone.hidden_by_pair
    assert hidden_by_pair(zero=3) == 0  # a block's weights go while the other half may need them
    assert hidden_by_pair(ep=1) == 0
    assert hidden_by_pair(ep=8, dispatch="allgather") > 0
    theirs = replace(DEEP, software=MEGATRON_CORE)
    assert not theirs.durations.segments
    assert estimate(theirs).expert_messages[1:] == (0.0, 0.0)
    llama = Workload(
        preset("llama3-8b"), Layout(dp=2, pp=4, microbatches=8, schedule="dualpipe-v"), DEEP.cluster, 4096, 64
    )
    assert estimate(llama).seconds == estimate(replace(llama, software=APART)).seconds
    assert not llama.durations.segments


def test_pairs_of_a_single_stage(tmp_path: Path):
    """A file may join passes without any pipeline; the clock then says how long they take."""
    file = tmp_path / "pairs.txt"
    pairs = "F0.0 F0.1&B0.0 F0.2&B0.1 F0.3&B0.2 B0.3"
    file.write_text(f"schedule pairs\nstages 0\nmicrobatches 4\nrank 0\n  {pairs}\n")
    layout = Layout(dp=32, ep=16, zero=1, microbatches=4)
    plain = estimate(replace(QWEN, layout=layout))
    joined = estimate(replace(QWEN, layout=structs.replace(layout, schedule=str(file))))
    assert plain.simulation is None
    assert plain.seconds - joined.seconds == pytest.approx(joined.expert_messages.hidden_by_pair)
    assert joined.causes["bubble"] == pytest.approx(0.0, abs=1e-9)


def test_messages_of_the_fullest_rank_take_longer():
    def messages(imbalance: float, **changes) -> tuple[float, ...]:
        mixture = replace(DEEP, layout=structs.replace(LAYOUT, **changes), imbalance=imbalance).block_cost.moe
        assert isinstance(mixture, MoEBlock)
        return Travel(mixture).messages

    even, uneven = messages(1.0), messages(2.0)
    assert uneven[0] == pytest.approx(2 * even[0], rel=0.01)
    assert len(set(even)) == 1  # there, back, and both again for gradients
    inside = {"dp": 1024, "pp": 1, "microbatches": 1, "schedule": "1f1b"}
    assert messages(1.0, ep=8, **inside)[0] < messages(1.0, ep=16, **inside)[0] / 3
    gathered = messages(1.0, ep=8, dispatch="allgather")
    assert gathered[3] > gathered[0]  # gradients are added up in float32


SMALL = {"tp": 1, "cp": 1, "pp": 4, "ep": 8, "zero": 1, "dispatch": "alltoall"}


def test_the_search_finds_what_timing_everything_finds():
    found, every = search(QWEN, **SMALL), space(SearchQuery(QWEN, SMALL))
    options = [evaluate(replace(QWEN, layout=every.layout(at))) for at in range(len(every)) if every.seconds[at] < 20]
    best = min((option for option in options if option.fits), key=lambda option: option.seconds)
    assert found.best.layout == best.layout
    assert best.layout.schedule == "dualpipe-v"
    without = search(replace(QWEN, software=APART), **SMALL).best
    assert without.layout.schedule != "dualpipe-v"
    assert best.seconds < 0.9 * without.seconds


def test_closed_forms_of_pairs_do_not_promise_less_than_they_hide():
    query = {"tp": 1, "cp": 1, "zero": 1, "samples": 1, "schedule": "dualpipe-v"}
    for recompute in ("none", "selective", "full"):
        every = space(SearchQuery(QWEN, query | {"recompute": recompute}))
        for at in range(0, len(every), 3):
            layout = every.layout(at)
            if layout.pp > 1 < layout.ep:
                assert 0.8 < every.seconds[at] / estimate(replace(QWEN, layout=layout)).seconds < 1.0


def test_the_table_on_the_page_is_what_the_planner_says():
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    rows = re.findall(
        r"^\| ([\w-]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| (?:([\d.]+) s )?\|$", page, re.MULTILINE
    )
    assert [name for name, *_ in rows] == ["dualpipe-v", "zb-v", "1f1b"]
    for name, *figures in rows:
        layout = structs.replace(LAYOUT, microbatches=60, recompute="full", schedule=name, chunks=0)
        found = estimate(replace(DEEP, layout=layout, batch=3840))
        whole, shared, paired = found.expert_messages
        assert [float(figure or 0) for figure in figures] == [
            *(round(seconds, 1) for seconds in (found.seconds, whole)),
            *(round(seconds, 2) for seconds in (shared, paired)),
        ]


def test_a_plan_says_what_hides_how_much():
    said = simulate("deepseek-v3", str(LAYOUT), "128x8xH100", batch=2560, seq=4096)
    text = to_text(said.blocks(), 400)
    assert "tokens travel to experts and back for" in text
    assert "the other half of a joined pair" in text
    assert "and the shared expert" in text
    figures = said.to_dict()["experts_messages"]
    assert 0 < figures["hidden_by_shared"] < figures["hidden_by_pairs"] < figures["seconds"]
    plain = simulate("qwen3-30b-a3b", "dp=16,ep=16,zero=1,recompute=full", "2x8xH100", batch=64, seq=4096)
    assert "no compute hides any of it" in to_text(plain.blocks(), 400)
