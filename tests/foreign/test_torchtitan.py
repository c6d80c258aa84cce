"""torchtitan's own Llama 3 in its own layouts against one process, and bugs planted in it. Needs torchtitan 0.3.0."""

from pathlib import Path

import pytest

from fivefold.foreign.certificate import Certificate
from fivefold.foreign.verify import verify_adapter
from tests.foreign.planted import BUGS, Bug, told

pytestmark = pytest.mark.extras
for package in ("torchtitan", "spmd_types", "datasets", "triton"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install torchtitan==0.3.0 triton")

PLANTED = str(Path(__file__).with_name("planted_torchtitan.py"))
TITANS = [bug for bug in BUGS if bug.framework == "torchtitan"]
TIMEOUT = 900.0  # a rank imports torchtitan for seconds


def test_every_layout_of_the_adapter_is_one_process():
    certificate = verify_adapter("torchtitan", timeout=TIMEOUT)
    assert [proof.layout for proof in certificate.proofs if not proof.passed] == []
    assert len(certificate.proofs) >= 16
    assert certificate.versions["torchtitan"]


@pytest.fixture(scope="module")
def planted() -> Certificate:
    return verify_adapter(PLANTED, [bug.layout for bug in TITANS], timeout=TIMEOUT)


@pytest.mark.parametrize("bug", TITANS, ids=lambda bug: bug.layout)
def test_a_planted_bug_is_found_and_named(planted: Certificate, bug: Bug) -> None:
    said = told(planted.proofs[TITANS.index(bug)])
    for words in bug.words:
        assert words in said
