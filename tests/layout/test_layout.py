"""Layouts: text that round-trips, and every reason why one cannot run."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout.layout import Layout
from fivefold.layout.rules import RULES, tp_fits
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.spec.mixers import GroupedQueryAttention
from fivefold.spec.pattern import Layer
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

degrees = st.integers(1, 64)
layouts = st.builds(
    Layout,
    **dict.fromkeys(("dp", "tp", "pp", "cp", "replicate", "microbatches"), degrees),
    cp_kind=st.sampled_from(["ring", "allgather", "ulysses"]),
    zero=st.integers(0, 3),
    sp=st.booleans(),
    schedule=st.sampled_from(list(CATALOGUE)),
    chunks=st.integers(0, 8),
    recompute=st.sampled_from(["none", "selective", "full"]),
    split=st.lists(st.integers(0, 99), max_size=5).map(tuple),
)


@given(layouts)
def test_text_round_trips(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_text_is_what_people_write() -> None:
    layout = Layout.parse("dp=2, tp=2,pp=2,zero=1,schedule=1f1b")
    assert (layout.dp, layout.tp, layout.pp, layout.zero, layout.world) == (2, 2, 2, 1, 8)
    assert str(layout) == "dp=2,tp=2,pp=2,zero=1"
    assert Layout.parse("pp=4,split=15,16,16,15,sp").split == (15, 16, 16, 15)
    assert Layout.parse("tp=2,sp") == Layout.parse("sp=true,tp=2")
    assert Layout.parse("") == Layout()
    assert str(Layout()) == "dp=1"


def test_a_schedule_brings_its_own_chunks() -> None:
    assert Layout(schedule="zb-v").chunks == 2
    assert Layout(schedule="interleaved", chunks=4).stages == 4
    assert Layout(pp=4).stages == 4


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("dq=2", ["layout.dq is not a setting; did you mean 'dp'"]),
        ("dp=two,zero=x", ["layout.dp='two' is not a whole number", "layout.zero='x' is not a whole number"]),
        ("cp_kind=rnig", ["layout.cp_kind='rnig' is not a choice; did you mean 'ring'"]),
        ("dp", ["layout.dp has no value"]),
        ("dp=1,dp=2", ["layout gives dp twice"]),
        ("split=1,a", ["layout.a is not a setting"]),
    ],
)
def test_bad_text_names_every_piece(text: str, sentences: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Layout.parse(text)
    assert len(error.value.problems) == len(sentences)
    for problem, sentence in zip(error.value.problems, sentences, strict=True):
        assert sentence in problem


@pytest.mark.parametrize(
    ("text", "model", "sentence"),
    [
        ("tp=3", "llama3-8b", "tp=3 does not divide the 32 attention heads of llama3-8b; nearest: tp=2 or tp=4"),
        ("tp=64", "llama3-8b", "nearest: tp=32"),
        ("tp=5", "llama2-13b", "tp=5 does not divide the feed-forward width 13824"),
        ("tp=2,sp,cp=2", "tiny", "does not divide into the 8 equal pieces"),
        ("sp", "tiny", "sp shards the sequence over tp, and tp=1"),
        ("cp=8,cp_kind=ulysses", "tiny", "deals the heads out over cp x tp = 8 ranks"),
        ("pp=8", "tiny", "makes 8 stages"),
        ("pp=2,split=3,2", "tiny", "adds up to 5 layers, and tiny has 4"),
        ("pp=2,split=4", "tiny", "names 1 stages, and pp=2 x chunks=1 makes 2"),
        ("schedule=1f2b", "tiny", "unknown schedule '1f2b'; did you mean '1f1b'"),
        ("schedule=zb-v,chunks=3", "tiny", "schedule=zb-v has 2 per rank"),
        ("pp=4,schedule=interleaved,chunks=1,microbatches=3", "tiny", "nearest: microbatches=4, or schedule=1f1b"),
        ("pp=2,schedule=dualpipe-v,microbatches=3", "tiny", "nearest: microbatches=4"),
        ("zero=4", "tiny", "nearest: zero=3"),
        ("dp=4,replicate=2", "tiny", "replicate=2 copies the shards of zero=3"),
        ("dp=4,zero=3,replicate=3", "tiny", "nearest: replicate=2 or replicate=4"),
        ("dp=3,microbatches=5", "tiny", "a global batch of 16 sequences does not divide"),
        ("dp=0", "tiny", "layout.dp=0 must be at least 1"),
        ("schedule=interleaved,chunks=9", "tiny", "nearest: chunks=6"),
        ("cp=3,cp_kind=ulysses,tp=3", "tiny", "nearest: cp_kind=ring"),
        ("split=-1,5,pp=2", "tiny", "negative number of layers"),
        ("dp=2,ep=2", "tiny", "ep=2 deals out experts, and tiny has none; nearest: ep=1"),
        ("dp=2,dispatch=allgather", "tiny", "dispatch=allgather sends tokens to experts, and tiny has none"),
        (
            "ep=4",
            "tiny-moe",
            "= 1 ranks that have the same layers; nearest: ep=1, or dp=4 or tp=4: ep adds no ranks",
        ),
        ("dp=2,dispatch=allgather", "tiny-moe", "dispatch=allgather is how tokens reach other ranks of ep, and ep=1"),
        ("dp=4,ep=3", "tiny-moe", "ep=3 does not divide the dp x cp x tp = 4 ranks"),
        (
            "dp=16,ep=16",
            "tiny-moe",
            "does not divide the 8 experts of tiny-moe: each rank has as many; nearest: ep=8",
        ),
        ("dp=2,pp=2,ep=4", "tiny-moe", "ep=4 does not divide the dp x cp x tp = 2 ranks that have the same layers"),
        ("dp=4,zero=3,replicate=2,ep=4", "tiny-moe", "ep=4 does not divide the dp/replicate x cp x tp = 2 ranks"),
    ],
)
def test_a_layout_that_cannot_run_says_why(text: str, model: str, sentence: str) -> None:
    problems = Layout.parse(text).problems(preset(model), seq=100, batch=16)
    assert any(sentence in problem for problem in problems), problems


def test_all_problems_come_at_once() -> None:
    layout = Layout.parse("tp=3,pp=9,zero=7,schedule=zbv,microbatches=5")
    problems = layout.problems(preset("tiny"), world=8, seq=100, batch=16)
    assert len(problems) == 5
    assert len(Layout.parse("dp=0,tp=3,zero=9").problems(preset("tiny"))) == 3


def test_the_world_is_checked_against_the_degrees() -> None:
    problem = Layout.parse("tp=2").problems(preset("tiny"), world=8)
    assert problem == ["layout tp=2 needs 2 ranks (dp x tp x pp x cp), and there are 8; nearest: dp=4, or --nproc 2"]


@pytest.mark.parametrize(("text", "world", "nearest"), [
    ("dp=2,ep=2", 1, "dp=1,ep=1, or"), ("dp=4,ep=4", 2, "dp=2,ep=2, or"), ("dp=4,ep=2", 2, "dp=2, or"),
])  # fmt: skip
def test_a_layout_for_fewer_ranks_is_itself_legal(text: str, world: int, nearest: str) -> None:
    [problem] = Layout.parse(text).problems(preset("tiny-moe"), world=world)
    assert f"nearest: {nearest}" in problem
    assert not Layout.parse(nearest.removesuffix(", or")).problems(preset("tiny-moe"), world=world)


def test_published_layouts_are_legal() -> None:
    llama = Layout.parse("dp=128,tp=8,pp=16,sp,schedule=interleaved,chunks=8,microbatches=16")
    assert llama.problems(preset("llama3-405b"), world=16_384, seq=8192, batch=2048) == []
    few_kv_heads = Layout.parse("tp=16")
    assert few_kv_heads.problems(preset("llama3-70b")) == []


@given(st.sampled_from(["tiny", "llama3-8b", "llama2-13b", "gpt3-175b"]), st.integers(2, 130))
def test_suggested_tensor_degrees_are_legal(model: str, tp: int) -> None:
    spec = preset(model)
    problems = Layout(tp=tp).problems(spec)
    assert bool(problems) != tp_fits(spec, tp)
    for problem in problems:
        suggested = [int(word.split("=")[1]) for word in problem.split("nearest: ")[1].split(" or ")]
        assert suggested
        assert all(tp_fits(spec, n) for n in suggested)


def test_layouts_and_builders_agree_on_schedules() -> None:
    """The same names, and a layout is refused for its microbatches exactly where the builder refuses them."""
    spec = preset("llama3-70b")
    for schedule, p, m in product(CATALOGUE, (1, 2, 4), range(1, 10)):
        legal = not Layout(pp=p, schedule=schedule, microbatches=m).problems(spec)
        try:
            build(schedule, p, m)
            assert legal, (schedule, p, m)
        except UserError:
            assert not legal, (schedule, p, m)


class Whole(GroupedQueryAttention, frozen=True, kw_only=True):
    cp = False


CODES = {
    "layout.tp.heads": ("tp=3", "llama3-8b"),
    "layout.tp.kv_heads": ("tp=12", "36 heads"),
    "layout.tp.ffn": ("tp=5", "llama2-13b"),
    "layout.sp.tp": ("sp", "tiny"),
    "layout.cp.heads": ("cp=8,cp_kind=ulysses", "tiny"),
    "layout.cp.kind": ("cp=2", "whole sequences"),
    "layout.seq.pieces": ("cp=5", "tiny"),
    "layout.schedule.unknown": ("schedule=1f2b", "tiny"),
    "layout.schedule.size": ("pp=4096,microbatches=65536", "tiny"),
    "layout.chunks.schedule": ("schedule=zb-v,chunks=3", "tiny"),
    "layout.microbatches.schedule": ("pp=2,schedule=dualpipe-v,microbatches=3", "tiny"),
    "layout.split.negative": ("split=-1,5,pp=2", "tiny"),
    "layout.split.stages": ("pp=2,split=4", "tiny"),
    "layout.split.layers": ("pp=2,split=3,2", "tiny"),
    "layout.pp.layers": ("pp=8", "tiny"),
    "layout.zero.tied": ("dp=2,pp=2,zero=2,schedule=zb-v,microbatches=4", "tied"),
    "layout.zero.stage": ("zero=4", "tiny"),
    "layout.replicate.zero": ("dp=4,replicate=2", "tiny"),
    "layout.replicate.dp": ("dp=4,zero=3,replicate=3", "tiny"),
    "layout.batch.share": ("dp=3,microbatches=5", "tiny"),
    "layout.ep.dense": ("dp=2,ep=2", "tiny"),
    "layout.dispatch.dense": ("dp=2,dispatch=allgather", "tiny"),
    "layout.dispatch.ep": ("dp=2,dispatch=allgather", "tiny-moe"),
    "layout.ep.ranks": ("ep=4", "tiny-moe"),
    "layout.ep.experts": ("dp=3,ep=3", "tiny-moe"),
    "layout.ranks.given": ("dp=4", "tiny"),
    "layout.ranks.most": ("dp=1000000,tp=1000000", "tiny"),
    "layout.dp.range": ("dp=0", "tiny"),
}
OTHERS = {
    "36 heads": preset("tiny", hidden=288, heads=36, kv_heads=8, head_dim=8),
    "tied": preset("tiny", tied=True),
    "whole sequences": preset("tiny", pattern=[Layer(mixer=Whole(), mlp="dense")]),
}


@pytest.mark.parametrize("code", CODES)
def test_a_problem_has_a_code(code: str) -> None:
    text, model = CODES[code]
    spec = OTHERS.get(model) or preset(model)
    problems = Layout.parse(text).problems(spec, world=1 if code == "layout.ranks.given" else None, seq=128, batch=16)
    assert code in UserError(problems).codes
    assert len(UserError(problems).codes) == len(problems)


def test_codes_are_in_the_docs_and_provoked_above() -> None:
    """Those of files of schedules are provoked where files are."""
    root = Path(__file__).parents[2]
    said = {*RULES, "layout.ranks.most"}
    files = {f"layout.schedule.{what}" for what in ("degree", "stages", "first", "collectives")}
    assert said - files == set(CODES) - {"layout.dp.range"}
    documented = set(re.findall(r"^\| `(layout[\w.]+)`", (root / "docs/problems.md").read_text(), re.M))
    assert said <= documented
