"""Models of unlike layers: what is missing or differs from layer to layer is the same in every layout."""

import pytest

from fivefold.verifier.verify import verify
from tests.verifier.cases import slow

PATTERN = """model.pattern=[
    {mixer = {name = "attention", window = 5}, mlp = "moe"},
    {mixer = "attention"},
    {mlp = "moe"},
    {mixer = "attention", mlp = "dense"},
]""".replace("\n", "")
EXPERTS = {"count": 4, "top_k": 2, "ffn": 24, "shared": 1}
MODEL = [PATTERN, "model.layers=4", *(f"model.experts.{name}={n}" for name, n in EXPERTS.items())]


@pytest.mark.parametrize("layout", [
    "tp=2,pp=2,schedule=zb-v,microbatches=4",
    *slow(["dp=2,ep=2,zero=3,recompute=selective", "tp=2,cp=2,sp,recompute=full",
     "dp=2,pp=2,ep=2,schedule=dualpipe-v,microbatches=4,zero=1"]),
])  # fmt: skip
def test_a_layout_computes_what_one_process_computes(layout: str) -> None:
    """Loss, norm, gradients, parameters; bytes sent and held: of layers without a mixer, without an MLP, with experts
    and without, with a window and without."""
    result = verify(layout, MODEL, steps=2, seq=16)
    assert result.ok, str(result)
