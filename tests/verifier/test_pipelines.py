"""Pipelines among the other axes, on 4 and 8 ranks, against one process: results to 1e-10, traffic to the byte."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fivefold.verifier.compare import ValueComparison
from fivefold.verifier.verdict import RankMeasurement, Verdict
from fivefold.verifier.verify import Judge, expected_memory, expected_traffic
from tests.verifier import cases
from tests.verifier.cases import Proven, job, slow, tiny, together


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(timeout=120) as one:
        yield one


PROOFS = {
    "cp=2, pp=2, biases on q, k and v": job(
        "cp=2,pp=2,zero=1,microbatches=4,schedule=zb-h1,recompute=full", tiny(qkv_bias=True, kv_heads=1)
    ),
    "interleaved, tied, uneven": job(
        "tp=2,pp=2,schedule=interleaved,microbatches=2,split=0,3,1,0", tiny(layers=4, tied=True)
    ),
    "halves and wholes, zero 2": job("dp=2,pp=2,zero=2,microbatches=4,schedule=dualpipe-v,recompute=selective"),
    "bfloat16": job("dp=2,pp=2,zero=1,microbatches=2,schedule=zb-h1", dtype="bfloat16"),
}
# What these vary, those above have as well, but not three axes at a time, or on eight ranks.
SLOW = {
    "float32": job("tp=2,pp=2,sp,microbatches=2,schedule=v-min", dtype="float32"),
    **{f"dp=2, tp=2, pp=2, zero={zero}": job(f"dp=2,tp=2,pp=2,sp,zero={zero},microbatches=2") for zero in range(4)},
    "cp=2, tp=2, pp=2, biases on q, k and v": job(
        "cp=2,tp=2,pp=2,zero=1,microbatches=4,schedule=zb-h1,recompute=full", tiny(qkv_bias=True, kv_heads=1)
    ),
    "zb-v": job("tp=2,pp=2,schedule=zb-v,microbatches=4", tiny(layers=4)),
    "tied over four ranks, zero 3": job(
        "dp=2,pp=4,zero=3,microbatches=4,schedule=zb-h2,split=1,0,1,0", tiny(tied=True)
    ),
    "halves and wholes, hybrid": job("dp=4,pp=2,zero=3,replicate=2,microbatches=4,schedule=dualpipe-v", batch=16),
}
TIED = tiny(tied=True)
BUGS = {  # and what is named
    cases.the_ends_of_a_tied_embedding_are_not_summed: (job("pp=2,microbatches=2", TIED), "embedding.weight"),
    cases.a_weight_gradient_is_forgotten: (job("pp=2,microbatches=2,schedule=zb-h1", TIED), ".weight"),
    cases.microbatches_arrive_in_the_wrong_order: (job("pp=2,microbatches=2", TIED), "layers."),
}


@pytest.fixture(scope="module")
def proven(judge: Judge, request: pytest.FixtureRequest) -> Proven:
    return Proven(judge, PROOFS | SLOW, request)


@pytest.mark.parametrize("name", [*PROOFS, *slow(SLOW)])
def test_a_pipeline_computes_what_one_process_computes_and_sends_what_the_closed_form_says(
    proven: Proven, name: str
) -> None:
    verdict = proven[name]
    assert verdict.job.problems() == []
    assert verdict.problems == []
    assert verdict.passed
    sends = [count for count in verdict.traffic if (count.counted.axis, count.counted.kind) == ("pp", "send")]
    assert sum(count.counted.calls for count in sends) > 0
    if verdict.job.train.dtype == "float64":
        assert all(error.error < 1e-13 for error in verdict.comparisons)


def test_a_deliberate_bug_fails_and_the_parameter_is_named(judge: Judge) -> None:
    verdicts = together(judge, {bug.__name__: (one, bug) for bug, (one, _) in BUGS.items()})
    for bug, (_, named) in BUGS.items():
        worst = verdicts[bug.__name__].worst("gradient")
        assert worst is not None, bug
        assert not worst.passed, bug
        assert named in worst.name, bug


def test_a_parameter_that_no_rank_holds_fails_and_so_do_copies_that_differ(judge: Judge) -> None:
    one = job("pp=2", tiny(layers=1), steps=1)
    names = [parameter.name for parameter in one.model.parameters()]

    def measured(held: list[str], digest: str) -> RankMeasurement:
        comparisons = [
            ValueComparison(what, name, 1, 0.0, 1e-10) for what in ("gradient", "parameter") for name in held
        ]
        return RankMeasurement(
            comparisons=comparisons, digests=dict.fromkeys(held, digest), memory={"gradients": 8, "peak": 9, "flops": 1}
        )

    forms, holding = [[] for _ in expected_traffic(one)], [{"gradients": 8.0} for _ in expected_memory(one)]
    whole = [measured(names[:3], "a"), measured(names[3:], "b")]
    assert Verdict.of(one, whole, forms, holding, 0.0).passed
    less = [whole[0], measured(names[3:-1], "b")]
    verdict = Verdict.of(one, less, forms, holding, 0.0)
    assert verdict.problems[:2] == [
        f"the gradient of {names[-1]} is held by no rank (step 1)",
        f"the parameter {names[-1]} is held by no rank (step 1)",
    ]
    torn = [whole[0], replace(whole[1], digests={names[0]: "c", **whole[1].digests})]
    assert Verdict.of(one, torn, forms, holding, 0.0).problems == [
        f"ranks 0 and 1 hold {names[0]}, and not the same bits of it"
    ]
    holding[1] = {"gradients": 16.0}
    assert Verdict.of(one, whole, forms, holding, 0.0).problems == [
        "rank 1 holds 8 bytes of gradients, and the closed form has 16"
    ]
