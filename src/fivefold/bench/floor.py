"""`fivefold bench train --floor`: a lower bound of a step, from parts that are measured one by one on the device.

Products, grouped products and attention run in the job's own shapes and dtype, as often as a step needs them, in 16-bit
or float32 numbers (8-bit ones have their own rates). All other parts are bound by memory: they count with the fewest
bytes that they can read and write, at the speed of a long sum of two vectors. Nothing waits, and the load of experts is
even. A part can be a little quicker in a step than here, where the same product runs without a pause and the device
slows down to stay cool.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.bench.train import FloorPart
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, choose_device
from fivefold.launch.processes import Rank
from fivefold.layout.logit_slices import slices
from fivefold.machines.clock import Clock
from fivefold.model.grouped import Groups, product, weight_gradient
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Scores, block, head
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import DTYPE_BYTES

_MASTER_BYTES = 4  # bytes of a master, and of a moment
_MIN_MEASUREMENT_S = 0.05  # the shortest measurement, in seconds
_VECTOR_ELEMENTS = 1 << 28  # elements


@dataclass(frozen=True)
class Product:
    """x [rows, inputs] times a weight [outputs, inputs], or one of each of `groups`; `times` a step, with both
    gradients."""

    part: str
    rows: int
    inputs: int
    outputs: int
    times: float
    groups: int = 0

    @property
    def flops(self) -> float:
        return 6 * self.rows * self.inputs * self.outputs * self.times


def products(job: Job) -> list[Product]:
    """The products of a step of a job on one device."""
    model, count = job.model, job.layout.microbatches
    tokens = job.train.batch * job.data.seq // count
    matmuls: list[Product] = []
    for kinds, layers in model.counted().items():
        for matmul in block(model, layer=kinds).matmuls:
            part = "products of experts" if matmul.experts else "products of blocks"
            rows = tokens * max(1, matmul.chosen)
            matmuls.append(Product(part, rows, matmul.inputs, matmul.outputs, layers * count, matmul.experts))
    top, parts = head(model), slices(tokens, model.vocab)
    times = count * tokens / len(parts[0])
    return [*matmuls, Product("products of the head", len(parts[0]), top.inputs, top.outputs, times)]


def memory(job: Job) -> dict[str, float]:
    """The fewest bytes that the parts bound by memory read and write in a step, by part."""
    model, tokens = job.model, job.train.batch * job.data.seq
    wide = DTYPE_BYTES[job.train.dtype]
    gradient = wide if job.layout.microbatches == 1 else _MASTER_BYTES  # several are added up in full precision
    copy = wide if wide < _MASTER_BYTES else 0  # the model's weight, where it is not its own master
    state = 6 * _MASTER_BYTES + gradient + copy  # the master and both moments are read and written
    blocks = sum(layers * _features(model, kinds) for kinds, layers in model.counted().items())
    return {
        "AdamW": model.parameter_count * state,
        "the gradient norm": model.parameter_count * gradient,
        "between products": tokens * wide * (blocks + 3 * model.vocab),
    }


def _features(model: ModelSpec, kinds: Layer) -> float:
    """How many numbers a block reads and writes for a token outside of its products, forward and backward."""
    hidden, attention, experts = model.hidden, block(model, layer=kinds).attention, model.experts
    norms = len(kinds.branches) * (2 + 3) * hidden  # in and out; in, the gradient, out
    rotations = 4 * (attention.width + attention.kv_width) if model.positions == "rope" else 0
    if not kinds.routed or experts is None:
        return norms + rotations + (3 + 5) * model.ffn * (kinds.mlp is not None)
    slots = experts.top_k * hidden
    moved = (hidden + slots) + (slots + hidden)  # tokens to their slots, and back to tokens
    moved += (2 * slots + hidden) + (slots + hidden)  # the same backward; gate gradients read the experts' outputs
    return norms + rotations + moved + (3 + 5) * experts.top_k * experts.ffn + (3 + 5) * experts.shared_ffn


def run(rank: Rank, job: Job) -> list[FloorPart]:
    device, dtype = choose_device(job.train.device), TORCH_DTYPES[job.train.dtype]
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    for matmul in products(job):
        seconds[matmul.part] += matmul.times * _product(matmul, device, dtype)
        flops[matmul.part] += matmul.flops
    parts = [FloorPart(name, seconds[name], flops=flops[name]) for name in seconds]
    parts.append(_attention(job, device, dtype))
    pace = bandwidth(device)
    return [*parts, *(FloorPart(name, size / pace, bytes=size) for name, size in memory(job).items())]


def _product(matmul: Product, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a product and its two gradients."""
    x, dy = (torch.randn(matmul.rows, width, device=device, dtype=dtype) for width in (matmul.inputs, matmul.outputs))
    weight = torch.randn(max(1, matmul.groups), matmul.outputs, matmul.inputs, device=device, dtype=dtype)
    if not matmul.groups:
        w = weight[0]
        return sum(_time(device, call) for call in (lambda: x @ w.T, lambda: dy @ w, lambda: dy.T @ x))
    share, rest = divmod(matmul.rows, matmul.groups)
    groups = Groups.of(tuple(share + (number < rest) for number in range(matmul.groups)), device)
    calls: list[Callable[[], Tensor]] = [
        lambda: product(x, weight.mT, groups.ends, groups.sizes),
        lambda: product(dy, weight, groups.ends, groups.sizes),
        lambda: weight_gradient(dy, x, groups.ends, groups.sizes),
    ]
    return sum(_time(device, call) for call in calls)


def _attention(job: Job, device: torch.device, dtype: torch.dtype) -> FloorPart:
    """Causal attention by the kernel that PyTorch chooses; its FLOPs are those that a causal mask leaves."""
    model, size = job.model, (job.train.batch, job.data.seq)
    seconds, flops = 0.0, 0.0
    for kinds, layers in model.counted().items():
        scores = block(model, layer=kinds).attention._replace(window=0)
        if scores.heads:
            seconds += layers * _scores(scores, size, device, dtype)
            flops += 3 * layers * size[0] * size[1] * scores.flops(size[1] / 2)
    return FloorPart("attention", seconds, flops=flops)


def _scores(scores: Scores, size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one layer, forward and backward."""
    q, k, v = (
        torch.randn(size[0], heads, size[1], width, device=device, dtype=dtype, requires_grad=True)
        for heads, width in (
            (scores.heads, scores.head_dim), (scores.kv_heads, scores.head_dim), (scores.kv_heads, scores.v_dim)
        )
    )  # fmt: skip

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=scores.kv_heads < scores.heads)

    def forward_backward() -> None:
        y = forward()
        torch.autograd.grad(y, (q, k, v), y)

    return _time(device, forward_backward)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of c = a + b over long vectors."""
    count = _VECTOR_ELEMENTS if device.type == "cuda" else _VECTOR_ELEMENTS >> 6
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return 3 * a.nbytes / _time(device, lambda: torch.add(a, b, out=c))


def _time(device: torch.device, run: Callable[[], object]) -> float:
    """The mean seconds of a call, over many in a row."""
    return Clock(device, _MIN_MEASUREMENT_S).seconds(run)
