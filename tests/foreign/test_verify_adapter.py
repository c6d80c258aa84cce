"""Training code in plain PyTorch with bugs planted: each is found and named, and nothing where there is none."""

import json
from pathlib import Path

import pytest

from fivefold.foreign.certificate import Certificate, LayoutProof
from fivefold.foreign.verify import check_certificate, verify_adapter
from tests.refusals import refusal

PLAIN = str(Path(__file__).with_name("plain.py"))
# {bug: words of its cause}
FOUND = {
    "dp=2,bug=no_sync": "all 7 gradients|the mean of ranks [0, 1] is the truth|a missing MEAN",
    "dp=2,bug=mean_of_means": "x [0.80952 x4, 1.3077 x4]: a mean of 2 means|own number of targets|own parts are wrong",
    "dp=2,bug=untaught": "gradients are right, and parameters are not updated: embedding.weight",
    "dp=2,bug=local_loss": "each rank's share: their sum is that of one process",
    "fsdp=2,bug=local_norm": "it is the norm of what rank 0 holds",
}
SLOW = {
    "dp=2,bug=sum": "all 7 gradients|exactly x 2 = dp",
    "dp=2,bug=one_parameter": "1 of 7 gradients (norm.bias)|a missing MEAN|own parts are right",
    "dp=2,bug=lost_rank": "x [1 x4, 0 x4]|samples 4 to 7 are left out",
    "dp=2,bug=normalized_late": "1 of 7 gradients (norm.weight): exactly x 1.5",
}


def told(proof: LayoutProof) -> str:
    return "\n".join(f"{cause.text} {cause.likely}" for cause in proof.causes)


@pytest.fixture(scope="module")
def verified() -> Certificate:
    return verify_adapter(PLAIN, ["dp=2", "fsdp=2", *FOUND])


def test_layouts_without_a_bug_hold(verified: Certificate) -> None:
    right = verified.proofs[:2]
    assert all(proof.passed for proof in right)
    assert max(deviation.error for proof in right for deviation in proof.deviations) < 1e-12
    assert {deviation.quantity for deviation in right[0].deviations} == {"loss", "gradient", "norm", "parameter"}


@pytest.mark.parametrize("layout", FOUND)
def test_a_planted_bug_is_found_and_named(verified: Certificate, layout: str) -> None:
    proof = verified.proofs[2 + [*FOUND].index(layout)]
    assert not proof.passed
    for words in FOUND[layout].split("|"):
        assert words in told(proof)


def test_what_is_certified(verified: Certificate, tmp_path: Path) -> None:
    body = verified.to_dict()
    assert (body["passed"], body["adapter"], body["dtype"], body["steps"]) == (False, "plain.py", "float64", 2)
    assert "5 of 7 layouts differ" in body["summary"]
    assert body["layouts"][3]["causes"][0]["read"].startswith("https://")
    assert "torch" in body["versions"]
    file = tmp_path / "certificate.json"
    for change, code in (
        ({}, "certificate.adapter"),
        ({"steps": 3}, "certificate.digest"),
        ({"format": ""}, "certificate.format"),
    ):
        file.write_text(json.dumps(body | change))
        assert refusal(lambda: check_certificate(file)).codes == [code]
    file.write_text(json.dumps(body))
    other = tmp_path / "plain.py"
    other.write_text("# another")
    assert refusal(lambda: check_certificate(file, str(other))).codes == ["certificate.adapter"]
    file.write_text("{")
    assert refusal(lambda: check_certificate(file)).codes == ["certificate.read"]


def test_random_numbers_replicas_and_masks_and_a_certificate_repeated(tmp_path: Path) -> None:
    first = verify_adapter(f"{PLAIN}:Dropout")
    assert first.random
    split, copies, unlike = first.proofs
    assert split.passed  # other masks, as there must be; the replicas agree
    assert copies.passed
    assert not unlike.passed
    assert "ranks [0, 1] hold the same activation and draw different masks" in told(unlike)
    assert "plain.py:" in told(unlike)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(first.to_dict()))
    again = check_certificate(file, f"{PLAIN}:Dropout")
    assert again.ok
    assert [then for _, then, _, _ in again.rows] == [True, True, False]


@pytest.mark.slow
def test_in_a_narrow_dtype_the_bound_is_measured() -> None:
    right, wrong = verify_adapter(f"{PLAIN}:Narrow").proofs
    assert right.passed
    assert 1e-9 < max(deviation.error for deviation in right.deviations if deviation.quantity == "gradient") < 1e-4
    assert "x 2 = dp" in told(wrong)


@pytest.mark.slow
def test_more_planted_bugs() -> None:
    for proof, words in zip(verify_adapter(PLAIN, [*SLOW]).proofs, SLOW.values(), strict=True):
        assert not proof.passed
        for part in words.split("|"):
            assert part in told(proof)
