"""Times matmuls, attention, element-wise kernels and launches on a device. `fit` compares the times with ceilings."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median_high
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.machines.clock import Clock, sets
from fivefold.model.decoder import Block
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import LocalAttention, LocalOps, MixerInputs
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import preset

# ---- block ----------------------------------------------------------------------------------------------------------
# Kernels inside a block in training do not run as fast as the same kernels alone.
#
# A device at its power limit runs slower the harder it is worked: between kernels that wait for memory, matmuls have a
# higher clock than in a sweep of nothing else. And operands have the layout that other kernels gave them. So a block of
# the model runs forward and backward for seconds, with ops that time themselves. Element-wise kernels follow it, as the
# optimizer and the loss do in a step, until matmuls have the share of the time that they have in training.


BLOCK_PASSES = {"cuda": 20, "cpu": 3}
MATMUL_SHARE = 0.68  # of a step's time, training at 64% of the peak; the rest is attention, streams and waiting


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
        """FLOPs of the forward, for the scores that the causal mask leaves."""
        return 2.0 * self.samples * self.heads * self.seq**2 * self.head_dim


@dataclass(frozen=True)
class BlockTiming:
    """A block, and the seconds of one pass forward and backward through it."""

    spec: ModelSpec
    samples: int
    seq: int
    products: float  # all matmuls
    attend: float
    attend_back: float
    whole: float  # the pass, and the element-wise kernels after it

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Rows, columns and inner dimension of every matmul, forward and backward, as the block calls them."""
        forward = block(self.spec).gemms(self.samples * self.seq, apart=True)
        return [shape for m, n, k in forward for shape in ((m, n, k), (m, k, n), (n, k, m))]

    @property
    def attention(self) -> AttentionTiming:
        spec = self.spec
        return AttentionTiming(self.samples, spec.heads, self.seq, spec.head_dim, self.attend, self.attend_back)


class TimedOps(LocalOps):
    """The ops of a single device, which time matmuls and attention."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.log: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        start = self.clock.now()
        yield
        self.log[what].append((start, self.clock.now()))

    def column_parallel(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return tuple(_Matmul.apply(x, linear.weight, self) for linear in linears)

    def row_parallel(self, x: Tensor, linear: nn.Linear) -> Tensor:
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
    """A block, its input, and a function that runs its forward pass."""
    block = Block(spec, ops, 0, 0).to(device, dtype)
    positions = TokenPositions.of(torch.zeros(samples, seq, dtype=torch.long, device=device))
    angles = torch.rand(samples, 1, seq, spec.head_dim // 2, device=device)
    rotation = angles.cos(), angles.sin()
    x = torch.randn(samples, seq, spec.hidden, device=device, dtype=dtype).requires_grad_()
    shared = MixerInputs(positions, rotation, ops.attention_mask(positions))
    return block, x, lambda: block(x, positions, shared)


def of_device(*, on_gpu: bool, quick: bool) -> tuple[ModelSpec, int, int]:
    """The block that is timed on a device: its model, how many sequences it runs, and their length."""
    if on_gpu:
        return preset("llama3-8b", layers=1), 2, 4096
    return preset("small", layers=1), 1, 128 if quick else 512


def time_block(clock: Clock, dtype: torch.dtype, seconds: float, *, quick: bool) -> BlockTiming:
    """Time a block, of Llama 3 8B on a GPU, of a narrow model on a CPU, after warming up for `seconds`."""
    spec, samples, seq = of_device(on_gpu=clock.on_gpu, quick=quick)
    ops, device = TimedOps(clock), clock.device
    block, x, forward = block_of(spec, ops, samples, seq, device, dtype)
    output_grad = torch.randn_like(x)
    streams = torch.empty(1 << 27 if clock.on_gpu else 1 << 12, device=device, dtype=dtype)

    def seconds_by_part(count: int, filler: int) -> dict[str, float]:
        """The mean seconds of `count` passes by BlockTiming's fields; `filler` element-wise kernels follow each."""
        ops.log.clear()
        with ops.timing("whole"):
            for _ in range(count):
                forward().backward(output_grad)
                x.grad = None
                block.zero_grad(set_to_none=True)
                for _ in range(filler):
                    streams.mul_(1.0)
        clock.synchronize()
        return {what: sum(clock.between(*pair) for pair in pairs) / count for what, pairs in ops.log.items()}

    seconds_by_part(1, 0)
    filler = 0
    if clock.on_gpu:
        alone = seconds_by_part(3, 0)
        one_kernel = (seconds_by_part(3, 50)["whole"] - alone["whole"]) / 50
        filler = max(0, round((alone["products"] / MATMUL_SHARE - alone["whole"]) / one_kernel))
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        seconds_by_part(1, filler)
    return BlockTiming(spec, samples, seq, **seconds_by_part(BLOCK_PASSES[device.type], filler))


# ---- kernels --------------------------------------------------------------------------------------------------------


# The matmuls of a layer as autograd calls them, on its input, its weight and its output's gradient.
LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda x, weight, output_grad: F.linear(x, weight),
    "input gradient": lambda x, weight, output_grad: output_grad @ weight,
    "weight gradient": lambda x, weight, output_grad: output_grad.t() @ x,
}


@dataclass(frozen=True)
class Sizes:
    """The shapes that are measured: large enough to take a device milliseconds."""

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    large: tuple[int, int]  # tokens and width of the sustained matmuls
    sustained: float  # seconds of them, until power and heat limit the clock
    attention: tuple[tuple[int, int, int, int], ...]  # sequences, heads, tokens, head dim
    stream: int  # elements
    launches: int


SIZES = {
    ("cuda", False): Sizes(
        (1024, 2048, 4096, 8192, 16384),
        (2048, 3072, 4096, 8192, 16384),
        (8192, 8192),
        2.0,
        ((4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128), (1, 32, 4096, 128), (2, 32, 4096, 64)),
        1 << 28,
        1000,
    ),
    ("cuda", True): Sizes(
        (2048, 8192), (2048, 8192), (8192, 8192), 1.0, ((4, 32, 4096, 128), (4, 32, 4096, 64)), 1 << 27, 500
    ),
    ("cpu", False): Sizes(
        (256, 512, 1024), (256, 512, 1024), (1024, 1024), 1.0, ((2, 8, 512, 64), (1, 8, 1024, 64)), 1 << 24, 2000
    ),
    ("cpu", True): Sizes((128, 256), (256,), (256, 512), 0.2, ((1, 4, 256, 64),), 1 << 22, 500),
}


@dataclass(frozen=True)
class MatmulTiming:
    """The seconds of a matmul [m, k] x [k, n] in one of LAYOUTS."""

    m: int
    n: int
    k: int
    layout: str
    seconds: float

    @property
    def rate(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


class Kernels:
    def __init__(self, device: torch.device, quick: bool):
        self.device, self.quick = device, quick
        self.sizes = SIZES["cuda" if device.type == "cuda" else "cpu", quick]
        # Most CPUs emulate bfloat16, and nobody trains in it there.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.clock = Clock(device, 0.06 if device.type == "cuda" else 0.01)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A random tensor. Zeros would draw less power, and their matmul run faster than a real one."""
        randn_dtype = torch.float32 if dtype else self.dtype  # torch has no random fp8
        return torch.randn(shape, device=self.device, dtype=randn_dtype).to(dtype or self.dtype)

    # ---- matmuls -----------------------------------------------------------------------------------------------------

    def shapes(self) -> list[tuple[int, int, int]]:
        """Tokens, columns and inner dimension of the matmuls of a block: attention's output, gate with up, down."""
        shapes = []
        for tokens, width in product(self.sizes.tokens, self.sizes.widths):
            wide = 7 * width // 2
            shapes += [(tokens, width, width), (tokens, wide, width), (tokens, width, wide)]
        return shapes

    def products(self) -> Iterator[MatmulTiming]:
        """Time the sweep of matmuls, one shape after the other without a pause, in the three LAYOUTS."""
        for tokens, columns, inner in self.shapes():
            operands = [self._random(*shape) for shape in ((tokens, inner), (columns, inner), (tokens, columns))]
            count = sets(sum(operand.nbytes for operand in operands))
            copies = [operands, *([operand.clone() for operand in operands] for _ in range(count - 1))]
            shapes = ((tokens, columns, inner), (tokens, inner, columns), (columns, inner, tokens))
            for (layout, matmul), (m, n, k) in zip(LAYOUTS.items(), shapes, strict=True):
                yield MatmulTiming(m, n, k, layout, self.clock.seconds(*(partial(matmul, *copy) for copy in copies)))

    def sustained(self) -> float:
        """FLOP/s of a block's matmuls, back to back for seconds, until power and heat limit the clock."""
        tokens, width = self.sizes.large
        wide = 7 * width // 2
        shapes = ((width, width), (wide, width), (width, wide))
        calls = [partial(F.linear, self._random(tokens, inner), self._random(n, inner)) for n, inner in shapes]
        flops = sum(2.0 * tokens * columns * inner for columns, inner in shapes)
        clock = Clock(self.device, self.sizes.sustained / 2)
        clock.seconds(*calls)  # warms up
        return flops / (clock.seconds(*calls) * len(calls))

    def in_block(self, kernel: str) -> BlockTiming | None:
        """Time a block in training with one attention kernel; None if the device has no such kernel."""
        try:
            with _only(kernel, self.device):
                return time_block(self.clock, self.dtype, self.sizes.sustained, quick=self.quick)
        except RuntimeError:
            return None

    def fp8_products(self) -> Iterator[MatmulTiming]:
        """Time matmuls in fp8 with one scale per tensor, if the hardware has it."""
        if self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) < (8, 9):
            return
        fp8, scale = torch.float8_e4m3fn, torch.ones((), device=self.device)
        for tokens, columns, inner in self.shapes():
            if tokens < 4096 or inner < 4096:  # for smaller ones the cast takes more than fp8 saves
                continue
            x, weight = self._random(tokens, inner, dtype=fp8), self._random(columns, inner, dtype=fp8)
            multiply = partial(
                torch._scaled_mm, x, weight.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            yield MatmulTiming(tokens, columns, inner, "forward", self.clock.seconds(multiply))

    # ---- attention ---------------------------------------------------------------------------------------------------

    def attention(self, kernel: str) -> list[AttentionTiming]:
        """Time causal attention with four query heads to a kv head; empty if the device has no such kernel."""
        try:
            return [self._attention(kernel, *shape) for shape in self.sizes.attention]
        except RuntimeError:  # torch raises it if no kernel takes the inputs
            return []

    def _attention(self, kernel: str, samples: int, heads: int, seq: int, head_dim: int) -> AttentionTiming:
        kv_heads = heads // 4
        # With the strides that they have in the model: v comes from a linear, q and k from the rotation.
        q, k = (self._random(samples, count, seq, head_dim).requires_grad_() for count in (heads, kv_heads))
        v = self._random(samples, seq, kv_heads, head_dim).transpose(1, 2).requires_grad_()
        with _only(kernel, self.device):

            def attend() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            output = attend()
            output_grad = torch.randn_like(output)
            with torch.no_grad():
                forward = self.clock.seconds(attend)
            inputs = (q, k, v)
            backward = self.clock.seconds(lambda: torch.autograd.grad(output, inputs, output_grad, retain_graph=True))
        return AttentionTiming(samples, heads, seq, head_dim, forward, backward)

    # ---- what memory bounds ------------------------------------------------------------------------------------------

    def streams(self) -> dict[str, float]:
        """Bytes/s of element-wise kernels, by name; bytes read and bytes written count."""
        count, width = self.sizes.stream, self.dtype.itemsize
        x, y, out = self._random(count), self._random(count), torch.empty(count, dtype=self.dtype, device=self.device)
        wide = torch.empty(count, device=self.device, dtype=torch.float64 if width == 4 else torch.float32)
        kernels: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (lambda: out.copy_(x), 2 * width),
            "sum": (lambda: torch.add(x, y, out=out), 3 * width),
            "product": (lambda: torch.mul(x, y, out=out), 3 * width),
            "silu": (lambda: torch.ops.aten.silu.out(x, out=out), 2 * width),
            "widening": (lambda: wide.copy_(x), width + wide.element_size()),
        }  # each with its bytes per element
        return {name: width * count / self.clock.seconds(call) for name, (call, width) in kernels.items()}

    def launch(self) -> float:
        """Seconds from one tiny kernel to the next, in a queue that is never empty."""
        x, count = torch.zeros(1, device=self.device), self.sizes.launches
        if self.device.type != "cuda":
            return self.clock.seconds(lambda: x.add_(1.0))
        x.add_(1.0)
        self.clock.synchronize()
        torch.cuda._sleep(100_000_000)  # some 50 ms in which the host fills the queue
        return self.clock.total([lambda: x.add_(1.0)], count) / count

    def host(self) -> tuple[float, float]:
        """Seconds that this host takes to launch a block's forward, and its backward, with little to compute."""
        count, sizes = 16, {"hidden": 256, "heads": 4, "ffn": 512}
        if self.device.type != "cuda":  # a CPU computes, too: there must be nothing to compute
            count, sizes = 1, {"hidden": 32, "head_dim": 16, "heads": 2, "ffn": 32}
        spec = preset("llama3.2-1b", kv_heads=1, vocab=256, layers=1, **sizes)
        _, _, forward = block_of(spec, LocalOps(), 1, count, self.device, self.dtype)
        forwards, backwards = [], []
        for _ in range(30):
            self.clock.synchronize()
            start = time.perf_counter()
            y = forward()
            middle = time.perf_counter()
            y.backward(y.detach())
            backwards.append(time.perf_counter() - middle)
            forwards.append(middle - start)
        return median_high(forwards), median_high(backwards)

    def update(self) -> float:
        """Seconds per parameter of the gradient norm, clipping and AdamW, as the trainer calls them on a CPU."""
        count = self.sizes.stream // 4
        weight, output_grad, first, second = (torch.rand(count) for _ in range(4))
        number = torch.ones(())

        def step() -> None:
            torch._foreach_norm([output_grad], 2, dtype=torch.float64)
            torch._foreach_mul_([output_grad], torch.ones(()))
            torch._fused_adamw_(
                [weight], [output_grad], [first], [second], [], [number],
                lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip

        return self.clock.seconds(step) / count


def _only(kernel: str, device: torch.device) -> Any:
    """A context in which torch uses this attention kernel alone; a CPU has but one."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel({"flash2": SDPBackend.FLASH_ATTENTION, "flash3": SDPBackend.CUDNN_ATTENTION}[kernel])
