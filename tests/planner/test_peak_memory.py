"""Peak memory: the schedule decides how many microbatches are in flight, and two accountings have names."""

from dataclasses import replace

import pytest
from msgspec import structs

from fivefold.cost.model_state import FIVEFOLD_ACCOUNTING, PAPER_ACCOUNTING, paper, state, state_of
from fivefold.cost.peak_memory import footprint, footprint_of
from fivefold.cost.software import FIVEFOLD
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig
from fivefold.planner.closed_forms import BlockArrays, BlockShape
from fivefold.planner.closed_forms_moe import DenseCost
from fivefold.planner.space import SearchQuery, space
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import live_counts
from fivefold.spec.presets import preset
from fivefold.support.dtypes import precision_of


def workload(layout: str, model: str = "llama3-8b", cluster: str = "8xH100", batch: int = 64) -> Workload:
    return Workload(preset(model), Layout.parse(layout), Cluster.parse(cluster), 8192, batch)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_zero_paper_s_table(zero: int, gigabytes: float) -> None:
    """arXiv 1910.02054, table 1: 7.5 billion parameters on 64 GPUs."""
    assert paper(7.5e9, zero, 64).total / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert (
        FIVEFOLD_ACCOUNTING.state(1.0, 1.0, 0, 1).total - PAPER_ACCOUNTING.state(1.0, 1.0, 0, 1).total == 2
    )  # for gradients


class Momentum(OptimizerConfig, frozen=True):
    states = ("momentum",)


@pytest.mark.parametrize("optimizer", [AdamW(), Momentum()], ids=["adamw", "one state"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "layout", ["dp=8", "dp=8,zero=1", "dp=8,zero=2", "dp=8,zero=3", "tp=8,sp", "dp=2,tp=2,pp=2,zero=1"]
)
def test_state_is_what_the_exact_count_says(layout: str, dtype: str, optimizer: OptimizerConfig) -> None:
    precision, one = precision_of(dtype), workload(layout)
    exact = state(one.spec, one.layout, dtype, optimizer).total
    profiles = [
        FIVEFOLD.optimizing_with(optimizer).computing_in(precision),
        FIVEFOLD.computing_in(precision).optimizing_with(optimizer),
    ]
    for software in profiles:
        ranks = [
            footprint_of(replace(one, precision=precision, software=software), rank) for rank in range(one.layout.pp)
        ]
        assert max(rank.state.total for rank in ranks) == pytest.approx(exact, rel=0.001)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_state_is_exact_where_only_experts_have_copies(model: str, zero: int) -> None:
    """The first stage of DeepSeek-V2-Lite may have no expert: FSDP2 keeps masters alone there, too."""
    one = workload(f"tp=4,pp=2,ep=2,zero={zero},microbatches=2", model)
    one = replace(one, layout=structs.replace(one.layout, split=(1, one.spec.layers - 1)))
    exact = [state_of(one.spec, one.layout, "bfloat16", at=RankCoords(pp=rank)).total for rank in range(2)]
    assert [footprint_of(one, rank).state.total for rank in range(2)] == pytest.approx(exact, rel=0.001)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("model", "fixed"), [("llama3-8b", {"dp": 8}), ("qwen3-30b-a3b", {"dp": 8, "ep": 8})])
def test_closed_forms_count_the_same_state(model: str, fixed: dict[str, int], precision: str) -> None:
    software = FIVEFOLD.computing_in(precision)
    spec = preset(model, vocab=1024)  # of the ends, which ZeRO 3 leaves gathered, closed forms know nothing
    one = replace(workload("dp=8", batch=8), spec=spec, precision=precision, software=software, seq=1024)
    every = space(SearchQuery(one, {"recompute": "full", "samples": 1, **fixed}))
    assert set(every.of.zero) == {0, 1, 2, 3}
    for at in range(len(every)):
        assert every.memory[at] == pytest.approx(footprint(replace(one, layout=every.layout(at))).total, rel=0.08)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("model", "cost"), [("llama3-8b", BlockArrays), ("qwen3-30b-a3b", DenseCost)])
def test_the_loss_holds_the_same_in_closed_forms(
    model: str, cost: type[BlockArrays] | type[DenseCost], sp: bool
) -> None:
    one = workload(f"tp=4,pp=2,microbatches=64,recompute=full{',sp' * sp}", model)
    last = footprint_of(one, 1)
    assert last.moment_name == "the loss"
    kinds = one.spec.kinds(0)
    assert cost.of(one, BlockShape(4, 1, "ring", sp, 1, "full"), kinds).logits == last.moment_bytes


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1)])
def test_microbatches_in_flight_are_those_of_the_schedule_itself(name: str, chunks: int) -> None:
    schedule = build(name, 4, 8, chunks=chunks)
    peaks = [max(live_counts(schedule.compute(rank))) for rank in range(4)]
    assert [sum(held.values()) for held in build(name, 4, 8, chunks=chunks).in_flight] == peaks


def test_the_first_stage_of_1f1b_holds_the_most_and_the_last_the_logits() -> None:
    one = workload("pp=4,microbatches=16", cluster="4xH100", batch=16)
    first, last = footprint_of(one, 0), footprint_of(one, 3)
    assert first.activations.total > 3 * last.activations.total
    assert first.moment_name != "the loss"
    assert last.moment_name == "the loss"


def test_zero_bubble_v_is_even_where_1f1b_is_not() -> None:
    one = workload("pp=4,schedule=zb-v,microbatches=16", cluster="4xH100", batch=16)
    totals = [footprint_of(one, rank).activations.total for rank in range(4)]
    assert max(totals) < 1.3 * min(totals)


def test_parts_add_up() -> None:
    room = footprint(workload("dp=2,tp=2,pp=2,zero=1,sp,microbatches=8,recompute=selective"))
    assert sum(room.parts.values()) == pytest.approx(room.total)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_the_head_s_gradient_waits_for_no_weight_gradient_pass(schedule: str) -> None:
    """It is taken with the loss. Put off, there would be one, as large as the head, for each microbatch that waits."""
    one = workload(f"pp=8,schedule={schedule},microbatches=16", batch=16)
    assert footprint_of(one, 7).activations.head == 0
    assert not any(parameter.deferred for parameter in one.spec.parameters() if parameter.layer is None)
