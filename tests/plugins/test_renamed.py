"""The package's own kinds of block under another tag, place, class and module: nothing knows them by their names."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fivefold.cost.peak_memory import footprint
from fivefold.cost.step import Workload, estimate, rank_flops
from fivefold.cost.systems import SYSTEMS
from fivefold.cost.traffic import expected_traffic, layer_collectives
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.rules import Given, problems
from fivefold.layout.stages import stages_of
from fivefold.model.decoder import Decoder
from fivefold.planner.search import search
from fivefold.planner.serve_cost import cached_numbers
from fivefold.planner.space import SearchQuery, space
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from tests.verifier.cases import slow

KINDS = """
from fivefold.spec.kinds import MLP, Mixer
from fivefold.spec.mixers import GroupedQueryAttention, MultiHeadLatentAttention
from fivefold.spec.mlps import Dense, MixtureOfExperts


class Heads(Mixer, frozen=True, kw_only=True, tag="renamed:Heads"):
    place = "heads"
    module = "renamed.layers:Heads"
    cp = attends = True
    window: int = 0
    operations = GroupedQueryAttention.operations
    cache = GroupedQueryAttention.cache


class Latents(Mixer, frozen=True, kw_only=True, tag="renamed:Latents"):
    place = "latents"
    module = "renamed.layers:Latents"
    cp = attends = True
    operations = MultiHeadLatentAttention.operations
    cache = MultiHeadLatentAttention.cache


class Wide(MLP, frozen=True, kw_only=True, tag="renamed:Wide"):
    place = "wide"
    module = "renamed.layers:Wide"
    operations = Dense.operations
    divided = Dense.divided


class Many(MLP, frozen=True, kw_only=True, tag="renamed:Many"):
    place = "many"
    module = "renamed.layers:Many"
    routes = True
    reference = MixtureOfExperts.reference
    operations = MixtureOfExperts.operations
    divided = MixtureOfExperts.divided
"""
LAYERS = """
from fivefold.model.attention import Attention, LatentAttention
from fivefold.model.mlp import DenseMLP
from fivefold.model.moe import MoE


class Heads(Attention):
    pass


class Latents(LatentAttention):
    pass


class Wide(DenseMLP):
    pass


class Many(MoE):
    pass
"""
NAMES = {"attention": "renamed:Heads", "mla": "renamed:Latents", "dense": "renamed:Wide", "moe": "renamed:Many"}
SEQ, BATCH = 64, 16
ANY = [
    "tp=2,dp=2,zero=1,microbatches=2,recompute=selective",
    "tp=2,sp,cp=2,microbatches=2",
    "cp=2,cp_kind=ulysses,tp=2,sp,recompute=selective,microbatches=4",
    "dp=2,pp=2,zero=2,microbatches=4,recompute=full",
    "pp=2,tp=2,schedule=zb-v,chunks=2,microbatches=4",
    "dp=4,zero=3,microbatches=2",
]
OF_EXPERTS = ["dp=4,ep=2,zero=1,microbatches=2", "dp=2,tp=2,ep=4,sp,dispatch=allgather,recompute=selective"]
MODELS = ["tiny", "tiny-qwen3", "tiny-gpt", "tiny-mla", "tiny-oss", "tiny-moe", "tiny-deepseek"]


@pytest.fixture
def package(tmp_path: Path, forgotten: None) -> None:
    home = tmp_path / "renamed"
    home.mkdir()
    (home / "__init__.py").write_text(KINDS)
    (home / "layers.py").write_text(LAYERS)
    sys.path.insert(0, str(tmp_path))


def both(name: str) -> tuple[ModelSpec, ModelSpec]:
    """A model as it is, and of renamed kinds; either as a pattern."""
    spec = preset(name)
    if name == "tiny-qwen3":
        spec = msgspec.structs.replace(spec, qk_norm_over="all")  # whose squares tp sums
    rows: list[list[dict[str, Any]]] = [[], []]
    for layer in range(spec.layers):
        own = {place: msgspec.to_builtins(getattr(spec.kinds(layer), place)) for place in ("mixer", "mlp")}
        rows[0].append(own)
        rows[1].append({place: {**kind, "name": NAMES[kind["name"]]} for place, kind in own.items()})
    experts = msgspec.structs.replace(spec.experts, dense_layers=0) if spec.experts else None
    bare = msgspec.structs.replace(spec, window=0, window_period=1, experts=experts)
    for row in rows[1]:
        for place, kind in row.items():
            job = read_job(None, [f'model.pattern=[{{{place} = "{kind["name"]}"}}]'])  # imports it
            assert job.model.pattern
    first, second = (msgspec.structs.replace(bare, pattern=tuple(pattern)) for pattern in rows)
    assert first.problems() == second.problems() == []
    return first, second


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-mla", "tiny-moe", *slow(["tiny-qwen3", "tiny-gpt", "tiny-oss", "tiny-deepseek"])]
)
def test_it_is_planned_counted_and_divided_as_before(name: str, package: None) -> None:
    """Stages, seconds, memory, traffic, FLOPs, each collective of each layer, caches, closed forms, and the choice."""
    first, second = both(name)
    assert [one.shape for one in second.parameters()] == [one.shape for one in first.parameters()]
    assert first.windowed == second.windowed
    for text in ANY + (OF_EXPERTS if first.experts else []):
        layout = Layout.parse(text)
        assert problems(layout, Given(second, seq=SEQ, batch=BATCH)) == []
        assert stages_of(second, layout, SEQ) == stages_of(first, layout, SEQ)
        for software in ("fivefold", "megatron"):
            own, renamed = (_workload(spec, layout, software) for spec in (first, second))
            assert estimate(renamed).seconds == estimate(own).seconds, (text, software)
            assert footprint(renamed) == footprint(own), (text, software)
        sent = [expected_traffic(spec, layout, SEQ, BATCH, "bfloat16") for spec in (first, second)]
        assert sent[0] == sent[1]
        assert rank_flops(first, layout, SEQ, BATCH) == rank_flops(second, layout, SEQ, BATCH)
        for layer in {0, first.layers - 1}:
            steps = [layer_collectives(spec, layout, SEQ, BATCH, "bfloat16", layer) for spec in (first, second)]
            assert list(steps[0]) == list(steps[1])
    for kinds, other in zip(first.counted(), second.counted(), strict=True):
        assert cached_numbers(first, 2, kinds, 100) == cached_numbers(second, 2, other, 100)
    spaces = [space(SearchQuery(_workload(spec, Layout()), {"samples": 1})) for spec in (first, second)]
    assert np.array_equal(spaces[0].seconds, spaces[1].seconds)
    assert np.array_equal(spaces[0].memory, spaces[1].memory)
    chosen = [search(_workload(spec, Layout()), top=1).best for spec in (first, second)]
    assert (chosen[0].layout, chosen[0].seconds) == (chosen[1].layout, chosen[1].seconds)


@pytest.mark.parametrize("name", ["tiny-oss", "tiny-deepseek"])
def test_its_module_is_made(name: str, package: None) -> None:
    _, second = both(name)
    with torch.device("meta"):
        model = Decoder(second)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {
        one.name: one.shape for one in second.parameters()
    }
    assert {name for name, _ in model.named_buffers()} >= second.buffers().keys()


def _workload(spec: ModelSpec, layout: Layout, software: str = "fivefold") -> Workload:
    return Workload(spec, layout, Cluster.parse("8xH100"), SEQ, BATCH, software=SYSTEMS[software])
