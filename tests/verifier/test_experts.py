"""Mixtures of experts over ranks against a plain loop over experts; bugs that others have shipped are found."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

import fivefold.verifier.plain_moe
import fivefold.verifier.reference
from fivefold.job.config import Job
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.verifier.cases import (
    LOSSES_OFF,
    LayoutCase,
    all_cases,
    legal_layouts,
    mixture,
    pair_coverage,
    pairwise,
    variants,
)
from fivefold.verifier.reference import run_reference
from fivefold.verifier.result import VerifyResult
from fivefold.verifier.verdict import RankMeasurement, ReplayedRouting, Verdict
from fivefold.verifier.verify import Judge, verify
from tests.verifier import cases, mixtures
from tests.verifier.cases import Bug, together
from tests.verifier.mixtures import DEEPSEEK, job, moe


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge(timeout=120) as one:
        yield one


# ---- layouts hold ----------------------------------------------------------------------------------------------------


def test_what_the_stages_of_a_pipeline_are_compiled_with_is_not_counted_as_routed() -> None:
    hook = f"tests.verifier.cases:{cases.a_quick_compiler.__name__}"
    found = verify("pp=2,microbatches=2", ["train.compile=on"], model="tiny-moe", steps=1, hook=hook)
    [(_, verdict)] = found.verdicts
    assert verdict.problems == []
    assert verdict.graphs  # it was compiled


EVERY = Experts(count=4, top_k=4, ffn=12, renormalise=False)
MANY = Experts(count=64, top_k=1, ffn=4)  # more than tokens
GPT = {**cases._LAYER_NORM, "kv_heads": 4, "tied": True, "dropout": 0.1}

PROOFS = {
    "sp, DeepSeek, full recompute": job("tp=2,ep=2,sp,recompute=full,microbatches=2", moe(DEEPSEEK), steps=2),
    "slices": job("tp=2,ep=2,recompute=selective", moe(DEEPSEEK)),
    "cp, gathered": job("cp=2,ep=2,dispatch=allgather,zero=1"),
    "experts sharded, the rest not": job("tp=2,zero=3"),
    "zero bubble": job("pp=2,schedule=zb-v,microbatches=2", moe(DEEPSEEK, layers=3)),
    "one token, and a rank without": job("tp=2,ep=2", moe(MANY), batch=1, seq=1),
}
MORE = {
    "bfloat16": job("dp=2,ep=2", dtype="bfloat16"),
    "two steps": job("dp=2,ep=2", steps=2),
    "zero 3, experts whole": job("dp=2,ep=2,zero=3,recompute=full"),
    "zero 3, selective": job("dp=2,zero=3,recompute=selective,microbatches=2"),
    "zero 2": job("dp=2,zero=2,microbatches=2"),
    "every expert": job("dp=2,ep=2", moe(EVERY)),
    "more experts than tokens": job("tp=2,ep=2,dispatch=allgather", moe(MANY), batch=2),
    "biases": job("tp=2,ep=2,sp,zero=1", moe(**GPT)),
    "one token, gathered": job("tp=2,ep=2,dispatch=allgather,recompute=full", moe(MANY), batch=1, seq=1),
    "three tokens over two ranks": job("tp=2", batch=1, seq=3),
    "float32": job("dp=2,ep=2", dtype="float32"),
}


# Joined pairs, whose halves run in turns: each has messages of experts under way while the other computes.
PAIRED = "pp=2,ep=2,schedule=dualpipe-v,microbatches=4"
SIX = moe(DEEPSEEK, layers=6)
PAIRS = {
    "zero 1": job(f"dp=2,{PAIRED},zero=1", SIX, steps=2),
}
MORE_PAIRS = {
    "slices, gathered, full": job(f"tp=2,{PAIRED},dispatch=allgather,recompute=full", SIX),
    "sp, selective": job(f"tp=2,{PAIRED},sp,recompute=selective", SIX),
    "cp, zero 2, full": job(f"cp=2,{PAIRED},zero=2,recompute=full", SIX),
    "gathered, zero 2": job(f"dp=2,{PAIRED},dispatch=allgather,zero=2,recompute=selective", SIX),
    "zero 3, one after the other": job(f"dp=2,{PAIRED},zero=3", SIX),
    "no shared expert": job(f"dp=2,{PAIRED}", moe(layers=4), steps=2),
    "biases, tied": job(f"dp=2,{PAIRED},zero=1", moe(**GPT, layers=4)),
    "a rank without tokens": job(f"tp=2,{PAIRED}", moe(MANY, layers=4), batch=4, seq=1),
}


@pytest.mark.parametrize(
    "proofs",
    [PROOFS, PAIRS, *(pytest.param(more, marks=pytest.mark.slow) for more in (MORE, MORE_PAIRS))],
    ids=["few", "pairs", "more", "more pairs"],
)
def test_layouts_compute_what_a_loop_over_experts_computes(judge: Judge, proofs: dict[str, Job]) -> None:
    """And send tokens to the same experts, count the same load, move biases alike, send what the closed form says."""
    verdicts = together(judge, {name: (one, cases.nothing) for name, one in proofs.items()})
    assert {name: verdict.problems for name, verdict in verdicts.items()} == {name: [] for name in proofs}
    for name, verdict in verdicts.items():
        exact, experts = verdict.job.train.dtype == "float64", verdict.job.model.experts
        assert experts is not None
        assert verdict.passed
        assert verdict.worst("load") is not None
        assert verdict.worst("routing") is not None
        assert (verdict.replayed is None) == exact
        assert (verdict.worst("bias") is not None) == experts.balance_bias
        if exact:
            assert all(error.error < 1e-12 for error in verdict.comparisons), name
        sent = {one.counted.kind for one in verdict.traffic}
        assert ("all-to-all" in sent) == (verdict.job.layout.ep > 1 and verdict.job.layout.dispatch == "alltoall")


def test_a_narrow_dtype_replays_the_routing_and_says_so() -> None:
    verdict = Verdict(job("dp=2,ep=2", dtype="bfloat16"), 1.0, replayed=ReplayedRouting(512, 3))
    [told] = [
        block.text
        for block in VerifyResult([(LayoutCase(verdict.job, ""), verdict)]).blocks()
        if "replayed" in str(block)
    ]
    assert told.strip() == (
        "routing replayed from the reference, since a rounding can decide between experts: 3 of 512 tokens of all "
        "layers and steps would have gone to others"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    "dp=4,ep=2,zero=3,replicate=2",
    "dp=2,tp=2,ep=4,zero=2,microbatches=2",
    "tp=2,cp=2,ep=2,zero=3,sp,recompute=selective",
    "pp=2,cp=2,cp_kind=ulysses,zero=3,ep=2,dispatch=allgather,schedule=zb-v,recompute=selective,microbatches=2",
    "dp=2,pp=2,ep=2,schedule=dualpipe-v,microbatches=4,recompute=full",
    "tp=4,ep=2,zero=1",
])  # fmt: skip
def test_layouts_of_four_ranks(judge: Judge, layout: str) -> None:
    assert judge(job(layout, moe(DEEPSEEK, layers=3), steps=2)).problems == []


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"ep=4 does not divide the 6 experts .* nearest: ep=2"):
        verify("dp=4,ep=4", ["model.experts.count=6"], model="tiny-moe")


# ---- bugs are found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    bug: Bug
    one: Job
    what: str  # kind of comparison that fails
    named: str  # in the name of what fails
    how: str = ""

    @property
    def name(self) -> str:
        return self.bug.__name__ + self.how


_SOFTMAX = moe(Experts(count=8, top_k=1, ffn=12, renormalise=False))
PLANTED = [
    Planted(mixtures.gradients_are_divided_by_ep, job("dp=2,ep=2"), "gradient", "mlp.experts."),
    Planted(mixtures.ranks_clip_by_norms_of_their_own, job("dp=2,ep=2"), "parameter", "layers."),
    Planted(mixtures.the_router_is_not_summed_over_tp, job("tp=2"), "gradient", "mlp.router.weight"),
    Planted(mixtures.the_router_is_detached, job("dp=2,ep=2"), "gradient", "mlp.router.weight"),
    Planted(mixtures.the_balance_loss_is_divided_by_dp, job("dp=2,ep=2"), "gradient", "layers."),
    Planted(
        mixtures.losses_are_dropped_but_on_the_last_stage,
        job("pp=2,schedule=zb-v,microbatches=2", moe(DEEPSEEK, layers=3)), "gradient", "layers.",
    ),
    Planted(mixtures.a_recomputation_counts_the_load, job("dp=2,recompute=full"), "load", "layers.0.mlp.router"),
    Planted(
        mixtures.the_bias_moves_with_every_microbatch,
        job("dp=2,ep=2,microbatches=2", moe(DEEPSEEK)), "bias", "layers.1.mlp.router.balance",
    ),
    Planted(
        mixtures.the_optimizer_skips_experts_without_tokens,
        job("dp=2,ep=2", moe(MANY), batch=2), "parameter", "mlp.experts.",
    ),
    Planted(
        mixtures.copies_of_hybrid_sharding_are_not_summed, job("dp=2,zero=3,replicate=2"), "gradient", "mlp.experts."
    ),
    Planted(mixtures.tokens_are_weighted_before_the_experts, job("dp=2,ep=2", _SOFTMAX), "gradient", "layers."),
    Planted(mixtures.an_expert_is_chosen_twice, job("dp=2,ep=2"), "routing", "layers.0.mlp.router"),
    Planted(
        mixtures.an_expert_is_chosen_twice,
        job("dp=2,ep=2", dtype="bfloat16"), "routing", "layers.0.mlp.router", ", bfloat16",
    ),
]  # fmt: skip
RELATED = [
    Planted(mixtures.experts_are_reduced_over_the_dense_group, job("tp=2"), "gradient", "mlp.experts."),
    Planted(mixtures.the_norm_leaves_experts_out, job("dp=2"), "norm", ""),
    Planted(mixtures.gradients_are_multiplied_by_ep, job("dp=2,ep=2"), "gradient", "mlp.experts."),
    Planted(mixtures.the_norm_counts_copies_of_experts, job("dp=2"), "norm", ""),
    Planted(mixtures.the_balance_loss_leaves_masked_tokens_out, job("dp=2,ep=2"), "gradient", "layers."),
    Planted(mixtures.every_tp_rank_routes_all_tokens, job("tp=2,ep=2"), "routing", "layers.0.mlp.router"),
    Planted(mixtures.a_recomputation_counts_the_load, job("tp=2,ep=2,sp,recompute=full"), "load", "mlp.router"),
]


def found(judge: Judge, every: list[Planted]) -> dict[str, Verdict]:
    """Verdicts by the bugs' names; all of them were found and named."""
    verdicts = together(judge, {one.name: (one.one, one.bug) for one in every})
    for planted in every:
        verdict = verdicts[planted.name]
        assert not verdict.passed, planted.bug
        worst = verdict.worst(planted.what)
        assert worst is not None, planted.bug
        assert not worst.passed, (planted.bug, verdict.problems)
        assert planted.named in worst.name, (planted.bug, worst.name)
        assert any(planted.named in problem for problem in verdict.problems)
    return verdicts


def test_bugs_that_others_have_shipped_are_found_and_named(judge: Judge) -> None:
    verdicts = found(judge, PLANTED)
    # Only what a bug touches is named.
    failed = {
        e.name
        for e in verdicts["the_router_is_not_summed_over_tp"].comparisons
        if e.quantity == "gradient" and not e.passed
    }
    assert failed == {f"layers.{layer}.mlp.router.weight" for layer in range(2)}
    losses = verdicts["the_router_is_detached"].comparisons
    assert all(error.passed for error in losses if error.quantity == "loss")  # right, and the gradient is not
    for name, dtype in (("an_expert_is_chosen_twice", ""), ("an_expert_is_chosen_twice, bfloat16", "bfloat16")):
        [told] = [p for p in verdicts[name].problems if "routing" in p]
        assert "the routing of layers.0.mlp.router sends sample 0, position 0 to experts" in told
        assert "and one process to" in told
        assert "127 more tokens differ" in told
        assert (", and rounding explains " in told) == bool(dtype)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_routing_and_load_that_nobody_compared_fail(dtype: str) -> None:
    one = job("dp=1", moe(DEEPSEEK), dtype, steps=2)
    measured = RankMeasurement(memory={"peak": 0.0, "flops": 0.0})
    missing = {
        (e.quantity, e.name, e.step) for e in Verdict.of(one, [measured], [[]], [{}], 0.0).comparisons if not e.passed
    }
    wanted = {
        (what, "layers.1.mlp.router", step) for what in ("routing", "load") for step in (1, 2)
    }  # layer 0 is dense
    assert {key for key in missing if key[0] in ("routing", "load")} == wanted


@pytest.mark.slow
def test_their_relatives_are_found_too(judge: Judge) -> None:
    verdicts = found(judge, RELATED)
    [told] = [p for p in verdicts["every_tp_rank_routes_all_tokens"].problems if "routing" in p]
    assert "sample 0, position 0 routed by 2 ranks" in told


def test_a_rank_without_tokens_that_stays_away_is_a_hang_with_a_name(judge: Judge) -> None:
    """PROOFS has the same job with nobody away."""
    one = PROOFS["one token, and a rank without"]
    judge._reference(one)
    judge.timeout = 20.0
    judge.hook = "tests.verifier.mixtures:a_rank_without_tokens_stays_away"
    verdict = judge(one)
    assert not verdict.passed
    assert verdict.problems[0].startswith("rank 0 gave no answer within 20 s")
    assert verdict.problems[0].endswith("with it hang 1")
    assert "parallel/token_dispatch.py" in verdict.details  # where it waits for the one that is away


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_has_nothing_of_the_experts_that_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    from fivefold.model import dispatch, grouped, router
    from fivefold.model import moe as mixture

    judged = {f"fivefold.model.{name}" for name in ("moe", "router", "dispatch", "grouped", "load_balancing")}
    for module in (fivefold.verifier.reference, fivefold.verifier.plain_moe):
        tree = ast.parse(inspect.getsource(module))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported
        assert not imported & judged
        assert not [name for name in imported if name.startswith("fivefold.parallel")]

    def used(*_: Any) -> None:
        raise AssertionError("the reference computes with what it judges")

    for owner in (mixture.MoE, mixture.ExpertNetworks, router.Router):
        monkeypatch.setattr(owner, "forward", used)
    monkeypatch.setattr(grouped, "product", used)
    monkeypatch.setattr(dispatch.LocalDispatch, "run", used)
    reference = run_reference(job("dp=1", moe(DEEPSEEK), steps=2), torch.device("cpu"))
    assert set(reference.parameters) == {parameter.name for parameter in moe(DEEPSEEK).parameters()}
    [(name, bias)] = reference.steps[1].biases.items()
    assert name in moe(DEEPSEEK).buffers()
    load = [torch.bincount(step.routing[1].flatten(), minlength=8) for step in reference.steps]
    assert [int(one.sum()) for one in load] == [8 * 16 * 2] * 2
    moved = sum((0.05 * (one.double().mean() - one).sign() for one in load), torch.zeros(8))
    assert torch.equal(bias, moved)


def test_a_replayed_reference_goes_where_the_other_went() -> None:
    one = job("dp=1", dtype="bfloat16", steps=2)
    first = run_reference(one, torch.device("cpu"))
    nudged = run_reference(one, torch.device("cpu"), nudge_seed=1, replay=first)
    for a, b in zip(first.steps, nudged.steps, strict=True):
        assert all(torch.equal(a.routing[layer], b.routing[layer]) for layer in range(2))


BOTH = ("alltoall", "allgather")

# ---- which layouts there are -----------------------------------------------------------------------------------------


def test_ep_meets_zero_sp_and_the_kinds_of_cp_in_full() -> None:
    spec: ModelSpec = moe()
    every = list(legal_layouts(spec, 4, 16, 8, deepen=True))
    flat = [one for one in every if one.pp == 1]
    kinds = {(one.dp, one.cp, one.tp, one.ep, one.zero, one.replicate, one.sp, one.cp_kind) for one in flat}
    assert len(kinds) == 211
    assert {one.ep for one in flat} == {1, 2, 4}
    assert (1, 1, 4, 2, 3, 1, False, "ring") in kinds  # nobody shares the dense weights, and experts are shared
    assert {(one.ep, one.dispatch) for one in flat if one.ep > 1} == {(n, how) for n in (2, 4) for how in BOTH}
    assert {(one.recompute, one.dispatch) for one in flat} == {
        (r, how) for r in ("none", "selective", "full") for how in BOTH
    }
    piped = [one for one in every if one.pp > 1]  # what occurs without pp does not count for them
    assert {(one.ep, one.dispatch) for one in piped} == {(1, "alltoall"), *((2, how) for how in BOTH)}
    names = CATALOGUE.keys() - {"naive"}
    assert {(one.schedule, one.ep) for one in piped} == {(name, n) for name in names for n in (1, 2)}
    assert {(one.schedule, one.dispatch) for one in piped if one.ep > 1} == {
        (name, how) for name in names for how in BOTH
    }
    assert len(every) < 320
    assert not [one for one in every if one.problems(moe(layers=max(2, one.stages - 2)), world=4, seq=16, batch=8)]


def test_a_dense_model_is_proven_with_experts_too_and_a_sample_meets_pairs_of_both() -> None:
    base = msgspec.structs.replace(cases.job("dp=1"), model=cases.tiny())
    every = all_cases(base, 2)
    with_experts = [one for one in every if one.job.model.experts is not None]
    assert {one.variant for one in with_experts} == {"experts", LOSSES_OFF, *variants(mixture(cases.tiny()))}
    for one in with_experts:
        on = one.variant != LOSSES_OFF
        assert (one.job.train.balance_loss > 0, one.job.train.router_z_loss > 0) == (on, on)
    asked = all_cases(base, 2, fixed_keys=["train.balance_loss"])  # as it is: 0
    mixed = [one for one in asked if one.job.model.experts is not None]
    assert {(one.job.train.balance_loss, one.job.train.router_z_loss > 0) for one in mixed} == {(0, True), (0, False)}
    assert all(one.job.problems() == [] for one in with_experts)
    sample = pairwise(every, 40)
    assert {one.job.layout.ep for one in sample} == {1, 2}
    assert pair_coverage(pairwise(every), every) == 1.0
