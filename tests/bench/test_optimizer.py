"""`fivefold bench optimizer`: what an update has to do, by the planner's closed forms, and what it takes."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.bench.harness import Machine, RoundTimes
from fivefold.bench.optimizer import OptimizerBenchResult, Paces, UpdateCost, Updates, cost_of, jobs_of, slowest
from fivefold.cli import app
from fivefold.cost.matrices import MatrixCost
from fivefold.cost.model_state import state_of
from fivefold.layout.rank_part import RankCoords
from fivefold.optim.muon import Muon
from fivefold.render.blocks import to_text
from fivefold.support.errors import UserError

SMALL = ["tiny", "model.layers=1", "model.hidden=32", "model.ffn=64", "train.dtype=float32", "data.seq=16"]


def updates(**seconds: list[float]) -> Updates:
    return Updates(RoundTimes(seconds), Paces(1e9, 1e12), Machine(2, "2.11", "a CPU"), "CPU, threads: 1")


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=1", "tp=2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_moves_masters_and_states_twice_and_gradients_once(layout: str, dtype: str) -> None:
    """Norms count as if tp divided them, and as if they were rounded: a few in ten thousand."""
    for job in jobs_of(["tiny", f"layout={layout}", f"train.dtype={dtype}", "data.seq=64"], "adamw,muon").values():
        owned = job.model.parameter_count / job.layout.world
        held = state_of(job.model, job.layout, dtype, job.optimizer, seq=64).optimizer
        masters = 4 * owned if dtype == "float32" else 0.0  # else they are in what the optimizer holds
        assert cost_of(job).moved == pytest.approx(2 * (held + masters) + 4 * owned, rel=2e-3)


def test_flops_and_messages_are_the_planner_s_of_the_rank_that_has_most() -> None:
    job = jobs_of(["tiny", "layout=dp=3,zero=2", "train.batch=6"], "muon")["muon"]
    costs = [
        MatrixCost.of(job.model, job.layout, job.data.seq, "bfloat16", Muon(), RankCoords(stage=place))
        for place in range(3)
    ]
    found = cost_of(job)
    assert found.flops == max(cost.flops for cost in costs) <= costs[0].most
    assert found.sent == max(sum(call.sent for call in cost.calls) for cost in costs) > 0
    assert found.bound(Paces(1e9, 1e12)) == found.moved / 1e9 + found.flops / 1e12


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    one, other = updates(adamw=[1.0, 4.0], muon=[2.0, 2.0]), updates(adamw=[3.0, 1.0], muon=[1.0, 5.0])
    both = slowest([one, Updates(other.seconds, Paces(2e9, 5e11), other.machine, other.device)])
    assert both.seconds == {"adamw": [3.0, 4.0], "muon": [2.0, 5.0]}
    assert both.paces == Paces(1e9, 5e11)


def test_the_table_has_80_columns_and_the_share_of_the_bound() -> None:
    jobs = jobs_of(["tiny", "layout=dp=2,zero=1"], "adamw,muon")
    result = OptimizerBenchResult(jobs, 3, updates(adamw=[0.1, 0.2, 0.4], muon=[0.2, 0.6, 0.5]))
    adamw, muon = result.to_dict()["optimizers"]
    assert (adamw["seconds"], muon["seconds"], muon["of_first"]) == (0.2, 0.5, 2.0)
    assert adamw["bound_share"] == adamw["moved_bytes"] / 1e9 / 0.2
    assert (adamw["flops"], adamw["sent_bytes"]) == (0, 0)
    assert muon["flops"] > 0 < muon["sent_bytes"]
    assert UpdateCost(2e9, 1e12, 0).bound(Paces(1e9, 1e12)) == 3.0
    lines = to_text(result.blocks(), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "muon" in to_text(result.blocks(), width=80)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("adamv", "optimizer.name='adamv' is not a choice; did you mean 'adamw'?"),
        ("", "--optimizers is empty"),
        ("no_such_module:Lion", "no module no_such_module"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_ranks_start(names: str, words: str) -> None:
    with pytest.raises(UserError, match=r".") as caught:
        jobs_of(SMALL, names)
    assert words in str(caught.value)


def test_two_ranks_update_in_turns() -> None:
    line = ["bench", "optimizer", *SMALL, "layout=dp=2,zero=1", "--rounds", "2", "--json", "optimizer.lr=1e-2"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["optimizer"] for row in found["optimizers"]] == ["adamw", "muon"]
    assert all(0 < row["fastest"] <= row["seconds"] <= row["slowest"] for row in found["optimizers"])
    assert found["bandwidth"] > 0 < found["rate"]
