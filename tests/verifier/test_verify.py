"""Layouts on real ranks against one process; and what breaks is found and named."""

from collections.abc import Iterator

import pytest

from fivefold.cost.collective_time import times
from fivefold.cost.traffic import expected_traffic
from fivefold.layout.rank_part import RankCoords
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.spec.blocks import LatentSpec
from fivefold.spec.presets import preset
from fivefold.verifier.verdict import Verdict
from fivefold.verifier.verify import Judge, verify
from tests.verifier import cases
from tests.verifier.cases import Proven, job, measured, slow, tiny


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(timeout=60) as one:
        yield one


GPT = preset("tiny-gpt", layers=2, hidden=32, ffn=24, vocab=37, context=16)
QWEN = preset("tiny-qwen3", layers=2, hidden=32, head_dim=16, ffn=24, vocab=37)

OLMOE = tiny(qk_norm=True, qk_norm_over="all")
QWEN2 = preset("tiny-qwen2", layers=2, hidden=32, kv_heads=1, ffn=24, vocab=37)

MLA = preset("tiny-mla", layers=2, hidden=32, ffn=24, vocab=37)
NO_Q = tiny(kv_heads=0, mla=LatentSpec(kv_rank=10, nope_dim=6, rope_dim=4, v_dim=7))
OSS = preset("tiny-oss", layers=2, hidden=32, ffn=24, vocab=37, window=5)

# Every pair of settings meets in `make prove`, which proves a sample of all layouts of four ranks.
PROOFS = {
    # Counted traffic equals the closed form for every ZeRO stage ...
    **{f"zero {zero}, 4 microbatches": job(f"dp=2,zero={zero},microbatches=4") for zero in (0, 3)},
    # ... for tp with sp and recompute, and for the kinds of cp.
    "tp=2,sp, selective": job("tp=2,sp,recompute=selective"),
    **{f"{kind}, full": job(f"cp=2,cp_kind={kind},recompute=full") for kind in ("ring", "ulysses")},
    "hybrid sharding": job("dp=4,zero=3,replicate=2,microbatches=2"),
    "two kv heads, four ranks, label smoothing": job("tp=4,sp", loss=CrossEntropy(label_smoothing=0.1, z_loss=1e-3)),
    "GPT with dropout": job("tp=2,cp=2,sp,zero=2", GPT),
    "q/k norm, tied": job("tp=2", QWEN),
    "latent attention": job("tp=2,cp=2,sp,recompute=selective", MLA),
    "queries without latents, put-off gradients": job("tp=2,pp=2,sp,schedule=zb-h1,microbatches=2", NO_Q),
    "sinks and windows, ring": job("cp=2,cp_kind=ring,tp=2,recompute=selective", OSS),
    "bfloat16": job("dp=2,tp=2,sp,zero=1", dtype="bfloat16"),
}
# What these vary, those above have as well, in other company.
SLOW = {
    **{f"zero {zero}, 1 microbatches": job(f"dp=2,zero={zero}") for zero in (0, 3)},
    **{f"zero {zero}, 4 microbatches": job(f"dp=2,zero={zero},microbatches=4") for zero in (1, 2)},
    "allgather, full": job("cp=2,cp_kind=allgather,recompute=full"),
    "q/k norm over all heads": job("dp=2,tp=2,sp,zero=3,recompute=full", OLMOE),
    "sinks and windows, allgather": job("cp=2,cp_kind=allgather,zero=3", OSS),
    "float32": job("cp=2", dtype="float32"),
    **{f"tp=2{sp}, {recompute}": job(f"tp=2{sp},recompute={recompute}") for sp, recompute in
       [("", "none"), ("", "selective"), (",sp", "full")]},
    "ring, none": job("cp=2,cp_kind=ring"),
    "sinks and windows, ulysses": job("cp=2,cp_kind=ulysses", OSS),
    "q/k norm over all heads, several ranks a kv head": job("tp=4,recompute=selective", OLMOE),
    "biases on q, k and v, one kv head": job("dp=2,tp=2,sp,zero=3,microbatches=2", QWEN2),
}  # fmt: skip
CANCELLED = {
    f"{name}, {dtype}, {layout}": job(layout, spec, dtype, seed=seed, steps=3)
    for name, (spec, seed) in cases.CANCELLING.items()
    for dtype, layout in [("float32", "tp=2,sp"), ("bfloat16", "tp=2,sp"), ("bfloat16", "dp=1")]
}
CANCELS = ["heads of two, bfloat16, tp=2,sp"]

# Bugs, each with a layout, and the end of the name of a gradient that is wrong.
BUGS = {
    cases.mean_of_means: ("dp=2", tiny(), "embedding.weight"),
    cases.norms_are_not_summed_over_tp: ("tp=2,sp", tiny(), "norm.weight"),
    cases.gradients_are_divided_by_cp: ("cp=2", tiny(), "layers.0.attention.q.weight"),
    cases.the_ring_sees_one_key_too_late: ("cp=2", tiny(), "attention.q.weight"),
    cases.a_gradient_stays_away: ("dp=2", tiny(), "norm.weight"),
    cases.latents_are_not_summed_over_tp: ("tp=2", MLA, "attention.kv_down.weight"),
    cases.every_step_of_the_ring_has_the_sinks: ("cp=2", OSS, "attention.sinks"),
}
EXACT = {bug.__name__: (job(layout, spec), bug) for bug, (layout, spec, _) in BUGS.items()}
NAMED = {bug.__name__: named for bug, (*_, named) in BUGS.items()}
OF_TWO = cases.CANCELLING["heads of two"][0]
COARSE = {
    "mean_of_means, heads of two, bfloat16": (job("dp=2", OF_TWO, "bfloat16"), cases.mean_of_means),
    **{f"{bug.__name__}, bfloat16": (job(BUGS[bug][0], dtype="bfloat16"), bug) for bug in
       (cases.norms_are_not_summed_over_tp, cases.the_ring_sees_one_key_too_late)},
}  # fmt: skip
MORE_COARSE = {
    "mean_of_means, heads of two, float32": (job("dp=2", OF_TWO, "float32"), cases.mean_of_means),
    **{f"{bug.__name__}, bfloat16": (job(BUGS[bug][0], dtype="bfloat16"), bug) for bug in
       (cases.mean_of_means, cases.gradients_are_divided_by_cp, cases.a_gradient_stays_away)},
}  # fmt: skip
CHATTY = {"one_collective_too_many": (job("tp=2"), cases.one_collective_too_many)}


@pytest.fixture(scope="module")
def proven(judge: Judge, request: pytest.FixtureRequest) -> Proven:
    return Proven(judge, {**PROOFS, **SLOW, **CANCELLED, **EXACT, **COARSE, **MORE_COARSE, **CHATTY}, request)


@pytest.mark.parametrize("name", [*PROOFS, *slow(SLOW)])
def test_a_layout_computes_what_one_process_computes_and_sends_what_the_closed_form_says(
    proven: Proven, name: str
) -> None:
    verdict = proven[name]
    assert verdict.problems == []
    assert verdict.passed
    model, dtype = verdict.job.model, verdict.job.train.dtype
    assert {error.name for error in verdict.comparisons} >= {parameter.name for parameter in model.parameters()}
    assert sum(count.counted.calls for count in verdict.traffic) > 0
    if dtype == "float64":
        assert all(error.error < 1e-13 for error in verdict.comparisons)  # far below what is asked


@pytest.mark.parametrize("name", [*CANCELS, *slow(name for name in CANCELLED if name not in CANCELS)])
def test_gradients_that_are_small_by_cancellation_are_no_failure(proven: Proven, name: str) -> None:
    assert proven[name].problems == []


@pytest.mark.parametrize("layout", [
    "dp=2,zero=1,microbatches=2",
    "tp=2,cp=2,sp,zero=2,microbatches=2",
    "dp=2,pp=2,zero=3,microbatches=2,schedule=zb-h1",
    *slow(["dp=2", "dp=2,pp=2,zero=2,microbatches=2,schedule=zb-v"]),
])  # fmt: skip
def test_many_buckets_are_as_right_as_one(judge: Judge, layout: str) -> None:
    """A bucket for each unit of the decoder; models of this size fill only one."""
    one = job(layout)
    found = measured(judge, {layout: (one, cases.small_buckets)})[layout]
    places = [RankCoords.of(one.layout, rank) for rank in range(one.layout.world)]
    steps = [
        expected_traffic(one.model, one.layout, 16, 8, "float64", coords=place, min_bucket_elements=1)
        for place in places
    ]
    forms = [[times(row, one.train.steps) for row in rows] for rows in steps]
    verdict = Verdict.of(one, found, forms, [{} for _ in forms], 0.0)
    assert verdict.problems == []
    if one.layout.zero and one.layout.pp == 1:
        gathers = [count.counted for count in verdict.traffic if count.counted.kind == "all-gather"]
        assert gathers[0].calls >= (one.model.layers + 2) * one.train.steps


@pytest.mark.parametrize("name", EXACT)
def test_a_deliberate_bug_fails_and_the_parameter_is_named(proven: Proven, name: str) -> None:
    verdict = proven[name]
    assert not verdict.passed
    failed = [error for error in verdict.comparisons if error.quantity == "gradient" and not error.passed]
    assert any(error.name.endswith(NAMED[name]) for error in failed)
    worst = verdict.worst("gradient")
    assert worst in failed
    assert any(worst.name in problem for problem in verdict.problems)
    if name == "norms_are_not_summed_over_tp":  # only what a bug touches is named
        norms = {parameter.name for parameter in tiny().parameters() if parameter.kind == "norm"}
        assert {error.name for error in failed if error.step == 1} == norms


@pytest.mark.parametrize("name", [*COARSE, *slow(MORE_COARSE)])
def test_a_deliberate_bug_fails_in_coarse_dtypes_too(proven: Proven, name: str) -> None:
    assert any(error.quantity == "gradient" and not error.passed for error in proven[name].comparisons)


@pytest.mark.parametrize("name", CHATTY)
def test_a_collective_that_the_closed_form_does_not_have_fails(proven: Proven, name: str) -> None:
    verdict = proven[name]
    assert all(error.passed for error in verdict.comparisons)
    assert not verdict.passed
    [problem] = verdict.problems
    assert problem.startswith("rank 0 made 28 all-reduce calls over tp")
    assert "closed form has 26" in problem


@pytest.mark.parametrize(("bug", "sentence"), [
    (cases.rank_1_dies, "rank 1 was ended by SIGKILL"),
    (cases.rank_1_raises, "rank 1 failed with ValueError: a number that is none"),
    pytest.param(cases.rank_1_sleeps, "rank 1 gave no answer within 15 s; it is in", marks=pytest.mark.waits),
])  # fmt: skip
def test_a_rank_that_is_lost_is_named_and_does_not_hang_the_command(bug: object, sentence: str) -> None:
    with Judge(timeout=60) as judge:
        judge._reference(job("dp=2"))
        judge.hook = f"{cases.__name__}:{bug.__name__}"  # type: ignore[attr-defined]
        judge.timeout = 15.0 if bug is cases.rank_1_sleeps else 60.0
        verdict = judge(job("dp=2"))
    assert not verdict.passed
    [problem] = verdict.problems
    assert problem.startswith(sentence)


def test_a_gradient_that_is_nothing_in_a_later_step_only_is_no_failure() -> None:
    """In the second step, of one row, no token with a target sees another: k has no gradient in some layers."""
    [(_, verdict)] = verify("tp=2", seq=12, batch=1, steps=2).verdicts
    assert verdict.problems == []
