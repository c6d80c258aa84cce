"""Megatron-Core in the layouts of its adapter, and bugs planted in its own code, which are named.

It needs megatron-core and einops; nothing of Megatron is edited.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from fivefold.foreign.verify import verify_adapter
from tests.foreign.planted import BUGS, Bug, told

pytestmark = pytest.mark.extras
if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed: pip install megatron-core", allow_module_level=True)

PLANTED = Path(__file__).with_name("planted_megatron.py")
GROUPS = {
    "megatron": [
        ["dp=2,overlap", "dp=2,zero1,overlap", "tp=2", "tp=2,sp", "pp=2,recompute"],
        ["pp=2,vpp=2", "pp=4,mbs=4", "dp=2,pp=2,zero1", "tp=4,sp"],
        ["dp=2", "pp=2", "dp=2,tp=2,sp", "tp=2,sp,pp=2,vpp=2"],
    ],
    "megatron:untied": [["dp=2", "tp=2,sp", "tp=2,sp,pp=2,vpp=2"]],
    "megatron:experts": [
        ["dp=2", "dp=2,ep=2", "dp=2,ep=2,allgather", "tp=2,sp", "tp=2,sp,ep=2,etp=1"],
        ["pp=2", "pp=2,vpp=2", "dp=2,ep=2,zero1", "dp=2,tp=2,sp,ep=2", "dp=4,ep=2"],
    ],
    "megatron:experts_per_token": [["dp=2", "dp=2,ep=2", "pp=2"]],
}


@pytest.mark.parametrize(
    ("adapter", "layouts"), [(adapter, layouts) for adapter, groups in GROUPS.items() for layouts in groups]
)
def test_megatron_computes_in_a_layout_what_it_computes_in_one_process(adapter: str, layouts: list[str]) -> None:
    certificate = verify_adapter(adapter, layouts)
    assert certificate.ok, certificate
    assert certificate.worst < 1e-11
    assert certificate.versions["megatron-core"]
    for proof in certificate.proofs:
        assert {deviation.quantity for deviation in proof.deviations} == {"loss", "gradient", "norm", "parameter"}


def test_these_are_all_layouts_of_the_adapter() -> None:
    from fivefold.foreign.adapter import AdapterFile, parse_layout
    from fivefold.launch import processes

    for adapter, groups in GROUPS.items():
        [description] = processes.run(
            1, "fivefold.foreign.rank:describe", AdapterFile.of(adapter), [], "cpu", timeout=300.0
        )
        tried = [str(parse_layout(text)) for own in groups for text in own]
        assert sorted(map(str, description.layouts)) == sorted(tried)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.framework == "megatron"], ids=lambda bug: bug.layout)
def test_a_planted_bug_is_found_and_named(bug: Bug) -> None:
    [proof] = verify_adapter(f"{PLANTED}:{bug.layout}").proofs
    said = told(proof)
    for words in bug.words:
        assert words in said


def test_dropout_of_megatron_itself() -> None:
    certificate = verify_adapter(f"{PLANTED}:dropout")
    assert certificate.random == "dropout"
    assert certificate.ok, certificate
    assert certificate.worst < 1e-11  # by value, with dropout off
