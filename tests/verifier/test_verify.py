"""Layouts on real ranks against one process; and what breaks is found and named."""

from collections.abc import Iterator

import pytest

from fivefold.cost.collective_time import times
from fivefold.cost.traffic import expected_traffic
from fivefold.launch import processes
from fivefold.layout.rank_part import RankCoords
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.spec.blocks import LatentSpec
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.verifier.verdict import Verdict
from fivefold.verifier.verify import Judge, verify
from tests.verifier import cases
from tests.verifier.cases import Proven, job, tiny

BUGS = "tests.verifier.cases:"


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
    # Counted traffic equals the closed form for every ZeRO stage, with one and with several microbatches ...
    **{f"zero {zero}, {m} microbatches": job(f"dp=2,zero={zero},microbatches={m}") for zero, m in
       [(0, 1), (0, 4), (1, 4), (2, 4), (3, 1), (3, 4)]},
    # ... for tp with and without sp and recompute ...
    **{f"tp=2{sp}, {recompute}": job(f"tp=2{sp},recompute={recompute}") for sp, recompute in
       [("", "none"), ("", "selective"), (",sp", "selective"), (",sp", "full")]},
    # ... and for the three kinds of cp.
    **{f"{kind}, {recompute}": job(f"cp=2,cp_kind={kind},recompute={recompute}") for kind, recompute in
       [("ring", "none"), ("ring", "full"), ("allgather", "full"), ("ulysses", "full")]},
    "hybrid sharding": job("dp=4,zero=3,replicate=2,microbatches=2"),
    "two kv heads, four ranks, label smoothing": job("tp=4,sp", loss=CrossEntropy(label_smoothing=0.1, z_loss=1e-3)),
    "GPT with dropout": job("tp=2,cp=2,sp,zero=2", GPT),
    "q/k norm, tied": job("tp=2", QWEN),
    "q/k norm over all heads": job("dp=2,tp=2,sp,zero=3,recompute=full", OLMOE),
    "q/k norm over all heads, several ranks a kv head": job("tp=4,recompute=selective", OLMOE),
    "biases on q, k and v, one kv head": job("dp=2,tp=2,sp,zero=3,microbatches=2", QWEN2),
    "latent attention": job("tp=2,cp=2,sp,recompute=selective", MLA),
    "queries without latents, put-off gradients": job("tp=2,pp=2,sp,schedule=zb-h1,microbatches=2", NO_Q),
    **{f"sinks and windows, {kind}": job(f"cp=2,cp_kind={kind}{rest}", OSS) for kind, rest in
       [("ring", ",tp=2,recompute=selective"), ("allgather", ",zero=3"), ("ulysses", "")]},
    "float32": job("cp=2", dtype="float32"),
    "bfloat16": job("dp=2,tp=2,sp,zero=1", dtype="bfloat16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def proven(judge: Judge, request: pytest.FixtureRequest) -> Proven:
    return Proven(judge, PROOFS | CANCELLED, request)


@pytest.mark.parametrize("name", PROOFS)
def test_a_layout_computes_what_one_process_computes_and_sends_what_the_closed_form_says(
    proven: Proven, name: str
) -> None:
    proof, verdict = PROOFS[name], proven[name]
    assert verdict.problems == []
    assert verdict.passed
    assert {error.name for error in verdict.comparisons} >= {parameter.name for parameter in proof.model.parameters()}
    assert sum(count.counted.calls for count in verdict.traffic) > 0
    if proof.train.dtype == "float64":
        assert all(error.error < 1e-13 for error in verdict.comparisons)  # far below what is asked


CANCELLED = {
    f"{name}, {dtype}, {layout}": job(layout, spec, dtype, seed=seed, steps=3)
    for name, (spec, seed) in cases.CANCELLING.items()
    for dtype, layout in [("float32", "tp=2,sp"), ("bfloat16", "tp=2,sp"), ("bfloat16", "dp=1")]
}


def is_slow(name: str) -> bool:
    """LayerNorm and q/k norm cancel in the others, too."""
    return "float32" in name or name.startswith(("four channels", "heads of one"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if is_slow(name) else name for name in CANCELLED]
)
def test_gradients_that_are_small_by_cancellation_are_no_failure(proven: Proven, name: str) -> None:
    assert proven[name].problems == []


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2,zero=1,microbatches=2",
        "tp=2,cp=2,sp,zero=2,microbatches=2",
        "dp=2,pp=2,zero=2,microbatches=2,schedule=zb-v",
        "dp=2,pp=2,zero=3,microbatches=2,schedule=zb-h1",
    ],
)
def test_many_buckets_are_as_right_as_one(judge: Judge, layout: str) -> None:
    """A bucket for each unit of the decoder; models of this size fill only one."""
    one = job(layout)
    found = processes.run(
        one.layout.world, "fivefold.verifier.rank:measure", one, judge._reference(one)[0],
        BUGS + cases.small_buckets.__name__, timeout=60,
    )  # fmt: skip
    all_coords = [RankCoords.of(one.layout, rank) for rank in range(one.layout.world)]
    steps = [
        expected_traffic(one.model, one.layout, 16, 8, "float64", coords=coords, min_bucket_elements=1)
        for coords in all_coords
    ]
    forms = [[times(row, one.train.steps) for row in rows] for rows in steps]
    verdict = Verdict.of(one, found, forms, [{} for _ in forms], 0.0)
    assert verdict.problems == []
    if one.layout.zero and one.layout.pp == 1:
        gathers = [count.counted for count in verdict.traffic if count.counted.kind == "all-gather"]
        assert gathers[0].calls >= (one.model.layers + 2) * one.train.steps


@pytest.mark.parametrize(
    ("bug", "layout", "named"),
    [
        (cases.mean_of_means, "dp=2", "embedding.weight"),
        (cases.norms_are_not_summed_over_tp, "tp=2,sp", "norm.weight"),
        (cases.gradients_are_divided_by_cp, "cp=2", "layers.0.attention.q.weight"),
        (cases.the_ring_sees_one_key_too_late, "cp=2", "attention.q.weight"),
        (cases.a_gradient_stays_away, "dp=2", "norm.weight"),
    ],
)
def test_a_deliberate_bug_fails_and_the_parameter_is_named(judge: Judge, bug: object, layout: str, named: str) -> None:
    judge.hook = BUGS + bug.__name__
    verdict = judge(job(layout))
    judge.hook = ""
    assert not verdict.passed
    failed = [error for error in verdict.comparisons if error.quantity == "gradient" and not error.passed]
    assert any(error.name.endswith(named) for error in failed)
    worst = verdict.worst("gradient")
    assert worst in failed
    assert any(worst.name in problem for problem in verdict.problems)


@pytest.mark.parametrize(
    ("bug", "layout", "model", "named"),
    [
        (cases.latents_are_not_summed_over_tp, "tp=2", MLA, "attention.kv_down.weight"),
        (cases.every_step_of_the_ring_has_the_sinks, "cp=2", OSS, "attention.sinks"),
    ],
)
def test_a_bug_of_an_attention_fails(judge: Judge, bug: object, layout: str, model: ModelSpec, named: str) -> None:
    judge.hook = BUGS + bug.__name__
    verdict = judge(job(layout, model))
    judge.hook = ""
    assert any(
        error.name.endswith(named) for error in verdict.comparisons if error.quantity == "gradient" and not error.passed
    )


CANCELLING = cases.CANCELLING["heads of two"][0]


@pytest.mark.parametrize(
    ("bug", "layout", "spec", "dtype"),
    [
        (cases.mean_of_means, "dp=2", None, "bfloat16"),
        (cases.norms_are_not_summed_over_tp, "tp=2,sp", None, "bfloat16"),
        (cases.gradients_are_divided_by_cp, "cp=2", None, "bfloat16"),
        (cases.the_ring_sees_one_key_too_late, "cp=2", None, "bfloat16"),
        (cases.a_gradient_stays_away, "dp=2", None, "bfloat16"),
        pytest.param(cases.mean_of_means, "dp=2", CANCELLING, "float32", marks=pytest.mark.slow),
        (cases.mean_of_means, "dp=2", CANCELLING, "bfloat16"),
    ],
)
def test_a_deliberate_bug_fails_in_coarse_dtypes_too(
    judge: Judge, bug: object, layout: str, spec: ModelSpec | None, dtype: str
) -> None:
    judge.hook = BUGS + bug.__name__
    verdict = judge(job(layout, spec, dtype))
    judge.hook = ""
    assert any(error.quantity == "gradient" and not error.passed for error in verdict.comparisons)


def test_only_what_a_bug_touches_is_named(judge: Judge) -> None:
    judge.hook = BUGS + cases.norms_are_not_summed_over_tp.__name__
    verdict = judge(job("tp=2,sp"))
    judge.hook = ""
    failed = {
        error.name
        for error in verdict.comparisons
        if error.quantity == "gradient" and not error.passed and error.step == 1
    }
    assert failed == {p.name for p in tiny().parameters() if p.kind == "norm"}


def test_a_collective_that_the_closed_form_does_not_have_fails(judge: Judge) -> None:
    judge.hook = BUGS + cases.one_collective_too_many.__name__
    verdict = judge(job("tp=2"))
    judge.hook = ""
    assert all(error.passed for error in verdict.comparisons)
    assert not verdict.passed
    [problem] = verdict.problems
    assert problem.startswith("rank 0 made 28 all-reduce calls over tp")
    assert "closed form has 26" in problem


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        (cases.rank_1_dies, "rank 1 was ended by SIGKILL"),
        (cases.rank_1_raises, "rank 1 failed with ValueError: a number that is none"),
        pytest.param(cases.rank_1_sleeps, "rank 1 gave no answer within 15 s; it is in", marks=pytest.mark.waits),
    ],
)
def test_a_rank_that_is_lost_is_named_and_does_not_hang_the_command(bug: object, sentence: str) -> None:
    with Judge(timeout=60) as judge:
        judge._reference(job("dp=2"))
        judge.hook = BUGS + bug.__name__
        judge.timeout = 15.0 if bug is cases.rank_1_sleeps else 60.0
        verdict = judge(job("dp=2"))
    assert not verdict.passed
    [problem] = verdict.problems
    assert problem.startswith(sentence)


def test_a_gradient_that_is_nothing_in_a_later_step_only_is_no_failure() -> None:
    """In the second step, of one row, no token with a target sees another: k has no gradient in some layers."""
    [(_, verdict)] = verify("tp=2", seq=12, batch=1, steps=2).verdicts
    assert verdict.problems == []
