"""How long a replica that serves takes: one decode step, and the prefill of a prompt, in seconds by cause.

    replica = Replica(spec, Device.of(accelerator), gpus=8, tp=8)
    replica.step(batch=16, context=1500).total      # seconds in which 16 sequences get a token each
    replica.prefill(prompt=1024).latency            # seconds to the first token

A decode step multiplies a few rows with every weight: it takes as long as the weights and the cache take to be read,
plus what each kernel and each all-reduce costs however little it does. Letters as in work.py. Of experts it reads those
that its tokens visit (mixture.py).

Latent attention (MLA) decodes over the latents themselves: the product that makes keys of them goes to the query, the
one that makes values to the output, so the same weights are read once, and every head works on the kv_rank + rope_dim
numbers of a token. Many heads share what is read, so the tensor cores may be what they wait for. A prefill makes keys
and values of the latents, those of earlier chunks again.

Where the numbers come from. Kernels of a block: GEMMs for q k v, o, gate and up, down; a norm with its residual sum,
twice; rotation; the write into the cache; attention over parts of the cache, and the sum of the parts; the activation
function. With CUDA graphs a kernel costs `Achieved.launch`. The count, `BETWEEN` and `SKINNY` were chosen with batch 1
on A100s in gpt-fast's README in view, which leaves 52 us a block beyond the weights' bytes: those runs are no
independent check of them. TensorRT-LLM's throughputs are: nothing was chosen by them. Without graphs the host launches,
and a block of plain PyTorch takes it `Software.host`.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from fivefold.hardware.efficiency import software
from fivefold.layout.collective_cost import Kind
from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage, stages_of
from fivefold.plan.cost.experts import dense_gemms, plain_layers
from fivefold.plan.cost.kernels import Device, plus, times
from fivefold.plan.cost.latent import remade
from fivefold.plan.cost.links import Wires
from fivefold.plan.cost.stack import MOVED, Attention
from fivefold.plan.serving.messages import NCCL_BASE, flagged
from fivefold.plan.serving.mixture import mixture
from fivefold.plan.serving.parts import Parts
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Block, block, head

ATTENTION: Attention = "flash3"  # of the prefill: the best kernel that the device has
CHUNK = 2048  # tokens of prompts that are computed together: enough for the tensor cores, and little to hold
KERNELS = 7  # of a block, beside its GEMMs
TILE, SKINNY = 64, 16  # rows of the smallest tile in kernels.py; of the kernels that servers have for fewer rows
SAMPLING = 8  # kernels after the head: scale, filter, softmax, draw
BETWEEN = 0.2e-3  # seconds in which the host reads the tokens, schedules, and starts the next graph
LOGIT_BYTES = 12.0  # that the head's output is read and written: as bf16, then as float32


class Prefill(NamedTuple):
    """A prompt's way through the replica."""

    latency: float  # seconds from its first token in to the first token out
    busy: float  # seconds that it takes away from the others, with prompts that are computed together


@dataclass(frozen=True)
class Replica:
    """A model over tp x dp x pp GPUs."""

    spec: ModelSpec
    device: Device
    gpus: int  # of a node
    tp: int = 1
    pp: int = 1
    precision: str = "bf16"  # of the blocks' weights and matmuls; embedding, head and routers stay in bf16
    cache_bytes: int = 2  # of an element of a key or value
    graphs: bool = True  # CUDA graphs
    dp: int = 1  # groups of tp ranks that have sequences of their own and share the experts
    ep: int = 1  # groups of ranks that have whole experts
    imbalance: float = 1.0  # rows of the fullest of those, over the mean

    @property
    def ranks(self) -> int:
        """Of a stage."""
        return self.tp * self.dp

    @property
    def world(self) -> int:
        return self.ranks * self.pp

    @property
    def name(self) -> str:
        every = {"tp": self.tp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
        said = {"tp": self.tp} if self.dp == 1 else {}  # as dense models have it, also where it is 1
        return ",".join(f"{axis}={size}" for axis, size in every.items() if size > 1 or axis in said)

    @property
    def crosses(self) -> bool:
        """Whether tp leaves the node."""
        return self.tp > self.gpus

    @property
    def uneven(self) -> float:
        """Rows of the fullest group over the mean: no group has more than all."""
        return min(self.imbalance, self.ep)

    @cached_property
    def block(self) -> Block:
        """The operations of a block on one GPU; of a model with experts one that has some."""
        return block(self.spec, self.tp)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return _stages(self.spec, self.pp)

    @cached_property
    def wires(self) -> Wires:
        # Its "ep" are all ranks of a stage, and they are neighbours.
        layout = Layout(tp=self.tp, dp=self.dp, pp=self.pp, ep=self.ranks)
        return Wires(self.device, self.gpus, layout, ("tp", "dp", "pp"), start=0.0)  # `collective` adds it

    @cached_property
    def _fast(self) -> Wires:
        """The same links under the protocol of small messages."""
        return flagged(self.wires)

    def collective(self, kind: Kind, axis: str, payload: float) -> float:
        """Seconds under the better of the two protocols, as NCCL chooses."""
        if self.wires.reaches[axis].ranks == 1:
            return 0.0
        base = self.device.reached.launch + NCCL_BASE * self.wires.across(axis)
        return base + min(self.wires.time(kind, axis, payload), self._fast.time(kind, axis, payload))

    @cached_property
    def _free(self) -> Device:
        """Its tensor cores take no time: what remains is the bytes."""
        return self.device.but(gemm=math.inf, fp8=math.inf)

    def matmul(self, m: int, n: int, k: int, precision: str, groups: int = 1) -> Parts:
        """Of `groups` of the same shape, in one kernel."""
        launch = self.device.reached.launch
        whole = self.device.gemm(m, n, k, precision, groups) - launch
        free = self._free.gemm(m, n, k, precision, groups) - launch
        if m < TILE:
            whole = max(free, whole * math.ceil(m / SKINNY) * SKINNY / TILE)
        return Parts(compute=whole, launch=launch) if whole > 1.0001 * free else Parts(weights=whole, launch=launch)

    def rows(self, rows: int, dense: bool = False, busy: int = 0) -> Parts:
        """Of a block, for so many tokens of a tp group at once, without attention. `dense`: a block without experts;
        `busy`: groups that have tokens, all of them unless it is said."""
        spec, device, own = self.spec, self.device, block(self.spec, self.tp, dense)
        routed = spec.experts is not None and not dense
        matmuls = (self.matmul(*shape, self.precision) for shape in dense_gemms(own.matmuls, rows, False, 1))
        moved = MOVED["fused"]
        norm = getattr(moved, spec.norm)[0] + moved.residual[0]
        active = (moved.swiglu if spec.activation.startswith("swiglu") else moved.gelu)[0]
        turned = own.attention.width + own.attention.kv_width
        if spec.mla:
            turned = (own.attention.heads + 1) * spec.mla.rope_dim
        wide = spec.experts.shared_ffn if routed and spec.experts is not None else spec.ffn
        size = 2 * norm * spec.hidden + active * wide / self.tp + moved.rope[0] * turned
        # In fp8 a kernel of its own casts attention's output. MLA norms its latents, and makes values by themselves.
        kernels = KERNELS + spec.qk_norm + (self.precision == "fp8") + (3 if spec.mla else 0)
        # Ranks of tp each send a part of the tokens to experts: what came back is gathered, with what they share.
        gathers = routed and self.dp > 1 and not wide
        second: Kind = "all-gather" if gathers else "all-reduce"
        reduce = sum(self.collective(kind, "tp", 2.0 * rows * spec.hidden) for kind in ("all-reduce", second))
        rest = Parts(pointwise=device.stream(rows * size, 0), launch=kernels * device.reached.launch, tp=reduce)
        return plus(*matmuls, rest, *([mixture(self, rows, busy or self.dp)] if routed else []))

    def _bottom(self, rows: int) -> Parts:
        """The embedding."""
        moved = 4.0 * rows * self.spec.hidden
        reduce = self.collective("all-reduce", "tp", moved / 2)
        return Parts(pointwise=self.device.stream(moved, 0), launch=2 * self.device.reached.launch, tp=reduce)

    def _top(self, rows: int) -> Parts:
        """The last norm, the head and the choice of a token; every tp rank has all logits for that."""
        spec = self.spec
        logits = self.matmul(rows, head(spec, self.tp).outputs, spec.hidden, "bf16")
        gather = self.collective("all-gather", "tp", 2.0 * rows * spec.vocab)
        moved = LOGIT_BYTES * rows * spec.vocab
        rest = Parts(pointwise=self.device.stream(moved, 0), launch=SAMPLING * self.device.reached.launch, tp=gather)
        return plus(logits, rest)

    def cache_read(self, context: float) -> float:
        """Bytes that one GPU reads for one sequence in one block, and holds of it. A latent has no heads that tp could
        divide: every rank of tp has all of it."""
        own = self.block.attention
        return float(own.cached * self.cache_bytes * own.keys(context))

    def attend(self, rows: int, context: float) -> Parts:
        """Of a block: one query of each of `rows` sequences."""
        read = self.device.stream(rows * self.cache_read(context), 0)
        if self.spec.mla is None:
            return Parts(cache=read)
        own, mla = self.block.attention, self.spec.mla
        flops = 2.0 * rows * own.heads * (mla.cached + mla.kv_rank) * context
        work = flops / (self.device.peak() * getattr(self.device.reached, ATTENTION))
        return Parts(compute=work) if work > read else Parts(cache=read)

    @property
    def _kinds(self) -> tuple[bool, bool]:
        """Whether blocks are without experts, of the usual kind and of the first ones; the same where all are alike."""
        return False, bool(self.spec.experts and self.spec.dense_layers)

    def _loads(self, with_experts: Parts, without: Parts, bottom: Parts, top: Parts) -> list[Parts]:
        """Of every stage, by what a block of each kind takes, and the ends."""
        found = []
        for stage in self.stages:
            few = plain_layers(self.spec, stage)
            blocks = times(with_experts, len(stage.layers) - few), times(without, few)
            found.append(plus(*blocks, *[bottom] * stage.first, *[top] * stage.last))
        return found

    def step(self, batch: int, context: float) -> Parts:
        """From one token of each of `batch` sequences to the next, when each has `context` tokens behind it.

        A pipeline has pp groups of sequences in flight, one per stage: a token's way is as long as without it, and
        every stage reads its weights once for each group.
        """
        rows, busy = math.ceil(batch / (self.pp * self.dp)), min(self.dp, batch)
        attend = self.attend(rows, context)
        mixed, plain = (plus(self.rows(rows, dense, busy), attend) for dense in self._kinds)
        loads = self._loads(mixed, plain, self._bottom(rows), self._top(rows))
        found = plus(*loads)
        # The last stage sends its tokens back to the first; a group waits where the one before it is not yet through.
        send = self.collective("send", "pp", 2.0 * rows * self.spec.hidden)
        slowest = min(self.pp, batch) * (max(load.total for load in loads) + send)
        found = found._replace(pp=self.pp * send + max(0.0, slowest - (found.total + self.pp * send)))
        host = BETWEEN if self.graphs else BETWEEN + max(0.0, self.spec.layers * software().host - found.total)
        return found._replace(host=host)

    def prefill(self, prompt: int, prompts: int = 1) -> Prefill:
        """One prompt's latency; and the time of one among `prompts` that are there at once.

        A long prompt goes through the stages in chunks, one behind the other; short ones are computed together. Each
        group of dp computes its own, at once.
        """
        alone, _ = self._prompts(prompt, 1, 1)
        busy = min(self.dp, prompts)
        together = max(1, min(prompts // busy, CHUNK // prompt))
        return Prefill(alone + BETWEEN, self._prompts(prompt, together, busy)[1] / (together * busy))

    def _prompts(self, prompt: int, count: int, busy: int) -> tuple[float, float]:
        """Seconds through all stages, and in the slowest of them; `count` prompts on each of `busy` groups."""
        spec, tokens = self.spec, prompt * count
        chunks = math.ceil(tokens / CHUNK)
        rows = math.ceil(tokens / chunks)
        own = self.block.attention
        dim = (own.head_dim + own.v_dim) / 2
        attend, _ = self.device.attention(ATTENTION, count, own.heads, dim, prompt, prompt / 2)
        earlier = remade(spec, rows * (chunks - 1) // 2, self.tp)[-1:] if chunks > 1 else []  # keys and values
        again = sum(self.matmul(*up, self.precision).total for up in earlier)
        # Without CUDA graphs the host launches every chunk.
        least = 0.0 if self.graphs else software().host * chunks
        mixed, plain = (
            Parts(compute=max(least, (self.rows(rows, dense, busy).total + again) * chunks + attend))
            for dense in self._kinds
        )
        bottom, top = times(self._bottom(rows), chunks), self._top(count)
        spent = [load.total for load in self._loads(mixed, plain, bottom, top)]
        sends = (self.pp - 1) * self.collective("send", "pp", 2.0 * rows * spec.hidden)
        return sum(spent) / chunks + (chunks - 1) / chunks * max(spent) + sends, max(spent)


@lru_cache(maxsize=1024)
def _stages(spec: ModelSpec, pp: int) -> tuple[Stage, ...]:
    # A decode step reads the head's weights as it reads a block's, so the balance of FLOPs is one of bytes, too.
    return stages_of(spec, Layout(pp=pp), 1)
