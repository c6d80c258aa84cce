"""The same on a GPU that two ranks share, over gloo; skipped where there is none."""

import pytest
import torch

from fivefold.layout import Layout
from tests.parallel.data.world import BOUND, SMALL, apart, reference, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    "text", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2,sp", "dp=2,zero=3,replicate=2"]
)
def test_two_ranks_on_one_gpu(text: str) -> None:
    layout = Layout.parse(f"{text},microbatches=2")
    expected = reference(SMALL, 8)
    for run in run_ranks(2, train, SMALL, layout, 8, (), torch.float64, "cuda"):
        assert run.norms == pytest.approx(expected.norms, rel=BOUND)
        assert apart(run.gradients, expected.gradients) < BOUND
        assert apart(run.masters, expected.masters) < BOUND
        assert apart(run.model, expected.masters) < BOUND


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_follows_one_rank(stage: int) -> None:
    alone = train(0, 1, SMALL, Layout(microbatches=2), 8, (), torch.bfloat16, "cuda")
    for run in run_ranks(2, train, SMALL, Layout(dp=2, zero=stage), 8, (), torch.bfloat16, "cuda"):
        assert run.norms == pytest.approx(alone.norms, rel=1e-5)
        for name, master in alone.masters.items():
            torch.testing.assert_close(run.masters[name], master.cpu(), rtol=0, atol=1e-5)
