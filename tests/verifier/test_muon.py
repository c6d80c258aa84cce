"""Whole matrices over ranks against one process: Muon, in every kind of layout that cuts a matrix."""

from collections.abc import Iterator

import pytest
from msgspec import structs

from fivefold.optim.muon import Muon
from fivefold.spec.presets import preset
from fivefold.verifier.compare import OPTIMIZER
from fivefold.verifier.verify import Judge
from tests.verifier.cases import Proven, job, slow, tiny
from tests.verifier.mixtures import DEEPSEEK, moe


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(timeout=120) as one:
        yield one


TIED = tiny(tied=True, layers=3, kv_heads=1)  # stages of unlike length, and ranks that share a kv head
GPT = preset("tiny-gpt", layers=2, hidden=32, ffn=24, vocab=37, context=16)

PROOFS = {
    "whole on every rank": job("dp=4"),
    "ZeRO 1, tied ends": job("dp=2,pp=2,zero=1,microbatches=2", TIED),
    "experts, ZeRO 3": job("dp=2,tp=2,ep=2,zero=3", moe(DEEPSEEK, layers=2)),
}
SLOW = {
    "one kv head for four ranks": job("tp=4,sp", TIED),
    "tp, ZeRO 1, tied ends": job("dp=2,tp=2,pp=2,zero=1,microbatches=2", TIED),  # eight ranks
    "HSDP": job("dp=4,zero=3,replicate=2"),
    "biases, cp, ZeRO 2": job("cp=2,dp=2,zero=2,microbatches=2", GPT),
    "a zero bubble": job("pp=2,tp=2,schedule=zb-v,microbatches=2", TIED),
    "rows that do not divide": job("dp=3,zero=2", batch=6),
    "ep over tp": job("dp=2,tp=2,ep=4", moe(DEEPSEEK, layers=2)),
    "experts whole": job("dp=4,ep=2", moe(layers=2)),
    "float32": job("dp=2,tp=2,zero=1", dtype="float32"),
    "bfloat16": job("dp=2,tp=2,zero=1", dtype="bfloat16"),
}
CASES = {name: structs.replace(one, optimizer=Muon(**OPTIMIZER)) for name, one in (PROOFS | SLOW).items()}


@pytest.fixture(scope="module")
def proven(judge: Judge, request: pytest.FixtureRequest) -> Proven:
    return Proven(judge, CASES, request)


@pytest.mark.parametrize("name", [*PROOFS, *slow(SLOW)])
def test_every_layout_updates_matrices_as_one_process_does(proven: Proven, name: str) -> None:
    proof, verdict = CASES[name], proven[name]
    assert verdict.problems == []
    assert verdict.passed
    if proof.train.dtype == "float64":
        assert all(comparison.error < 1e-12 for comparison in verdict.comparisons)
    kind = "all-gather" if name == "whole on every rank" else "all-to-all"
    assert sum(count.counted.calls for count in verdict.traffic if count.counted.kind == kind) > 0
