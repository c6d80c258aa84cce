"""What kernels reach inside a block in training, which is not what they reach in a row of their own.

A device at its power limit runs slower the harder it is worked: between kernels that wait for memory, products have a
higher clock than in a sweep of nothing else. And operands come as other kernels left them. So a block of the model runs
forward and backward for seconds, as it is, with ops that look at the clock; and streams after it, as a step has its
optimizer and its loss, until products have the part of the time that they have in training.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.decoder import Block
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import preset

ROUNDS = {"cuda": 20, "cpu": 3}
PRODUCTS = 0.68  # of a step's time, in training at 64% of the peak; the rest is attention, streams and waiting


@dataclass(frozen=True)
class InBlock:
    """Seconds of one pass forward and backward through a block, and what it is."""

    spec: ModelSpec
    samples: int
    seq: int
    products: float
    attend: float
    attend_back: float
    whole: float

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Rows, columns and inner of every matmul, forward and backward, as the block asks for them."""
        forward = block(self.spec).gemms(self.samples * self.seq, apart=True)
        return [shape for m, n, k in forward for shape in ((m, n, k), (m, k, n), (n, k, m))]


class Watched(LocalOps):
    """The plain ops, with a look at the clock around products and attention."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.log: dict[str, list[tuple[Any, Any]]] = {}
        self.clear()

    def clear(self) -> None:
        self.log = {"products": [], "attend": [], "attend_back": []}

    def seconds(self, what: str) -> float:
        if self.device.type == "cuda":
            return sum(float(start.elapsed_time(end)) for start, end in self.log[what]) / 1e3
        return sum(end - start for start, end in self.log[what])

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        start = self.now()
        yield
        self.log[what].append((start, self.now()))

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def columns(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return tuple(_Product.apply(x, linear.weight, self) for linear in linears)

    def rows(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return _Product.apply(x, linear.weight, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Tensor:
        return _Attend.apply(q, k, v, self, sight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, watched: Watched) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.watched = watched
        with watched.timing("products"):
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        with ctx.watched.timing("products"):
            return slope @ weight, slope.flatten(0, 1).t() @ x.flatten(0, 1), None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, watched: Watched, sight: Any) -> Tensor:
        with torch.enable_grad():
            q, k, v = ctx.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            with watched.timing("attend"):
                ctx.seen = LocalAttention().attend(q, k, v, sight)
        ctx.watched = watched
        return ctx.seen.detach()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.watched.timing("attend_back"):
            grads = torch.autograd.grad(ctx.seen, ctx.inputs, slope)
        return (*grads, None, None)


def in_block(device: torch.device, dtype: torch.dtype, seconds: float, quick: bool) -> InBlock:
    """A block of Llama 3 8B on a GPU, of a narrow model on a CPU, `seconds` long to warm up and then timed."""
    spec, samples, seq = preset("llama3-8b", layers=1), 2, 4096
    if device.type != "cuda":
        spec, samples, seq = preset("small", layers=1), 1, 128 if quick else 512
    watched = Watched(device)
    block = Block(spec, watched, 0, 0).to(device, dtype)
    place = TokenPositions.of(torch.zeros(samples, seq, dtype=torch.long, device=device))
    angles = torch.rand(samples, 1, seq, spec.head_dim // 2, device=device)
    x = torch.randn(samples, seq, spec.hidden, device=device).to(dtype).requires_grad_()
    slope, rotation = torch.randn_like(x), (angles.cos(), angles.sin())

    streams = torch.empty(1 << 27 if device.type == "cuda" else 1 << 12, device=device, dtype=dtype)

    def once(rest: int) -> None:
        block(x, place, rotation, watched.sight(place)).backward(slope)
        x.grad = None
        block.zero_grad(set_to_none=True)
        for _ in range(rest):
            streams.mul_(1.0)

    def rounds(count: int, rest: int) -> tuple[float, float, float, float]:
        watched.clear()
        begin = watched.now()
        for _ in range(count):
            once(rest)
        watched.log["whole"] = [(begin, watched.now())]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products, ahead, back, whole = (
            watched.seconds(what) / count for what in ("products", "attend", "attend_back", "whole")
        )
        return products, ahead, back, whole

    rounds(1, 0)
    rest = 0
    if device.type == "cuda":
        products, _, _, alone = rounds(3, 0)
        each = (rounds(3, 50)[-1] - alone) / 50
        rest = max(0, round((products / PRODUCTS - alone) / each))
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        rounds(1, rest)
    return InBlock(spec, samples, seq, *rounds(ROUNDS[device.type], rest))
