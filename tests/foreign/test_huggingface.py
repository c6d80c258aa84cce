"""Hugging Face with DDP, FSDP2 and HSDP in the layouts of its adapter, and bugs planted in what it runs on."""

from pathlib import Path

import pytest

from fivefold.foreign.certificate import Certificate
from fivefold.foreign.verify import verify_adapter
from tests.foreign.planted import BUGS, Bug, told

pytestmark = pytest.mark.extras
pytest.importorskip("transformers", reason="transformers is not installed")

THEIRS = [bug for bug in BUGS if bug.framework == "huggingface"]
PLANTED = str(Path(__file__).with_name("planted_huggingface.py"))


@pytest.mark.parametrize("seed", [1234, 1, 2])
def test_every_layout_of_the_adapter_is_one_process(seed: int) -> None:
    certificate = verify_adapter("huggingface", seed=seed)
    assert certificate.ok, certificate
    assert certificate.worst < 1e-12
    assert len(certificate.proofs) == 5
    for proof in certificate.proofs:
        assert {deviation.quantity for deviation in proof.deviations} == {"loss", "gradient", "norm", "parameter"}
    assert certificate.versions["transformers"]


def test_samples_of_unequal_length_with_a_mask_are_one_process() -> None:
    certificate = verify_adapter("huggingface:padded")
    assert certificate.ok, certificate


@pytest.fixture(scope="module")
def planted() -> Certificate:
    return verify_adapter(PLANTED, [bug.layout for bug in THEIRS])


@pytest.mark.parametrize("bug", THEIRS, ids=lambda bug: bug.layout)
def test_a_planted_bug_is_found_and_named(planted: Certificate, bug: Bug) -> None:
    said = told(planted.proofs[THEIRS.index(bug)])
    for words in bug.words:
        assert words in said


def test_a_mask_of_padding_that_is_lost_is_found_in_the_first_attention() -> None:
    [proof] = verify_adapter(f"{PLANTED}:padded", ["dp=2,bug=ignored_padding"]).proofs
    assert "forward: the output of model.layers.0.self_attn" in told(proof)
