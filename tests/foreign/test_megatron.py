"""Megatron-Core in the layouts of its adapter, and bugs planted in its own code, which are named.

It needs megatron-core and einops; nothing of Megatron is edited.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from fivefold.foreign.verify import verify_adapter

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
        [description] = processes.run(1, "fivefold.foreign.rank:describe", AdapterFile.of(adapter), timeout=300.0)
        tried = [str(parse_layout(text)) for own in groups for text in own]
        assert sorted(map(str, description.layouts)) == sorted(tried)


def named(bug: str) -> str:
    """What is said of a planted bug."""
    certificate = verify_adapter(f"{PLANTED}:{bug}")
    assert not certificate.ok
    [proof] = certificate.proofs
    assert not proof.broken, proof.details
    return "\n".join(f"{cause.text} ({cause.likely})" for cause in proof.causes)


def test_norms_that_are_not_summed_over_tp() -> None:
    said = named("unsummed_norms")
    assert said.startswith("26 of 51 gradients (decoder.final_layernorm.bias, decoder.final_layernorm.weight, ")
    assert "the parts of ranks [0, 1] add up to the truth, and nobody adds them: a missing SUM" in said
    assert "with sequence parallelism tp ranks see other tokens" in said


def test_tied_embeddings_that_are_not_summed_over_pp() -> None:
    said = named("unsummed_embedding")
    assert said.startswith("1 of 51 gradients (embedding.word_embeddings.weight): the parts of ranks [0, 1] add up")
    assert "tied embeddings: the first and the last stage each have a copy" in said


def test_auxiliary_losses_that_are_not_divided_by_microbatches() -> None:
    said = named("auxiliary_losses")
    assert said.startswith("the whole difference is the term aux loss and z-loss: it entered x 8 = microbatches")


def test_a_norm_that_counts_replicas() -> None:
    said = named("norm_of_replicas")
    assert "every copy of a replicated parameter is counted" in said
    assert "gradients are right; clipping by it is not" in said


def test_dropout_that_differs_between_tp_ranks() -> None:
    said = named("dropout_of_each_rank")
    assert "dropout at fused_bias_dropout.py:" in said
    assert "ranks [0, 1] hold the same activation and draw different masks" in said


def test_dropout_of_megatron_itself() -> None:
    certificate = verify_adapter(f"{PLANTED}:dropout")
    assert certificate.random
    assert certificate.ok, certificate


def test_a_sum_over_dp_where_a_mean_was_meant() -> None:
    said = named("sum_over_dp")
    assert said.startswith("all 51 gradients (")
    assert "exactly x 2 = dp on every rank" in said
    assert "nothing divides by their number" in said
