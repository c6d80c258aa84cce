"""PyTorch's tensor parallelism, FSDP2 and pipeline schedules against one process, and bugs planted in them."""

from pathlib import Path

import pytest

from fivefold.foreign.certificate import Certificate
from fivefold.foreign.verify import verify_adapter
from tests.foreign.planted import BUGS, Bug, told

TORCHS = [bug for bug in BUGS if bug.framework == "pipelining"]
PLANTED = str(Path(__file__).with_name("planted_pipelining.py"))


@pytest.mark.slow
def test_tensor_parallel_norms_and_a_schedule_with_a_tie_on_one_rank_are_one_process():
    certificate = verify_adapter("pipelining", ["tp=2,sp", "pp=2,schedule=ZBVZeroBubble,microbatches=3"])
    assert [proof.passed for proof in certificate.proofs] == [True, True]
    quantities = {deviation.quantity for proof in certificate.proofs for deviation in proof.deviations}
    assert quantities == {"loss", "gradient", "norm", "parameter"}


@pytest.mark.slow
def test_every_layout_of_the_adapter_is_one_process():
    certificate = verify_adapter("pipelining")
    assert [proof.layout for proof in certificate.proofs if not proof.passed] == []
    assert len(certificate.proofs) >= 20


@pytest.fixture(scope="module")
def planted() -> Certificate:
    return verify_adapter(PLANTED, [bug.layout for bug in TORCHS])


@pytest.mark.slow
@pytest.mark.parametrize("bug", TORCHS, ids=lambda bug: bug.layout)
def test_a_planted_bug_is_found_and_named(planted: Certificate, bug: Bug) -> None:
    said = told(planted.proofs[TORCHS.index(bug)])
    for words in bug.words:
        assert words in said


@pytest.mark.slow
def test_a_factor_is_named_after_the_layouts_own_number():
    [proof] = verify_adapter(PLANTED, ["pp=2,schedule=GPipe,microbatches=3,bug=scaled"]).proofs
    assert "exactly x 0.33333333 = 1/microbatches" in told(proof)
