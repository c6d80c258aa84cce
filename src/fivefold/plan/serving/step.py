"""How long a replica that serves takes: one decode step, and the prefill of a prompt, in seconds by cause.

    replica = Replica(spec, Device.of(accelerator), gpus=8, tp=8)
    replica.step(batch=16, context=1500).total      # seconds in which 16 sequences get a token each
    replica.prefill(prompt=1024).latency            # seconds to the first token

A decode step multiplies a few rows with every weight: it takes as long as the weights and the cache take to be read,
plus what each kernel and each all-reduce costs however little it does. Letters as in work.py.

Where the numbers come from. Kernels of a block: GEMMs for q k v, o, gate and up, down; a norm with its residual sum,
twice; rotation; the write into the cache; attention over parts of the cache, and the sum of the parts; the activation
function. With CUDA graphs a kernel costs `Achieved.launch`. The count, `BETWEEN` and `SKINNY` were chosen with batch 1
on A100s in gpt-fast's README in view, which leaves 52 us a block beyond the weights' bytes: those runs are no
independent check of them. TensorRT-LLM's throughputs are: nothing was chosen by them. Without graphs the host launches,
and a block of plain PyTorch takes it `Software.host`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from msgspec import structs

from fivefold.hardware.accelerators import LINKS, Link
from fivefold.hardware.efficiency import software
from fivefold.layout.collective_cost import Kind
from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage, stages_of
from fivefold.plan.cost.kernels import Device, plus, times
from fivefold.plan.cost.links import Wires
from fivefold.plan.cost.stack import MOVED, Attention
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Block, block, head

ATTENTION: Attention = "flash3"  # of the prefill: the best kernel that the device has
CHUNK = 2048  # tokens of prompts that are computed together: enough for the tensor cores, and little to hold
KERNELS = 7  # of a block, beside its GEMMs
TILE, SKINNY = 64, 16  # rows of the smallest tile in kernels.py; of the kernels that servers have for fewer rows
SAMPLING = 8  # kernels after the head: scale, filter, softmax, draw
BETWEEN = 0.2e-3  # seconds in which the host reads the tokens, schedules, and starts the next graph
LOGIT_BYTES = 12.0  # that the head's output is read and written: as bf16, then as float32

# Small messages. NCCL's LL protocol has these latencies a hop where Simple, which the catalogue has for training, has
# the ones on the left (src/graph/tuning.cc, `hwLat`); it sends a flag with every word, hence half the bandwidth. Within
# a node servers have kernels of their own that cost about a launch beside the hops (vLLM's and SGLang's one-shot and
# two-shot all-reduces: 4-10 us for KBs, 20-45 us for 2 MB, on 2-8 H100s); between nodes NCCL adds its base latency.
FAST = {LINKS["NVLink4"].latency: 0.6e-6, LINKS["PCIe5"].latency: 1.0e-6, LINKS["InfiniBand-NDR"].latency: 2.7e-6}
FLAGGED = 0.5
NCCL_BASE = 6.8e-6


class Parts(NamedTuple):
    """Seconds of a step by cause."""

    weights: float = 0.0  # matmuls that wait for their weights
    cache: float = 0.0  # keys and values read
    compute: float = 0.0  # matmuls that wait for the tensor cores; attention of the prefill
    pointwise: float = 0.0  # bytes of norms, rotations, activation functions, logits
    launch: float = 0.0  # from one kernel to the next
    tp: float = 0.0  # all-reduces
    pp: float = 0.0  # sends, and a stage's wait for a slower one
    host: float = 0.0  # the device waits for the host

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def bound(self) -> str:
        """The field that has the most."""
        return max(self._fields, key=lambda name: getattr(self, name))


class Prefill(NamedTuple):
    """A prompt's way through the replica."""

    latency: float  # seconds from its first token in to the first token out
    busy: float  # seconds that it takes away from the others, with prompts that are computed together


@dataclass(frozen=True)
class Replica:
    """A model over tp x pp GPUs."""

    spec: ModelSpec
    device: Device
    gpus: int  # of a node
    tp: int = 1
    pp: int = 1
    precision: str = "bf16"  # of the blocks' weights and matmuls; embedding and head stay in bf16
    cache_bytes: int = 2  # of an element of a key or value
    graphs: bool = True  # CUDA graphs

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        return f"tp={self.tp}" + (f",pp={self.pp}" if self.pp > 1 else "")

    @property
    def crosses(self) -> bool:
        """Whether tp leaves the node."""
        return self.tp > self.gpus

    @cached_property
    def block(self) -> Block:
        """The operations of a block on one GPU."""
        return block(self.spec, self.tp)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return _stages(self.spec, self.pp)

    @cached_property
    def wires(self) -> Wires:
        return Wires(self.device, self.gpus, Layout(tp=self.tp, pp=self.pp), start=0.0)  # `collective` adds it

    @cached_property
    def _fast(self) -> Wires:
        """The same links under the protocol of small messages."""
        own = self.device.accelerator
        flagged = structs.replace(own, inside=_flagged(own.inside), across=_flagged(own.across))
        return replace(self.wires, device=Device(flagged, self.device.reached))

    def collective(self, kind: Kind, axis: str, payload: float) -> float:
        """Seconds under the better of the two protocols, as NCCL chooses."""
        if getattr(self, axis) == 1:
            return 0.0
        base = self.device.reached.launch + NCCL_BASE * self.wires.across(axis)
        return base + min(self.wires.time(kind, axis, payload), self._fast.time(kind, axis, payload))

    def _matmul(self, m: int, n: int, k: int, precision: str) -> Parts:
        launch = self.device.reached.launch
        whole = self.device.gemm(m, n, k, precision) - launch
        # A device whose tensor cores take no time: what remains is the bytes.
        free = self.device.but(gemm=math.inf, fp8=math.inf).gemm(m, n, k, precision) - launch
        if m < TILE:
            whole = max(free, whole * math.ceil(m / SKINNY) * SKINNY / TILE)
        return Parts(compute=whole, launch=launch) if whole > 1.0001 * free else Parts(weights=whole, launch=launch)

    def rows(self, rows: int) -> Parts:
        """Of a block, for so many tokens at once, without attention."""
        spec, device, attention = self.spec, self.device, self.block.attention
        matmuls = (self._matmul(*shape, self.precision) for shape in self.block.gemms(rows))
        moved = MOVED["fused"]
        norm = getattr(moved, spec.norm)[0] + moved.residual[0]
        active = (moved.swiglu if spec.activation.startswith("swiglu") else moved.gelu)[0]
        turned = attention.width + attention.kv_width
        size = 2 * norm * spec.hidden + active * spec.ffn / self.tp + moved.rope[0] * turned
        # In fp8 a kernel of its own casts attention's output.
        kernels = KERNELS + spec.qk_norm + (self.precision == "fp8")
        reduce = 2 * self.collective("all-reduce", "tp", 2.0 * rows * spec.hidden)
        rest = Parts(pointwise=device.stream(rows * size, 0), launch=kernels * device.reached.launch, tp=reduce)
        return plus(*matmuls, rest)

    def _bottom(self, rows: int) -> Parts:
        """The embedding."""
        moved = 4.0 * rows * self.spec.hidden
        reduce = self.collective("all-reduce", "tp", moved / 2)
        return Parts(pointwise=self.device.stream(moved, 0), launch=2 * self.device.reached.launch, tp=reduce)

    def _top(self, rows: int) -> Parts:
        """The last norm, the head and the choice of a token; every tp rank has all logits for that."""
        spec = self.spec
        logits = self._matmul(rows, head(spec, self.tp).outputs, spec.hidden, "bf16")
        gather = self.collective("all-gather", "tp", 2.0 * rows * spec.vocab)
        moved = LOGIT_BYTES * rows * spec.vocab
        rest = Parts(pointwise=self.device.stream(moved, 0), launch=SAMPLING * self.device.reached.launch, tp=gather)
        return plus(logits, rest)

    def cache_read(self, context: float) -> float:
        """Bytes that one GPU reads for one sequence in one block."""
        own = self.block.attention
        return float(own.cached * self.cache_bytes * own.keys(context))

    def step(self, batch: int, context: float) -> Parts:
        """From one token of each of `batch` sequences to the next, when each has `context` tokens behind it.

        A pipeline has pp groups of sequences in flight, one per stage: a token's way is as long as without it, and
        every stage reads its weights once for each group.
        """
        rows = math.ceil(batch / self.pp)
        block = plus(self.rows(rows), Parts(cache=self.device.stream(rows * self.cache_read(context), 0)))
        bottom, top = self._bottom(rows), self._top(rows)
        loads = [
            plus(times(block, len(stage.layers)), *[bottom] * stage.first, *[top] * stage.last) for stage in self.stages
        ]
        found = plus(*loads)
        # The last stage sends its tokens back to the first; a group waits where the one before it is not yet through.
        send = self.collective("send", "pp", 2.0 * rows * self.spec.hidden)
        slowest = min(self.pp, batch) * (max(load.total for load in loads) + send)
        found = found._replace(pp=self.pp * send + max(0.0, slowest - (found.total + self.pp * send)))
        host = BETWEEN if self.graphs else BETWEEN + max(0.0, self.spec.layers * software().host - found.total)
        return found._replace(host=host)

    def prefill(self, prompt: int, prompts: int = 1) -> Prefill:
        """One prompt's latency; and the time of one among `prompts` that are there at once.

        A long prompt goes through the stages in chunks, one behind the other; short ones are computed together.
        """
        alone, _ = self._prompts(prompt, 1)
        together = max(1, min(prompts, CHUNK // prompt))
        return Prefill(alone + BETWEEN, self._prompts(prompt, together)[1] / together)

    def _prompts(self, prompt: int, count: int) -> tuple[float, float]:
        """Seconds through all stages, and in the slowest of them."""
        spec, tokens = self.spec, prompt * count
        chunks = math.ceil(tokens / CHUNK)
        rows = math.ceil(tokens / chunks)
        own = self.block.attention
        attend, _ = self.device.attention(ATTENTION, count, own.heads, spec.head_dim, prompt, prompt / 2)
        block = self.rows(rows).total * chunks + attend
        if not self.graphs:
            block = max(block, software().host * chunks)
        bottom, top = self._bottom(rows).total * chunks, self._top(count).total
        spent = [len(stage.layers) * block + stage.first * bottom + stage.last * top for stage in self.stages]
        sends = (self.pp - 1) * self.collective("send", "pp", 2.0 * rows * spec.hidden)
        return sum(spent) / chunks + (chunks - 1) / chunks * max(spent) + sends, max(spent)


def _flagged(link: Link) -> Link:
    """A link of the catalogue for small messages; measured latencies are what they are."""
    if link.latency not in FAST:
        return link
    return structs.replace(link, latency=FAST[link.latency], bandwidth=FLAGGED * link.bandwidth)


@lru_cache(maxsize=1024)
def _stages(spec: ModelSpec, pp: int) -> tuple[Stage, ...]:
    # A decode step reads the head's weights as it reads a block's, so the balance of FLOPs is one of bytes, too.
    return stages_of(spec, Layout(pp=pp), 1)
