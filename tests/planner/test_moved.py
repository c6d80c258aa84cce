"""The bytes that the planner counts for blocks that are not compiled are those that PyTorch's operators move."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.cost.software import ELEMENTWISE_BYTES, ON_CPUS
from fivefold.job.reading import read_job
from fivefold.model.rope import apply_rotary
from fivefold.parallel.mesh import Mesh
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

ROWS, WIDTH = 64, 128
VIEWS = {"view", "transpose", "permute", "slice", "split", "expand", "unsqueeze", "detach", "alias"}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}  # are counted elsewhere
SPARSE = {"gather", "scatter_"}  # touch one number of a row


class Moves(TorchDispatchMode):
    """Bytes that operators read and write; numbers that repeat along a row are read once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in VIEWS | PRODUCTS | SPARSE:
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
            self.bytes += sum(one.nbytes for one in tensors if 0 not in one.stride())
        return out


def rows() -> Tensor:
    return torch.randn(1, ROWS, WIDTH, requires_grad=True)


def turned(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (16, -1)).transpose(1, 2)
    angles = torch.ones(1, 1, ROWS, WIDTH // 32)
    return apply_rotary(heads, angles, angles)


@pytest.mark.parametrize(
    ("name", "compute", "inputs"),
    [
        ("rmsnorm", nn.RMSNorm(WIDTH), 1), ("layernorm", nn.LayerNorm(WIDTH), 1), ("residual", torch.add, 2),
        ("swiglu", lambda gate, up: F.silu(gate) * up, 2), ("gelu", F.gelu, 1), ("rope", turned, 1),
    ],
)  # fmt: skip
def test_bytes_of_float32_operators_are_counted(name: str, compute: Callable[..., Tensor], inputs: int) -> None:
    given = [rows() for _ in range(inputs)]
    with Moves() as ahead:
        out = compute(*given)
    slope, learned = torch.ones_like(out), list(compute.parameters()) if isinstance(compute, nn.Module) else []
    with Moves() as back:
        torch.autograd.grad(out, [*given, *learned], slope)
    count, wide = ROWS * WIDTH, 2  # the table is of 2-byte numbers
    planned = getattr(ELEMENTWISE_BYTES["float32"], name)
    assert ahead.bytes / count / wide == pytest.approx(planned[0], rel=0.05)
    if name != "residual":  # whose slopes are the same tensor; the sum is where the two ways meet, in the block
        assert back.bytes / count / wide == pytest.approx(planned[1], rel=0.05)


def test_bytes_of_a_logit_are_counted() -> None:
    """By how much a step moves more for a larger vocabulary: what grows with it is logits, but for a narrow table."""
    moved = []
    for vocab in (2048, 4096):
        job = read_job(None, ["model=tiny", "model.layers=1", f"model.vocab={vocab}", "data.seq=512", "train.batch=2"])
        engine = Engine(job, Mesh.of(job.layout, torch.device("cpu")))
        with Moves() as step:
            engine.forward_backward(plain_batch(vocab, 2, 512))
        moved.append(step.bytes)
    wide = 2  # the figure is of 2-byte numbers
    assert (moved[1] - moved[0]) / (1024 * 2048) / wide == pytest.approx(ON_CPUS.logit_bytes, rel=0.15)
