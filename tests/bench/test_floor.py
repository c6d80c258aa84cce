"""The floor of a step: what must be computed, and the fewest bytes that must move."""

import pytest

from fivefold.bench.floor import memory, products
from fivefold.job.reading import read_job


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "tiny-deepseek", "qwen3-30b-a3b", "mixtral-8x7b"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_its_products_are_the_model_s_flops(model: str, microbatches: int) -> None:
    job = read_job(None, [f"model={model}", "train.batch=4", "data.seq=4096", f"layout=microbatches={microbatches}"])
    tokens = job.train.batch * job.data.seq
    assert sum(matmul.flops for matmul in products(job)) == pytest.approx(
        6 * tokens * job.model.matmul_parameters, rel=1e-9
    )


def test_masters_take_their_bytes() -> None:
    job = read_job(None, ["model=tiny-moe", "train.batch=4", "data.seq=128", "train.dtype=bfloat16"])
    found = memory(job)
    assert found["AdamW"] == 28 * job.model.parameter_count  # 24 of masters and moments, a gradient and a weight
    assert found["the gradient norm"] == 2 * job.model.parameter_count
    assert found["between products"] > 0


def test_dtype_microbatches_and_dense_layers_count() -> None:
    def found(*words: str) -> dict[str, float]:
        return memory(read_job(None, ["model=tiny-deepseek", "train.batch=4", "data.seq=128", *words]))

    narrow, wide = found("train.dtype=bfloat16"), found("train.dtype=float32")
    count = read_job(None, ["model=tiny-deepseek"]).model.parameter_count
    assert (narrow["AdamW"], wide["AdamW"]) == (28 * count, 28 * count)  # float32: no copy, a wider gradient
    assert found("train.dtype=bfloat16", "layout=microbatches=2")["AdamW"] == 30 * count
    assert wide["between products"] == 2 * narrow["between products"]
    assert found("model.experts.dense_layers=2")["between products"] < wide["between products"]
