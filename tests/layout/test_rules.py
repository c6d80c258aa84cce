"""One table says what is legal: of one layout in sentences, of many in arrays, and to the planner's search."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rules import CHECKED_AFTER, RULES, Given, Layouts, legal, tp_fits
from fivefold.planner.space import FEWEST_TOKENS, SearchQuery, space
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.text import save
from fivefold.spec.blocks import LatentSpec
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.text import divisors

SEQ, BATCH, RANKS = 4096, 8, 8
LATENTS = LatentSpec(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=8)
DENSE = {
    "one kv head, a prime vocabulary": preset("tiny", kv_heads=1, vocab=257),
    "tied": preset("tiny", tied=True),
    "latent attention": preset("tiny", mla=LATENTS, kv_heads=0, head_dim=0, rope_interleaved=True),
}
EXPERTS = {"experts": preset("tiny-moe"), "tied experts": preset("tiny-moe", tied=True)}
FIELDS = ("dp", "tp", "pp", "cp", "cp_kind", "zero", "replicate", "sp", "ep", "dispatch", "microbatches")


def anything(draw: random.Random, schedule: str) -> Layout:
    """A layout that breaks some rules, as a rule."""
    values: dict[str, Any] = {
        axis: draw.choice((1, 1, 2, 3, 4)) for axis in ("dp", "tp", "pp", "cp", "replicate", "ep")
    }
    values |= {"cp_kind": draw.choice(("ring", "ulysses")), "dispatch": draw.choice(("alltoall", "allgather"))}
    values |= {"zero": draw.choice((0, 1, 2, 3, 4)), "sp": draw.random() < 0.3, "microbatches": draw.choice((1, 4, 8))}
    return Layout(**values, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("model", [*DENSE, *EXPERTS])
def test_arrays_say_of_each_layout_what_its_sentences_say(model: str, schedule: str) -> None:
    spec, draw = (DENSE | EXPERTS)[model], random.Random(model)
    layouts = [anything(draw, schedule) for _ in range(400)]
    layouts += [Layout(dp=2, microbatches=4), Layout(tp=2, sp=True), Layout(pp=2, schedule=schedule, microbatches=8)]
    layouts = [layout for layout in layouts if layout.schedule == schedule]
    columns = {field: np.array([getattr(layout, field) for layout in layouts]) for field in FIELDS}
    record = CATALOGUE[schedule]
    many = Layouts(record=record, chunks=record.chunks, **columns)
    fine = legal(many, Given(spec, seq=96, batch=48))
    assert fine.tolist() == [not layout.problems(spec, seq=96, batch=48) for layout in layouts]
    assert 0 < fine.sum() < len(layouts)


def test_what_tp_fits_is_what_its_rules_say() -> None:
    spec, many = preset("llama2-13b"), np.arange(1, 100)
    assert tp_fits(spec, many).tolist() == [not Layout(tp=int(tp)).problems(spec) for tp in many]


def test_a_rule_waits_only_for_rules_before_it() -> None:
    order = list(RULES)
    for code, before in CHECKED_AFTER.items():
        for start in (before,) if isinstance(before, str) else before:
            waited = [order.index(other) for other in RULES if other.startswith(start) and other != code]
            assert waited
            assert min(waited) < order.index(code)


def all_layouts(spec: ModelSpec, workload: Workload, kinds: list[str], sps: list[bool]) -> Iterator[Layout]:
    """Of 8 ranks, with every setting that the search tries; the rules do not ask for recompute."""
    records = [CATALOGUE[name] for name in workload.software.schedules]
    eps = divisors(RANKS) if spec.experts is not None else [1]
    for dp, tp, pp, cp in product(divisors(RANKS), repeat=4):
        if dp * tp * pp * cp != RANKS:
            continue
        choices = product(
            kinds if cp > 1 else ["ring"],
            sps,
            range(4),
            [(record.name, chunks) for record in records for chunks in record.planned] if pp > 1 else [("1f1b", 1)],
            divisors(BATCH),
            eps,
            ["alltoall", "allgather"] if spec.experts is not None else ["alltoall"],
        )
        for kind, sp, zero, (schedule, chunks), microbatches, ep, dispatch in choices:
            degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "microbatches": microbatches}
            yield Layout(**degrees, cp_kind=kind, sp=sp, zero=zero, schedule=schedule, chunks=chunks, dispatch=dispatch)


def worth_a_try(layout: Layout, spec: ModelSpec) -> bool:
    """The search leaves out the others although they are legal; what it never writes (replicate) is not made above."""
    if layout.cp > 1 and SEQ // layout.cp < FEWEST_TOKENS:
        return False
    if layout.zero and not layout.has_copies(spec):
        return False
    return spec.experts is None or layout.dispatch == "alltoall" or layout.ep <= spec.experts.top_k


@pytest.mark.parametrize("model", [*DENSE, pytest.param("experts", marks=pytest.mark.slow), "tied experts"])
def test_the_search_tries_every_legal_layout_that_is_worth_it_and_no_other(model: str) -> None:
    spec = (DENSE | EXPERTS)[model]
    # Experts have settings enough of their own.
    kinds, sps = (["ring", "allgather", "ulysses"], [False, True]) if spec.experts is None else (["ring"], [False])
    fixed = {"recompute": "none"} | ({} if spec.experts is None else {"cp_kind": "ring", "sp": False})
    workload = Workload(spec, Layout(), Cluster.parse("8xH100"), SEQ, BATCH)
    found = space(SearchQuery(workload, fixed))
    tried = {found.layout(at) for at in range(len(found))}
    assert len(tried) == len(found) > 300
    every = all_layouts(spec, workload, kinds, sps)
    lawful = {layout for layout in every if not layout.problems(spec, world=RANKS, seq=SEQ, batch=BATCH)}
    assert tried == {layout for layout in lawful if worth_a_try(layout, spec)}
    assert tried < lawful


def test_the_search_knows_when_a_tied_embedding_is_cut(tmp_path: Path) -> None:
    """Two stages of one rank hold it, also where a file has a single rank; ZeRO 3 cuts nothing that has no copies."""
    path = tmp_path / "two.txt"
    save(build("interleaved", 1, 4, chunks=2), path)
    for spec, fixed, zeros in (
        (DENSE["tied"], {"schedule": str(path)}, {0, 1}),
        (EXPERTS["tied experts"], {"schedule": "zb-v", "zero": 3, "tp": 4, "pp": 2, "ep": 4}, {3}),
        (EXPERTS["tied experts"], {"schedule": "zb-v", "zero": 3, "tp": 4, "pp": 2, "ep": 2}, set()),
    ):
        workload = Workload(spec, Layout(), Cluster.parse("8xH100"), SEQ, BATCH)
        found = space(SearchQuery(workload, fixed | {"recompute": "none"}))
        layouts = [found.layout(at) for at in range(len(found))]
        assert {layout.zero for layout in layouts} == zeros
        assert not any(layout.problems(spec, world=8, seq=SEQ, batch=BATCH) for layout in layouts)
