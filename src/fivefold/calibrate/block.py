"""What kernels reach inside a block in training, which is not what they reach in a row of their own.

A device at its power limit runs slower the harder it is worked: between kernels that wait for memory, matmuls have a
higher clock than in a sweep of nothing else. And operands come as other kernels left them. So a block of the model runs
forward and backward for seconds, with ops that look at the clock. Streams follow it, as the optimizer and the loss do
in a step, until matmuls have the part of the time that they have in training.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.calibrate.clock import Clock
from fivefold.model.decoder import Block
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import preset

ROUNDS = {"cuda": 20, "cpu": 3}
PRODUCTS = 0.68  # of a step's time, in training at 64% of the peak; the rest is attention, streams and waiting


@dataclass(frozen=True)
class AttentionTiming:
    """Causal attention, and its seconds forward and backward."""

    samples: int
    heads: int
    seq: int
    head_dim: int
    forward: float
    backward: float

    @property
    def flops(self) -> float:
        """Forward, of the scores that the mask leaves."""
        return 2.0 * self.samples * self.heads * self.seq**2 * self.head_dim


@dataclass(frozen=True)
class BlockTiming:
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

    @property
    def attention(self) -> AttentionTiming:
        spec = self.spec
        return AttentionTiming(self.samples, spec.heads, self.seq, spec.head_dim, self.attend, self.attend_back)


class TimedOps(LocalOps):
    """The plain ops; matmuls and attention are timed."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.log: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        start = self.clock.now()
        yield
        self.log[what].append((start, self.clock.now()))

    def columns(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return tuple(_Matmul.apply(x, linear.weight, self) for linear in linears)

    def rows(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return _Matmul.apply(x, linear.weight, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "blocks that are timed have plain attention"
        return _Attend.apply(q, k, v, self, mask)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ops: TimedOps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops = ops
        with ops.timing("products"):
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        with ctx.ops.timing("products"):
            return output_grad @ weight, output_grad.flatten(0, 1).t() @ x.flatten(0, 1), None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ops: TimedOps, mask: Any) -> Tensor:
        with torch.enable_grad():
            q, k, v = ctx.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            with ops.timing("attend"):
                ctx.seen = LocalAttention().attend(q, k, v, mask)
        ctx.ops = ops
        return ctx.seen.detach()

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.ops.timing("attend_back"):
            grads = torch.autograd.grad(ctx.seen, ctx.inputs, output_grad)
        return (*grads, None, None)


def block_of(
    spec: ModelSpec, ops: LocalOps, samples: int, seq: int, device: torch.device, dtype: torch.dtype
) -> tuple[Block, Tensor, Callable[[], Tensor]]:
    """A block, its input, and its forward pass."""
    block = Block(spec, ops, 0, 0).to(device, dtype)
    positions = TokenPositions.of(torch.zeros(samples, seq, dtype=torch.long, device=device))
    angles = torch.rand(samples, 1, seq, spec.head_dim // 2, device=device)
    rotation = angles.cos(), angles.sin()
    x = torch.randn(samples, seq, spec.hidden, device=device, dtype=dtype).requires_grad_()
    return block, x, lambda: block(x, positions, rotation, ops.attention_mask(positions))


def of_device(on_gpu: bool, quick: bool) -> tuple[ModelSpec, int, int]:
    """The block that is timed there, with its sequences and their length."""
    if on_gpu:
        return preset("llama3-8b", layers=1), 2, 4096
    return preset("small", layers=1), 1, 128 if quick else 512


def in_block(clock: Clock, dtype: torch.dtype, seconds: float, quick: bool) -> BlockTiming:
    """A block of Llama 3 8B on a GPU, of a narrow model on a CPU, `seconds` long to warm up and then timed."""
    spec, samples, seq = of_device(clock.on_gpu, quick)
    ops, device = TimedOps(clock), clock.device
    block, x, forward = block_of(spec, ops, samples, seq, device, dtype)
    output_grad = torch.randn_like(x)
    streams = torch.empty(1 << 27 if clock.on_gpu else 1 << 12, device=device, dtype=dtype)

    def rounds(count: int, rest: int) -> dict[str, float]:
        ops.log.clear()
        with ops.timing("whole"):
            for _ in range(count):
                forward().backward(output_grad)
                x.grad = None
                block.zero_grad(set_to_none=True)
                for _ in range(rest):
                    streams.mul_(1.0)
        clock.synchronize()
        return {what: sum(clock.between(*pair) for pair in pairs) / count for what, pairs in ops.log.items()}

    rounds(1, 0)
    rest = 0
    if clock.on_gpu:
        alone = rounds(3, 0)
        each = (rounds(3, 50)["whole"] - alone["whole"]) / 50
        rest = max(0, round((alone["products"] / PRODUCTS - alone["whole"]) / each))
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        rounds(1, rest)
    return BlockTiming(spec, samples, seq, **rounds(ROUNDS[device.type], rest))
