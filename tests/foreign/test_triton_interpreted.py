"""The kernels of a GPU, in Triton's interpreter on the CPU: what they compute, not how fast.

    TRITON_INTERPRET=1 python tests/foreign/test_triton_interpreted.py

The interpreter truncates to bfloat16 where a GPU rounds, so rows are of 32 and 64 bits here.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extras
_TOLERANCES = {"float32": 2e-5, "float64": 1e-12}  # of sums of 8 and 200 terms of about 1


def test_kernels_compute_what_the_cpu_does() -> None:
    pytest.importorskip("triton")
    settings = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["rows", "logits", "groups"]


def _rows() -> None:
    import torch

    from fivefold.model import triton_kernels as kernels
    from fivefold.model.dispatch import Permute, Unpermute, inverse
    from fivefold.model.layers import accum_dtype
    from fivefold.model.router import sort_by_expert

    random = torch.Generator().manual_seed(0)
    for kind in (torch.float32, torch.float64):
        for tokens, width, top_k in ((1, 40, 1), (13, 200, 3), (5, 64, 8), (0, 16, 2)):
            chosen = torch.rand(tokens, 12, generator=random).argsort(1)[:, :top_k]
            order, _ = sort_by_expert(chosen, 12)
            row_of = inverse(order)
            x, slope = (torch.randn(tokens, width, generator=random).to(kind).requires_grad_() for _ in range(2))
            weights = torch.rand(tokens, top_k, generator=random).to(accum_dtype(kind)).requires_grad_()
            rows = Permute.apply(x, order, row_of)
            y = Unpermute.apply(1.5 * rows, weights, order, row_of)
            for_x, for_weights = torch.autograd.grad(y, (x, weights), slope)
            with torch.no_grad():
                mine = kernels.permute(x, row_of)
                assert torch.equal(mine, rows)
                wide = 1.5 * mine
                to_rows, to_weights = kernels.combine_backward(slope, wide, weights, row_of)
                found = (
                    (kernels.combine(wide, row_of, weights, tokens), y),
                    (kernels.combine(1.5 * to_rows, row_of, None, tokens), for_x),
                    (to_weights, for_weights),
                )
            tolerance = _TOLERANCES[str(kind).removeprefix("torch.")]
            for one, wanted in found:
                torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)
    print("rows")


def _logits() -> None:
    import torch

    from fivefold.model import triton_kernels as kernels

    random = torch.Generator().manual_seed(0)
    for words in (1, 500, 8192, 20_011):
        logits = (20 * torch.randn(4, words, generator=random)).bfloat16()
        logits[0] = torch.arange(words)  # the largest comes last
        logits[1, 1:] = -torch.inf
        found = kernels.log_sum_exp(logits)
        torch.testing.assert_close(found, logits.double().logsumexp(-1).float(), rtol=2e-6, atol=2e-6)
    print("logits")


def _groups() -> None:
    import torch

    from fivefold.model import triton_kernels as kernels

    gradients = torch.ones(4, 3, 5)
    kernels.zero_empty_groups(gradients, torch.tensor([0, 7, 7, 9], dtype=torch.int32))
    assert gradients.sum((1, 2)).tolist() == [0.0, 15.0, 0.0, 15.0]
    print("groups")


if __name__ == "__main__":
    _rows()
    _logits()
    _groups()
