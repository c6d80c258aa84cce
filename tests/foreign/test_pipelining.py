"""PyTorch's tensor parallelism, FSDP2 and pipeline schedules against one process, and bugs planted in them."""

from pathlib import Path

import pytest

from fivefold.foreign.verify import verify_adapter

PLANTED = str(Path(__file__).with_name("planted_pipelining.py"))


def told(layout: str) -> str:
    """All that is said of the causes in a layout, which has to differ."""
    [proof] = verify_adapter(PLANTED, [layout]).proofs
    assert not proof.broken
    assert not proof.passed
    return "\n".join(f"{cause.text}; {cause.likely}" for cause in proof.causes)


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


@pytest.mark.slow
def test_a_schedule_that_divides_by_its_microbatches_once_too_often():
    text = told("pp=2,schedule=GPipe,bug=scaled")
    assert text.startswith("all 90 gradients (")
    assert "exactly x 0.25 = 1/microbatches on every rank" in text
    assert "divided by their number once too often" in text
    assert "the ranks' own parts are right: what reduces or scales them is wrong" in text


@pytest.mark.slow
def test_a_factor_is_named_after_the_layouts_own_number():
    assert "exactly x 0.33333333 = 1/microbatches" in told("pp=2,schedule=GPipe,microbatches=3,bug=scaled")


@pytest.mark.slow
def test_norms_with_sequence_parallelism_whose_gradient_nobody_sums():
    text = told("tp=2,sp,bug=norms_alone")
    assert text.startswith("25 of 90 gradients (blocks.0.norm1.bias, blocks.0.norm1.weight, blocks.0.norm2.weight")
    assert "the parts of ranks [0, 1] add up to the truth, and nobody adds them: a missing SUM" in text
    assert "with sequence parallelism tp ranks see other tokens" in text


@pytest.mark.slow
def test_an_output_that_is_reduced_twice():
    text = told("tp=2,bug=reduced_twice")
    assert "forward: the output of blocks.0.attention.out is the first that differs" in text
    assert "what it is given is that of one process" in text


@pytest.mark.slow
def test_fsdp_without_its_mean():
    text = told("fsdp=2,bug=summed")
    assert text.startswith("all 90 gradients (")
    assert "exactly x 2 = fsdp on every rank that holds them" in text
    assert "a sum over data ranks where a mean was meant" in text
