"""The inventory of a block against the model that runs, and against the parameters that are made of it."""

import pytest

from fivefold.layout.layout import Layout
from fivefold.layout.rules import tp_fits
from fivefold.layout.sharding import local_params
from fivefold.spec.operations import block, head
from fivefold.spec.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_rank_multiplies_with_the_weights_that_it_holds(name: str) -> None:
    """Where ranks outnumber the kv heads they hold all of k and v, and use one head."""
    spec = preset(name)
    for tp in (tp for tp in (1, 2, 3, 4, 8, 16) if tp_fits(spec, tp)):
        mine, repeated = local_params(spec, Layout(tp=tp)), max(1, tp // spec.kv_heads)
        for one in block(spec, tp).matmuls:
            weight = mine[f"layers.{spec.layers - 1}.{one.branch}.{one.name}.weight"]
            rows, columns = weight.shape
            used = rows // spec.kv_heads if one.tp == "colwise_kv" and repeated > 1 else rows
            assert (used, columns) == (one.rows, one.inputs)  # of experts: all, one below the other
        table = mine["embedding.weight" if spec.tied else "head.weight"]
        assert table.shape == (head(spec, tp).outputs, spec.hidden)


def test_matmuls_that_read_one_tensor_are_one_gemm_or_several_of_the_same_flops() -> None:
    own = block(preset("llama3-8b"), 2)
    assert own.gemms(8) == [(8, 3072, 4096), (8, 4096, 2048), (8, 14336, 4096), (8, 4096, 7168)]
    joined, apart = (sum(m * n * k for m, n, k in own.gemms(8, apart)) for apart in (False, True))
    assert joined == apart == 8 * own.weights


def test_only_sp_divides_work_on_the_residual_stream() -> None:
    spec = preset("tiny-gpt")
    shares = {
        one.kind: (one.features_per_rank(4, sp=False), one.features_per_rank(4, sp=True))
        for one in block(spec).elementwise
    }
    stream, features = (spec.hidden, spec.hidden / 4), (spec.ffn / 4, spec.ffn / 4)
    assert shares == {"norm": stream, "dropout": stream, "residual": stream, "gelu": features}


def test_the_blocks_of_a_family_differ_in_what_they_compute() -> None:
    kinds = {name: [one.kind for one in block(preset(name)).elementwise] for name in ("tiny", "tiny-qwen3", "tiny-gpt")}
    assert kinds["tiny"] == ["norm", "rope", "residual", "norm", "swiglu", "residual"]
    assert kinds["tiny-qwen3"] == ["norm", "qk_norm", "qk_norm", "rope", "residual", "norm", "swiglu", "residual"]
    assert kinds["tiny-gpt"] == ["norm", "dropout", "residual", "norm", "gelu", "dropout", "residual"]
