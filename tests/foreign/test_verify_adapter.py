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
    "dp=2,bug=mean_of_means": "x 1.3077 (4 samples): a mean of 2 means|own number of targets|own parts are wrong",
    "dp=2,bug=untaught": "gradients are right, and parameters are not updated: embedding.weight",
    "dp=2,bug=local_loss": "each rank's share: their sum is that of one process",
    "fsdp=2,bug=local_norm": "it is the norm of what rank 0 holds",
}
SLOW = {
    "dp=2,bug=sum": "all 7 gradients|exactly x 2 = dp",
    "dp=2,bug=one_parameter": "1 of 7 gradients (norm.bias)|a missing MEAN|own parts are right",
    "dp=2,bug=lost_rank": "x 1 (4 samples), x 0 (4 samples)|samples 4 to 7 are left out",
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


@pytest.mark.slow
def test_dropout_is_compared_by_value_and_its_masks_and_the_certificate_repeated(tmp_path: Path) -> None:
    first = verify_adapter(f"{PLAIN}:Dropout")
    assert first.random == "dropout"
    split, copies, unlike, summed = first.proofs
    for right in (split, copies):
        assert right.passed
        assert {deviation.quantity for deviation in right.deviations} == {"loss", "gradient", "norm", "parameter"}
    assert first.worst > 0.1  # a gradient was summed
    assert any("draw the same masks" in remark for remark in split.remarks)
    assert not copies.remarks
    assert not unlike.passed
    assert "ranks [0, 1] hold the same activation and draw different masks" in told(unlike)
    assert "plain.py:" in told(unlike)
    assert "all 7 gradients" in told(summed)
    assert "exactly x 2 = dp" in told(summed)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(first.to_dict()))
    again = check_certificate(file, f"{PLAIN}:Dropout")
    assert again.holds
    assert not again.ok
    assert [then for _, then, _, _ in again.rows] == ["passed", "passed", "differs", "differs"]


@pytest.mark.slow
def test_what_is_legal_and_easily_taken_for_a_bug() -> None:
    certificate = verify_adapter(f"{PLAIN}:Odd")
    assert not certificate.random  # a buffer that build() draws is the same in all runs
    unreduced, recomputed, means, *wrong = certificate.proofs
    assert unreduced.passed
    assert recomputed.passed
    assert "a mean of 2 means" in told(means)
    assert "those with targets: 0 to 1, 3 to 7" in told(means)
    for proof in wrong:  # not the last module, with which the calls of a backward pass begin
        assert "forward: the output of up is the first that differs, on rank 0; what it is given is that" in told(proof)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("Narrow", 1e-9, 1e-4), ("Coarse", 1e-4, 0.1)])
def test_in_a_narrow_dtype_the_bound_is_measured(name: str, least: float, most: float) -> None:
    right, wrong = verify_adapter(f"{PLAIN}:{name}").proofs
    assert right.passed
    assert least < max(deviation.error for deviation in right.deviations if deviation.quantity == "gradient") < most
    assert "all 7 gradients" in told(wrong)
    assert "about x 2 = dp on every rank" in told(wrong)


@pytest.mark.slow
def test_more_planted_bugs() -> None:
    for proof, words in zip(verify_adapter(PLAIN, [*SLOW]).proofs, SLOW.values(), strict=True):
        assert not proof.passed
        for part in words.split("|"):
            assert part in told(proof)
