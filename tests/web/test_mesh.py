"""The Mesh view says of every rank what training gives it, and of one layer what the planner says that it sends."""

import random

import msgspec
import pytest

import fivefold as ff
from fivefold.cost.traffic import layer_collectives
from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import part_of
from fivefold.layout.sharding import kv_head
from fivefold.layout.sharding import local_params as parameters
from fivefold.layout.stages import stages_of
from fivefold.planner.mesh_picture import mesh
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.web.mesh import payload, rank, ranks
from fivefold.web.question import Ask
from fivefold.web.report import answered_view


def of(*words: str) -> dict[str, str]:
    return dict(zip(("model", "cluster", "batch", "seq", "layout"), words, strict=True))


SMALL = of("llama3-8b", "2x8xH100", "64", "8192", "dp=2,tp=2,pp=2,cp=2,zero=1,sp,microbatches=8")
LARGE = of("llama3-405b", "2048x8xH100", "2048", "8192", "dp=64,tp=8,pp=16,cp=2,zero=1,sp,microbatches=32")
EXPERTS = of("qwen3-30b-a3b", "8x8xH100", "512", "4096", "dp=16,tp=2,pp=2,ep=8,zero=1,sp,microbatches=8")
ALL = (SMALL, LARGE, EXPERTS)


@pytest.mark.parametrize("words", ALL)
def test_the_map_is_that_of_draw_mesh(words: dict[str, str]) -> None:
    page, told = payload(Ask(words))["map"], mesh(words["layout"], words["cluster"])
    axes = [{key: value for key, value in one.items() if key != "where"} for one in page["axes"]]
    assert axes == told.axes == told.to_dict()["axes"]
    assert page["singly"] == (told.layout.world <= 256)
    assert page["cells"] == (list(range(told.layout.world)) if page["singly"] else [node[0] for node in told.nodes])
    some = random.Random(0).sample(range(len(page["cells"])), 20 if len(page["cells"]) > 20 else 16)
    for axis, at in page["at"].items():
        assert [at[one] for one in some] == [told.layout.position(axis, page["cells"][one]) for one in some]
    for axis, groups in page["groups"].items():
        assert groups == told.layout.groups(axis)


@pytest.mark.parametrize("words", ALL)
def test_a_rank_has_what_training_gives_it(words: dict[str, str]) -> None:
    layout, spec, seq = Layout.parse(words["layout"]), preset(words["model"]), int(words["seq"])
    for number in random.Random(1).sample(range(layout.world), 6):
        found = rank(Ask(words | {"rank": str(number)}))
        part, at = found["part"], layout.coordinates(number)
        assert {axis: part["at"][axis] for axis in at} == at
        stages = [stages_of(spec, layout, seq)[one] for one in layout.placement.of_rank[at["pp"]]]
        assert [one["layers"] for one in part["stages"]] == [[one.layers[0], one.layers[-1]] for one in stages]
        own = kv_head(spec, layout, at["tp"])
        assert part["kv_heads"] == [own[0], own[-1]]
        assert part["heads"][1] - part["heads"][0] + 1 == spec.heads // layout.tp
        assert part["positions"] == [[one[0], one[-1]] for one in context_share(seq, layout, at["cp"])]
        boxes = parameters(spec, layout, at["tp"], layout.position("ep", number))
        assert part["parameters"] == sum(boxes[name].size for stage in stages for name in stage.names(spec))
        assert part["shards"]["fsdp"] == [layout.position("fsdp", number), layout.size("fsdp")]
        for axis, group in found["groups"].items():
            assert group == next(ranks for ranks in layout.groups(axis) if number in ranks)
        assert number in found["node"]["ranks"]
        assert sum(number in line["ranks"] for line in found["replica"]["lines"]) == 1


@pytest.mark.parametrize(
    "text", ["dp=2,tp=2,pp=2,zero=1,microbatches=2", "dp=4,cp=2,zero=3,microbatches=1", "tp=4,pp=2"]
)
def test_parts_make_up_the_whole(text: str) -> None:
    spec, layout = preset("tiny-qwen2"), Layout.parse(text)
    parts = [part_of(spec, layout, 64, 16, number) for number in range(layout.world)]
    assert {layer for part in parts for layer in part.layers} == set(range(spec.layers))
    assert {head for part in parts for head in part.heads} == set(range(spec.heads))
    assert {at for part in parts for piece in part.positions for at in piece} == set(range(64))
    assert {one for part in parts for one in part.sequences} == set(range(16))
    held_once = sum(part.own for part in parts) // (1 if layout.zero else layout.size("dp_cp"))
    copies = sum(one.size * (layout.tp - 1) for one in parameters(spec, layout).values() if one.tp.dim is None)
    tied = 2 if layout.size("embedding") > 1 else 1
    embedding = sum(one.parameter.size for one in parameters(spec, layout).values() if one.parameter.tied)
    assert held_once == spec.parameter_count + copies + (tied - 1) * embedding


def test_experts_are_dealt_out() -> None:
    spec, layout = preset("tiny-moe"), Layout.parse("dp=4,ep=4,zero=1,microbatches=2")
    dealt = [part_of(spec, layout, 64, 16, number).experts for number in range(4)]
    assert [list(one) for one in dealt] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("words", ALL)
def test_a_layer_sends_what_the_planner_says(words: dict[str, str]) -> None:
    layer = payload(Ask(words | {"layer": "20"}))["layer"]
    layout, spec = Layout.parse(words["layout"]), preset(words["model"])
    told = layer_collectives(spec, layout, int(words["seq"]), int(words["batch"]), "bfloat16", 20)
    assert [tuple(one[name] for name in told[0]._fields) for one in layer["sent"]] == [tuple(one) for one in told]
    result = ff.simulate(
        words["model"], words["layout"], words["cluster"], batch=int(words["batch"]), seq=int(words["seq"])
    )
    topology = result.option.workload.topology
    for one in layer["sent"]:
        assert one["seconds"] == topology.time(one["kind"], one["axis"], one["payload"], one["calls"])
        assert one["across"] == topology.across(one["axis"])


def test_a_layer_is_the_ranks_own_unless_it_is_named() -> None:
    first, last = (payload(Ask(SMALL | {"rank": str(number)}))["layer"]["number"] for number in (0, 4))
    assert (first < 16, last >= 16) == (True, True)


@pytest.mark.parametrize(
    "words", [{}, {"model": "tiny", "cluster": "CPU"}, {"model": "deepseek-v3", "cluster": "64x8xH200"}]
)
def test_the_page_begins_with_something_that_can_run(words: dict[str, str]) -> None:
    page = payload(Ask(words))
    assert page["problems"] == []
    assert page["map"]["cells"]


def test_what_cannot_run_is_shown_as_its_neighbour() -> None:
    page = payload(Ask(SMALL | {"move": "tp=3"}))
    assert "does not divide" in page["problems"][0]
    assert b"does not divide" in msgspec.json.encode(page)
    assert mesh(page["shown"]["text"], "2x8xH100").layout.world == 16
    with pytest.raises(UserError, match="there is no rank 16"):
        rank(Ask(SMALL | {"rank": "16"}))


def test_a_file_holds_every_rank_of_a_small_mesh() -> None:
    view = answered_view("mesh", Ask(SMALL | {"rank": "3"}))
    assert [one["part"]["rank"] for one in view["parts"]["ranks"]] == list(range(16))
    assert [one["part"]["rank"] for one in ranks(Ask(LARGE | {"rank": "77"}))] == list(range(72, 80))


@pytest.mark.parametrize("words", [{"rank": "16"}, {"rank": "-1"}, {"layer": "32"}, {"layer": "-1"}])
def test_ranks_and_layers_that_are_not_there_are_refused(words: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"is more than|is not a whole number"):
        payload(Ask(SMALL | words))
