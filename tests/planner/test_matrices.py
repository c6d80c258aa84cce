"""A plan with an optimizer of whole matrices: its memory, its seconds and its messages, next to AdamW's."""

import pytest

from fivefold.cost.model_state import checkpoint_bytes, state_of
from fivefold.cost.peak_memory import footprint_of
from fivefold.cost.step import Workload, estimate, matrix_cost
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.layout.matrix_owners import matrix_owners
from fivefold.layout.rank_part import RankCoords
from fivefold.optim.base import reads_whole
from fivefold.optim.muon import Muon
from fivefold.planner.explain import traffic
from fivefold.planner.option import evaluate
from fivefold.planner.plan import workload_of
from fivefold.spec.presets import preset


def workload(model: str, layout: str, gpus: int, optimizer: str = "muon", seq: int = 4096) -> Workload:
    words = [f"model={model}", f"layout={layout}", f"data.seq={seq}", "train.batch=16", "train.dtype=bfloat16"]
    job = read_job(None, [*words, f"optimizer.name={optimizer}"])
    return workload_of(job, Cluster.parse(f"{gpus}xH100"))


@pytest.mark.parametrize("layout", ["dp=4,tp=2,zero=1", "dp=2,tp=2,pp=2,zero=2,microbatches=2", "dp=8,zero=3"])
def test_states_are_those_of_the_table_rank_by_rank(layout: str) -> None:
    """Norms count as if tp divided them: a few in ten thousand."""
    one = workload("llama3-8b", layout, 8)
    for pp in range(one.layout.pp):
        exact = state_of(one.spec, one.layout, "bfloat16", Muon(), RankCoords(pp=pp), seq=one.seq)
        assert footprint_of(one, pp).state.optimizer == pytest.approx(exact.optimizer, rel=2e-3)


def test_the_update_takes_the_flops_of_the_rank_that_has_most_and_the_messages() -> None:
    one, adamw = (workload("llama3-8b", "dp=4,tp=2,zero=1", 8, name) for name in ("muon", "adamw"))
    owners = matrix_owners(one.spec, one.layout, one.seq, Muon(), 0)
    whole = sum(Muon().matrix_flops(*p.shape) for p in one.spec.parameters() if reads_whole(Muon(), p))
    assert sum(owners.costs) == pytest.approx(whole)  # nothing is computed twice
    assert max(owners.costs) < 1.05 * whole / 8
    more = estimate(one).optimizer - estimate(adamw).optimizer
    calls = matrix_cost(one, 0).calls  # in which a rank has nothing for itself, of eight
    sent = sum(one.topology.time(call.kind, "stage", call.payload * 8 / 7) for call in calls)
    fewer_states = 2 * 4 * one.spec.parameter_count / 8 / one.first_device.bandwidth  # at most: one state less is moved
    assert more == pytest.approx(owners.longest / one.first_device.rate() + sent, abs=fewer_states)
    rows = {row.axis: row for row in traffic(evaluate(one)) if row.kind == "all-to-all"}
    assert rows["world"].payload == sum(call.payload for call in calls)
    assert rows["world"].inside == sum(call.sent for call in calls)
    # Two bytes of every element, there and back, of which each rank has an eighth; it keeps its own.
    assert rows["world"].payload == pytest.approx(2 * 2 * whole_elements(one) / 8 * 7 / 8, rel=0.05)


def whole_elements(one: Workload) -> int:
    return sum(p.size for p in one.spec.parameters() if reads_whole(Muon(), p))


def test_what_exists_during_the_update_alone_may_be_the_peak() -> None:
    """Where activations are small: short sequences of a wide model."""
    one = workload("llama3-8b", "tp=8,microbatches=16", 8, seq=128)
    needs = footprint_of(one, 0)
    assert needs.moment_name == "the optimizer's matrices"
    assert needs.parts[needs.moment_name] == needs.non_state == matrix_cost(one, 0).peak
    assert footprint_of(workload("llama3-8b", "tp=8,microbatches=16", 8), 0).moment_name != needs.moment_name


def test_a_checkpoint_has_one_state_of_a_matrix_and_two_of_all_else() -> None:
    spec = preset("tiny-moe")
    matrices = sum(p.size for p in spec.parameters() if reads_whole(Muon(), p))
    assert checkpoint_bytes(spec, "bfloat16", Muon()) == 4 * (3 * spec.parameter_count - matrices)
