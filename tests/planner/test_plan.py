"""Planning as functions: names or objects in, one result out, whole at any width."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fivefold.cost.model_state import checkpoint_bytes, state, state_of
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig
from fivefold.planner.failure_costs import saved_bytes
from fivefold.planner.plan import fixed_choices, plan, plan_given_layout, simulate, workload_of
from fivefold.planner.result import PlanResult
from fivefold.render.blocks import to_text
from fivefold.schedules.simulate import simulate as clocked
from fivefold.schedules.terminal import LEFT_OUT, timeline
from fivefold.spec.presets import preset
from fivefold.support import plugins
from fivefold.support.errors import UserError


@pytest.fixture(scope="module")
def small() -> PlanResult:
    return plan("llama3-8b", "8xH100", batch=128, price=2.0)


def test_names_and_objects_are_the_same_question(small: PlanResult) -> None:
    again = plan(preset("llama3-8b"), Cluster.parse("8xH100"), batch=128, price=2.0)
    assert again.to_dict() == small.to_dict()
    text, layout = "pp=8,schedule=zb-v,microbatches=16", Layout.parse("pp=8,schedule=zb-v,microbatches=16")
    assert simulate("llama3-8b", text, batch=16).to_dict() == simulate(preset("llama3-8b"), layout, batch=16).to_dict()


def test_a_job_gives_its_batch_and_its_length() -> None:
    job = read_job(None, ["model=tiny", "train.batch=32", "data.seq=256", "optimizer.lr=1e-4"])
    found = plan(job, "4xCPU")
    assert (found.workload.batch, found.workload.seq) == (32, 256)
    assert found.job == structs.replace(job, layout=found.layout, run=structs.replace(job.run, cluster="4xCPU"))
    assert plan(found.job).workload.cluster == Cluster.parse("4xCPU")
    assert plan(job, "4xCPU", tokens="1M").job.train.steps == -(-1_000_000 // (32 * 256))
    with pytest.raises(UserError, match="change the object instead"):
        plan(job, "4xCPU", changes=["train.batch=8"])


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nnodes = 2\ngpus = 4\naccelerator = "H100"\n')
    assert Cluster.read(path) == Cluster.read("2x4xH100") == Cluster.parse("2x4xH100")


def test_choices_are_fixed_by_text_or_by_name() -> None:
    expected = {"tp": 8, "sp": True, "samples": 2}
    assert fixed_choices("tp=8, sp, microbatch=2") == fixed_choices({"tp": 8, "sp": True, "microbatch": 2}) == expected
    assert fixed_choices("") == {}


def test_a_layout_for_another_world_names_clusters_and_not_processes() -> None:
    with pytest.raises(UserError, match=r"needs 4 ranks .* nearest: dp=8, or a cluster of 4"):
        plan("llama3-8b", "8xH100", batch=128, layout="dp=4")


def test_a_plan_for_cpus_does_not_speak_of_gpus() -> None:
    assert "GPU" not in str(plan("tiny", "2xCPU", batch=16, seq=128))


def test_a_plan_draws_memory_and_time(small: PlanResult) -> None:
    drawn = small.svg()
    assert drawn.startswith("<svg")
    parts = [name for name, size in small.chosen.footprint.parts.items() if size > 0]
    assert all(name.replace("'", "&#x27;") in drawn for name in parts)
    assert drawn in small._repr_html_()


def test_the_choice_is_marked_with_its_whole_layout(small: PlanResult) -> None:
    lines = to_text(small.blocks(), 80).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("→"))
    words = [lines[at].split()[1], *(line.strip() for line in lines[at + 1 : at + 4])]
    assert "".join(words).startswith(str(small.chosen.layout))


def test_a_simulated_layout_that_does_not_fit_says_so_first_and_is_not_ok() -> None:
    found = simulate("llama3-8b", "dp=8,zero=3,microbatches=4", batch=128)
    assert not found.ok
    first = str(found).splitlines()[0]
    assert first.startswith("it does not fit: needs ")
    assert "on pipeline rank 0" in first
    assert "nearest: --layout dp=8,zero=3,microbatches=4,recompute=full (+" in first
    shown = found.to_dict()
    assert (shown["fits"], shown["advice"] in first, shown["memory_limit_bytes"]) == (False, True, found.option.limit)
    nearest = simulate("llama3-8b", found.nearest.layout, batch=128)
    assert nearest.ok
    assert nearest.to_dict()["advice"] is None
    hopeless = simulate("llama3-8b", "dp=2", "2xRTX4090", batch=16, seq=2048)
    assert not hopeless.ok
    assert "nor does any other layout" in hopeless.advice
    far = simulate("llama3-8b", "dp=8,microbatches=4", batch=128)  # no single change is enough: the planner's choice
    assert simulate("llama3-8b", far.nearest.layout, batch=128).ok


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_a_long_pipeline_is_shown_from_its_start_and_its_end_with_the_bubble_of_all_of_it(schedule: str) -> None:
    layout = f"tp=8,pp=4,sp,microbatches=256,schedule={schedule}"
    found = simulate("llama3-8b", layout, "4x8xH100", batch=256, seq=2048)
    simulation = found.simulation
    assert simulation is not None
    whole = clocked(found.option.workload.schedule(256), simulation.costs)
    assert simulation.schedule.m < 256
    assert found.option.estimate.bubble == pytest.approx(whole.bubble_makespan, rel=1e-3)
    assert found.option.estimate.pipeline == pytest.approx(whole.makespan, rel=1e-3)
    drawn = timeline(simulation, 2000, colour=False, left_out=256 - simulation.schedule.m).plain
    start, end = drawn.splitlines()[0].split(LEFT_OUT)
    assert "F0" in start
    assert "255" in end
    assert "255" not in start
    said = str(found)
    assert f"{LEFT_OUT}: {256 - simulation.schedule.m} of 256 microbatches are left out" in said
    assert f"bubble {whole.bubble_makespan:.1%} of the {whole.makespan:.3g} s" in said
    scene = found.scene()
    assert scene is not None
    assert any(getattr(shape, "text", "").startswith("p=4  m=256") for shape in scene.shapes)


class Momentum(OptimizerConfig, tag=f"{__name__}:Momentum", frozen=True):
    """Planned, and never run."""

    states = ("momentum",)

    def update(self, masters: Any, grads: Any, states: Any, rate: float, decay: float, step: int) -> None:
        raise NotImplementedError

    def stock(self, groups: Any, **options: Any) -> Any:
        raise NotImplementedError


FP8 = ["model=llama3-8b", "layout=dp=8,zero=3,recompute=full", "train.dtype=bfloat16", "train.fp8=true"]
PLAIN = ["model=tiny", "layout=dp=2", "train.dtype=float32", "train.batch=8", "data.seq=256"]


@pytest.mark.parametrize(
    ("changes", "cluster"), [([*FP8, "train.batch=64", "data.seq=8192"], "8xH100"), (PLAIN, "2xCPU")]
)
@pytest.mark.parametrize("optimizer", [AdamW(), Momentum()], ids=["adamw", "one state"])
def test_a_job_and_a_question_about_it_are_one_case(
    changes: list[str], cluster: str, optimizer: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `launch`, elastic runs and dry runs ask, and what `simulate` does: precision, software, optimizer."""
    monkeypatch.setattr(plugins, "_imported", dict(plugins._imported))  # an object's class counts as imported
    job = structs.replace(read_job(None, changes), optimizer=optimizer)
    machines = Cluster.parse(cluster)
    stands, asked = plan_given_layout(job, machines), simulate(job, job.layout, machines).option
    assert stands.workload == asked.workload
    assert stands.seconds == asked.seconds
    assert workload_of(job, machines).precision == ("fp8" if job.train.fp8 else "fp32")
    exact = state(job.model, job.layout, job.train.dtype, optimizer).total
    assert asked.footprint.state.total == pytest.approx(exact, rel=0.001)
    assert saved_bytes(asked) == checkpoint_bytes(job.model, job.train.dtype, optimizer)


def test_float32_fills_no_device_beyond_its_memory() -> None:
    found = plan("llama2-70b", "3x8xH100", precision="fp32", batch=48, seq=2048)
    for option in found.options:
        needs = option.footprint
        exact = state_of(option.workload.spec, option.layout, "float32", at=RankCoords(pp=needs.rank), seq=2048).total
        assert needs.total - needs.state.total + exact < option.workload.device_memory_of(needs.rank)
