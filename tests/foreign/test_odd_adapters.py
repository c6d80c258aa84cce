"""Adapters of which nothing could be compared are refused, and those that fail say what was measured before."""

from pathlib import Path

import pytest

from fivefold.foreign.layout_proof import LayoutProof
from fivefold.foreign.verify import verify_adapter
from fivefold.render.blocks import to_text
from tests.refusals import refusal

ODD = str(Path(__file__).with_name("odd.py"))
REFUSED = {
    "NoBackward": ("adapter.gradient", "one process has no gradient; did step() call backward?"),
    "Elsewhere": ("adapter.gradient", "all gradients of one process are zero; did step() call backward?"),
    "NotNumbers": ("adapter.gradient", "step() gave NaN gradients in one process: 0.weight (step 1)"),
    "NewEachTime": ("adapter.batch", "batch(step) is not the same twice"),
    "List": ("adapter.step", "step() returned a list"),
    "Word": ("adapter.step", "or so' as loss; it should return {'loss': a number}"),
    "Group": ("adapter.build", "leave it out: the process group is up"),
    "Exits": ("adapter.step", "step() ended its process, by sys.exit(0)"),
    "Raises": ("adapter.reference", "must be Tensor, not int (odd.py, line "),
}


def proven(name: str) -> tuple[LayoutProof, str]:
    certificate = verify_adapter(f"{ODD}:{name}")
    return certificate.proofs[0], to_text(certificate.blocks())


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_does_not_give_is_refused(name: str) -> None:
    code, words = REFUSED[name]
    error = refusal(lambda: verify_adapter(f"{ODD}:{name}"))
    assert error.codes == [code]
    assert words in error.problems[0]


UNDIVIDED = {"": "a layout is empty", "foo": "foo=1 is 1 rank: nothing is divided", "fdsp=2": "did you mean 'fsdp'?"}


@pytest.mark.parametrize("layout", UNDIVIDED)
def test_one_process_is_not_compared_with_itself(layout: str) -> None:
    error = refusal(lambda: verify_adapter(f"{ODD}:Right", ["dp=2", layout]))
    assert error.codes == ["adapter.layout"]
    assert UNDIVIDED[layout] in error.problems[0]


def test_an_exit_code_of_success_in_the_middle_is_said() -> None:
    proof, _ = proven("ExitsLate")
    assert proof.broken.endswith("failed with exit code 0: the adapter exited before its last step")
    assert proof.outcome == "could not run"
    assert proof.worst("gradient") is not None


def test_a_batch_of_each_ranks_own_is_none() -> None:
    proof, said = proven("NewOnEachRank")
    assert "batch(step) is not the same on rank 1 as in one process" in proof.broken
    assert "1 of 1 layout could not run" in said


def test_parameters_without_a_gradient_are_named() -> None:
    proof, said = proven("Told")
    assert proof.passed
    assert "no gradient in one process, so none is compared: extra" in said


def test_what_was_measured_before_a_failure_is_told_with_it() -> None:
    proof, said = proven("Partly")  # in its second step
    assert {deviation.step for deviation in proof.deviations} == {1}
    assert {deviation.quantity for deviation in proof.failed} >= {"gradient"}
    assert "find_unused_parameters" in proof.details
    assert "so none is compared: extra" in said
    proof, said = proven("LateUpdate")
    assert [(found.quantity, found.name) for found in proof.failed] == [("gradient", "0.bias")]
    assert proof.outcome == "differs"
    assert said.index("the gradient of 0.bias is missing (step 1") < said.index("and then rank")
    assert proof.to_dict()["failed"]
