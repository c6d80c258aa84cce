"""The dry run against the planner, which it does not know, and against a GPU."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from fivefold.bench.steps import read
from fivefold.cli import app
from fivefold.cost.matrices import MatrixCost
from fivefold.cost.model_state import state_of
from fivefold.dry import fake
from fivefold.dry.rank import dry_run_rank
from fivefold.dry.result import vs_plan
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.rank_part import RankCoords
from fivefold.model.hf_names import sources
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Model, layout, sequence, batch, rank. Fewer layers than the real ones have: blocks are alike.
CASES = [
    ("llama3-8b model.layers=2", "dp=4,tp=2,zero=1,sp,microbatches=2", 8192, 8, 1),
    ("llama3-8b model.layers=2", "dp=8,zero=3,microbatches=2,recompute=selective", 8192, 16, 3),
    ("llama3-8b model.layers=2", "dp=2,cp=4,cp_kind=ulysses,zero=2,microbatches=2", 8192, 4, 3),
    ("llama3-8b model.layers=4", "dp=2,pp=4,zero=1,schedule=zb-h1,microbatches=4", 4096, 8, 0),
    ("llama3-405b model.layers=16", "dp=128,tp=8,pp=16,zero=1,sp,microbatches=16", 8192, 2048, 9001),
]
MORE = [
    ("llama3-70b model.layers=4", "dp=8,tp=8,zero=3,sp,recompute=full", 8192, 8, 9),
    ("gpt3-175b model.layers=8", "tp=8,pp=2,sp,schedule=zb-v,microbatches=4,recompute=selective", 2048, 16, 0),
    ("llama3-8b model.layers=2", "dp=8", 8192, 8, 0),
    ("llama3-8b model.layers=2", "dp=2,cp=4,zero=1,microbatches=2", 8192, 4, 3),
    ("llama3-8b model.layers=2", "tp=2,cp=4,cp_kind=allgather,sp,microbatches=2", 8192, 4, 3),
    ("llama3-8b model.layers=2", "cp=16,cp_kind=ulysses,zero=3,recompute=selective", 131_072, 1, 3),
    ("llama3-8b model.layers=8", "dp=2,pp=4,zero=1,microbatches=4", 4096, 8, 2),
    ("llama3-70b model.layers=4", "dp=2,tp=4,zero=2,microbatches=2,recompute=selective", 8192, 4, 1),
    ("llama3-70b model.layers=4", "dp=64,zero=3,microbatches=2,recompute=full", 8192, 128, 3),
    ("llama3-70b model.layers=4", "dp=2,pp=2,tp=2,zero=1,sp,schedule=zb-v,microbatches=4,recompute=full", 4096, 8, 5),
    ("llama3-70b model.layers=8", "dp=2,pp=2,tp=2,zero=2,sp,schedule=interleaved,microbatches=4", 4096, 8, 1),
    ("llama3-8b model.layers=4", "pp=4,schedule=gpipe,microbatches=8", 8192, 8, 0),
    ("llama3.1-8b model.layers=4", "pp=4,microbatches=4,recompute=full", 4096, 4, 3),
]


def job_of(model: str, layout: str, seq: int, batch: int, dtype: str = "bfloat16") -> Job:
    name, *changes = model.split()
    settings = [f"layout={layout}", f"data.seq={seq}", f"train.batch={batch}", f"train.dtype={dtype}"]
    return read_job(None, [f"model={name}", *changes, *settings])


@pytest.mark.parametrize(
    ("model", "layout", "seq", "batch", "rank"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_the_planner_says_what_the_code_does(model: str, layout: str, seq: int, batch: int, rank: int) -> None:
    job = job_of(model, layout, seq, batch)
    dry = dry_run_rank(job, rank)
    found = vs_plan(job, dry, Cluster.parse(f"1x{job.layout.world}xH100"))
    figures = {figure.name: figure for figure in found.figures}
    assert found.planned == dry.traffic  # every axis, every kind: calls, payload, wire
    for name in ("parameters", "gradients", "optimizer"):
        assert figures[name].dry == figures[name].plan, name
    assert abs(figures["activations at the peak"].difference) < 0.03
    assert figures["FLOPs executed"].difference == pytest.approx(0.0, abs=1e-3)
    assert dry.live == dry.allowed


WHOLE = [
    ("tiny model.layers=2", "dp=1"),
    ("tiny model.layers=2", "dp=2,tp=2,pp=2,zero=1,microbatches=2"),
    pytest.param("tiny-qwen3", "dp=4,tp=2,zero=3,replicate=2", marks=pytest.mark.slow),
    ("tiny-moe model.layers=2", "dp=4,ep=2,zero=1"),
    ("tiny model.layers=2", "dp=4"),
]


@pytest.mark.parametrize(("model", "layout"), WHOLE)
def test_an_optimizer_of_whole_matrices_is_planned_to_the_byte(model: str, layout: str) -> None:
    """What it sends, computes and keeps, and what exists while it runs."""
    job = job_of(f"{model} optimizer.name=muon", layout, 64, 8)
    world = job.layout.world
    for rank in {0, world - 1}:
        dry = dry_run_rank(job, rank)
        found = vs_plan(job, dry, Cluster.parse(f"1x{world}xH100"))
        assert found.planned == dry.traffic
        figures = {figure.name: figure for figure in found.figures}
        assert figures["optimizer"].dry == figures["optimizer"].plan
        assert figures["FLOPs executed"].difference == pytest.approx(0.0, abs=1e-3)
        sizes = (job.model, job.layout, 64, job.train.dtype, job.optimizer)
        cost = MatrixCost.of(*sizes, RankCoords.of(job.layout, rank))
        before, during = (m for m in dry.moments if m.name in ("the sum of gradients", "the optimizer"))
        assert during.peak - before.held == cost.peak + 8  # and the factor that clips gradients
        assert (world == 1) == (not cost.calls)
        kind = "all-gather" if layout == "dp=4" else "all-to-all"
        sent = sum(row.wire for row in dry.traffic if row.kind == kind)  # all of what is packed for others
        assert job.layout.ep > 1 or sent == sum(call.sent for call in cost.calls)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [("model.window=24", "tp=2"), ("model.sinks=true", "dp=2"), ("", "cp=2"), ("", "cp=2,cp_kind=ulysses")],
)
def test_documents_are_masked_without_their_values(changes: str, layout: str) -> None:
    """Fake tensors have none, and masks of windows, sinks and cp are made of them on the host."""
    job = job_of(f"tiny model.layers=1 data.document_mask=true {changes}", layout, 64, 4)
    assert dry_run_rank(job, 0).traffic == vs_plan(job, dry_run_rank(job, 0), Cluster.parse("1x2xH100")).planned


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,tp=2,zero=3,sp,recompute=selective",
        pytest.param("pp=2,cp=2,schedule=zb-h1,microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_quick_fakes_are_the_fakes_of_pytorch(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of views, splits, collectives, FSDP2's resizing: what is remembered is what would be said again."""
    job = job_of("tiny-qwen3 model.layers=2", layout, 64, 8)
    quick = dry_run_rank(job, 1)
    monkeypatch.setattr(fake, "QuickFakeMode", partial(FakeTensorMode, allow_non_fake_inputs=True))
    plain = dry_run_rank(job, 1)
    assert replace(quick, seconds=0.0) == replace(plain, seconds=0.0)


def weights_of(directory: Path, **changes: int) -> Path:
    """A Hugging Face directory of a tiny model."""
    spec = preset("tiny", **changes)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(to_hf_config(spec, "float32")))
    state = {next(sources(spec, parameter)).name: torch.zeros(parameter.shape) for parameter in spec.parameters()}
    save_file(state, directory / "model.safetensors")
    return directory


def test_weights_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    weights = weights_of(tmp_path / "whole")
    line = ["dryrun", "tiny", "--layout", "dp=2", "--seq", "64", "--weights", str(weights), "--json"]
    assert CliRunner().invoke(app, line).exit_code == 0
    narrow = weights_of(tmp_path / "narrow", ffn=64)
    found = CliRunner().invoke(app, [*line[:-2], str(narrow)])
    assert isinstance(found.exception, UserError)
    assert "holds another model than tiny: ffn 64 instead of 384" in str(found.exception)
    file = next(weights.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    found = CliRunner().invoke(app, line)
    assert isinstance(found.exception, UserError)
    assert "layers.1.mlp.up" in str(found.exception)


@pytest.mark.slow
def test_one_h200_needed_what_the_dry_run_says() -> None:
    """Peaks that `torch.cuda.max_memory_allocated` gave for eager steps; compiled ones stay below (see the next)."""
    eager = read(BENCHMARKS / "h200-steps-eager.csv")
    assert {one.case.recompute for one in eager} == {"none", "selective", "full"}
    for one in eager:
        case = one.case
        assert one.memory is not None
        job = job_of(f"{case.model} model.layers={case.layers}", f"recompute={case.recompute}", case.seq, case.samples)
        assert dry_run_rank(job, 0).peak == pytest.approx(one.memory, rel=0.01)


def test_compiled_steps_need_no_more() -> None:
    compiled = {replace(one.case, compile="off"): one.memory for one in read(BENCHMARKS / "h200-steps.csv")}
    for one in read(BENCHMARKS / "h200-steps-eager.csv"):
        assert one.memory is not None
        assert 0.85 * one.memory < (compiled[one.case] or 0) <= one.memory


def test_the_command_for_scripts_and_its_picture(tmp_path: Path) -> None:
    line = "dryrun tiny --layout dp=2,pp=2,microbatches=2 --seq 128 --all-stages --json"
    result = CliRunner().invoke(app, [*line.split(), "-o", str(tmp_path / "memory.svg")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [one["place"]["pp"] for one in found["ranks"]] == [0, 1]
    assert all(one["traffic_agrees"] for one in found["ranks"])
    assert (tmp_path / "memory.svg").read_text().startswith("<svg")


def test_a_layout_that_does_not_fit_says_what_would() -> None:
    line = "dryrun llama3-8b model.layers=2 --layout dp=8,microbatches=2 --batch 16 --cluster 8xA10G"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 1
    assert "it does not fit: rank 0" in result.output
    assert "the cheapest single change that fits: " in result.output.replace("\n", " ")


@pytest.mark.parametrize(("line", "words"), [
    ("dryrun tiny --layout tp=3", "does not divide the 4 attention heads"),
    ("dryrun tiny --layout dp=2 --rank 7", "rank 7 is outside of dp=2; its ranks are 0 to 1"),
    ("dryrun tiny --layout dp=2 --ranks 0,x", "should be numbers"),
    ("dryrun tiny --layout dp=2 --rank 0 --all-stages", "choose ranks in different ways"),
    ("dryrun tiny --layout pp=2 --stages 5", "the pipeline ranks of pp=2 are 0 to 1"),
    ("dryrun tiny --layout dp=2 --cluster 8xH100", "the layout has 2 ranks"),
    ("dryrun tiny --layout dp=2 -o memory.gif", "should end in .svg or .png"),
])  # fmt: skip
def test_bad_input_gets_a_sentence(line: str, words: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


def test_parameters_that_bfloat16_leaves_alone_are_whole_under_zero_3() -> None:
    """Sinks and norms are no DTensors: fake ones get their memory another way than real ones do."""
    job = job_of("tiny-oss model.layers=2", "dp=4,zero=3,recompute=full", 64, 8)
    dry = dry_run_rank(job, 1)
    assert (
        dry.parameters
        == state_of(job.model, job.layout, "bfloat16", job.optimizer, RankCoords(fsdp=1), seq=64).parameters
    )
