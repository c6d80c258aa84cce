"""The floor of a step: what must be computed, and the fewest bytes that must move."""

import pytest

from fivefold.bench.floor import memory, products
from fivefold.job.config import read_job


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "tiny-deepseek", "qwen3-30b-a3b", "mixtral-8x7b"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_its_products_are_the_model_s_flops(model: str, microbatches: int) -> None:
    job = read_job(None, [f"model={model}", "train.batch=4", "data.seq=4096", f"layout=microbatches={microbatches}"])
    tokens = job.train.batch * job.data.seq
    assert sum(one.flops for one in products(job)) == pytest.approx(6 * tokens * job.model.matmul_parameters, rel=1e-9)


def test_masters_take_their_bytes() -> None:
    job = read_job(None, ["model=tiny-moe", "train.batch=4", "data.seq=128"])
    found = memory(job)
    assert found["AdamW"] == 28 * job.model.parameter_count  # 24 of masters and moments, a gradient and a weight
    assert found["the gradient norm"] == 2 * job.model.parameter_count
    assert found["between products"] > 0
