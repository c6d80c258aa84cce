"""torchtitan's own Llama 3 in its own layouts against one process, and bugs planted in it. Needs torchtitan 0.3.0."""

from pathlib import Path

import pytest

from fivefold.foreign.verify import verify_adapter

pytestmark = pytest.mark.extras
for package in ("torchtitan", "spmd_types", "datasets", "triton"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install torchtitan==0.3.0 triton")

PLANTED = str(Path(__file__).with_name("planted_torchtitan.py"))
TIMEOUT = 900.0  # a rank imports torchtitan for seconds


def told(layout: str) -> str:
    [proof] = verify_adapter(PLANTED, [layout], timeout=TIMEOUT).proofs
    assert not proof.broken
    assert not proof.passed
    return "\n".join(f"{cause.text}; {cause.likely}" for cause in proof.causes)


def test_every_layout_of_the_adapter_is_one_process():
    certificate = verify_adapter("torchtitan", timeout=TIMEOUT)
    assert [proof.layout for proof in certificate.proofs if not proof.passed] == []
    assert len(certificate.proofs) >= 16
    assert certificate.versions["torchtitan"]


def test_fsdp_that_divides_by_its_ranks_though_the_loss_is_of_all_targets():
    text = told("fsdp=2,bug=averaged")
    assert "exactly x 0.5 = 1/fsdp on every rank that holds them" in text
    assert "divided by the number of data ranks once too often" in text


def test_a_schedule_that_divides_by_its_microbatches():
    assert "exactly x 0.25 = 1/microbatches on every rank that holds them" in told("pp=2,schedule=1F1B,bug=scaled")


def test_positions_that_begin_anew_on_every_rank_of_context_parallelism():
    assert "forward: the output of layers.0.attention" in told("cp=2,bug=local_positions")
