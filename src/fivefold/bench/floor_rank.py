"""The rates that a floor is made of, measured on the device of one process."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.bench.floor import Part, Product, memory, products
from fivefold.calibrate.clock import Clock
from fivefold.job.config import Job
from fivefold.launch.device import DTYPES, choose_device
from fivefold.launch.ranks import Rank
from fivefold.model.experts.grouped import Groups, product, weight_gradient
from fivefold.spec.operations import block

_SETTLE = 0.05  # seconds of a measurement, at least
_VECTOR = 1 << 28  # elements


def run(rank: Rank, job: Job) -> list[Part]:
    device, dtype = choose_device(job.train.device), DTYPES[job.train.dtype]
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    for one in products(job):
        seconds[one.part] += one.times * _product(one, device, dtype)
        flops[one.part] += one.flops
    found = [Part(name, seconds[name], flops=flops[name]) for name in seconds]
    found.append(_attention(job, device, dtype))
    pace = _memory(device)
    return [*found, *(Part(name, size / pace, bytes=size) for name, size in memory(job).items())]


def _product(one: Product, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a product and its two gradients."""
    x, dy = (torch.randn(one.rows, width, device=device, dtype=dtype) for width in (one.inputs, one.outputs))
    weight = torch.randn(max(1, one.groups), one.outputs, one.inputs, device=device, dtype=dtype)
    if not one.groups:
        w = weight[0]
        return sum(_time(device, call) for call in (lambda: x @ w.T, lambda: dy @ w, lambda: dy.T @ x))
    share, rest = divmod(one.rows, one.groups)
    groups = Groups.of(tuple(share + (number < rest) for number in range(one.groups)), device)
    calls: list[Callable[[], Tensor]] = [
        lambda: product(x, weight.mT, groups.ends, groups.sizes),
        lambda: product(dy, weight, groups.ends, groups.sizes),
        lambda: weight_gradient(dy, x, groups.ends, groups.sizes),
    ]
    return sum(_time(device, call) for call in calls)


def _attention(job: Job, device: torch.device, dtype: torch.dtype) -> Part:
    """Causal, by PyTorch's choice of kernel; its FLOPs are those that a causal mask leaves."""
    model, scores, size = job.model, block(job.model).attention, (job.train.batch, job.data.seq)
    q, k, v = (
        torch.randn(size[0], heads, size[1], width, device=device, dtype=dtype, requires_grad=True)
        for heads, width in (
            (scores.heads, scores.head_dim), (scores.kv_heads, scores.head_dim), (scores.kv_heads, scores.v_dim)
        )
    )  # fmt: skip

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=scores.kv_heads < scores.heads)

    def both() -> None:
        y = forward()
        torch.autograd.grad(y, (q, k, v), y)

    done = 3 * model.layers * size[0] * size[1] * scores.flops(size[1] / 2)
    return Part("attention", model.layers * _time(device, both), flops=done)


def _memory(device: torch.device) -> float:
    """Bytes a second of c = a + b over long vectors."""
    count = _VECTOR if device.type == "cuda" else _VECTOR >> 6
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return 3 * a.nbytes / _time(device, lambda: torch.add(a, b, out=c))


def _time(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a call, of many in a row."""
    return Clock(device, _SETTLE).seconds(run)
