"""How long a replica that serves takes: one decode step, and the prefill of a prompt, in seconds by cause.

    replica = Replica(spec, Device.of(accelerator), gpus=8, tp=8)
    replica.step(batch=16, context=1500).total      # seconds in which 16 sequences get a token each
    replica.prefill(prompt=1024).latency            # seconds to the first token

A decode step multiplies a few rows with every weight: it takes as long as the weights and the cache take to be read,
plus what each kernel and each all-reduce costs however little it does. Of experts it reads those that its tokens visit.

Latent attention (MLA) decodes over the latents themselves: the product that makes keys of them goes to the query, the
one that makes values to the output, so the same weights are read once, and every head works on the kv_rank + rope_dim
numbers of a token. Many heads share what is read, so the tensor cores may be what they wait for. A prefill makes keys
and values of the latents, again also for earlier chunks.

Where the numbers come from. Kernels of a block: GEMMs for q k v, o, gate and up, down; a norm with its residual sum,
twice; rotation; the write into the cache; attention over parts of the cache, and the sum of the parts; the activation
function. With CUDA graphs a kernel costs `Achieved.launch`. The count, `HOST_SECONDS` and `SKINNY` were chosen with
gpt-fast's README in view (batch 1 on A100s), which leaves 52 us a block beyond the weights' bytes: those runs are no
independent check of them. TensorRT-LLM's throughputs are: nothing was chosen by them. Without graphs the host launches,
and a block of plain PyTorch takes it `Software.host`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from fivefold.cost.collective_time import NCCL_BASE, Kind, Topology, with_small_message_links
from fivefold.cost.kernels import Device, mla_up_projections
from fivefold.cost.moe import GROUPED_GEMM_EFFICIENCY, dense_gemms
from fivefold.cost.peak_memory import CUDA_CONTEXT_BYTES, FRAGMENTATION, USABLE_FRACTION
from fivefold.cost.software import ELEMENTWISE_BYTES, Attention
from fivefold.hardware.accelerators import software
from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage, stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.kinds import WANTED_CACHE
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block, head
from fivefold.spec.pattern import Layer
from fivefold.support.plugin_calls import ask
from fivefold.support.text import divisors
from fivefold.support.tuple_arithmetic import plus, scaled

# ---- parts ----------------------------------------------------------------------------------------------------------
# What the modules of serving share: seconds of a step by cause, bytes of a weight.


class Parts(NamedTuple):
    """Seconds of a step by cause."""

    weights: float = 0.0  # matmuls that wait for their weights
    cache: float = 0.0  # keys and values read
    compute: float = 0.0  # matmuls that wait for the tensor cores; attention of the prefill, and over latents
    pointwise: float = 0.0  # bytes of norms, rotations, activation functions, logits
    launch: float = 0.0  # from one kernel to the next
    tp: float = 0.0  # all-reduces
    ep: float = 0.0  # tokens on their way to experts and back
    pp: float = 0.0  # sends, and a stage's wait for a slower one
    host: float = 0.0  # the device waits for the host

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def bound(self) -> str:
        """The field that has the most."""
        return max(self._fields, key=lambda name: getattr(self, name))


def linear_bytes(precision: str) -> int:
    """Of a weight of the blocks."""
    return 1 if precision == "fp8" else 2


# ---- mixture --------------------------------------------------------------------------------------------------------
# Experts of a replica that serves: which of them a step touches, how long they take, and what their ranks send.
#
# The ranks of a stage, tp x dp, share the experts of its layers: ep groups of ranks have count/ep whole experts each,
# and the tp x dp / ep ranks of a group divide their width. No expert is held twice, whatever ep is. With dp the ranks
# have sequences of their own and meet only here.
#
#     experts_touched(experts, 64)    # experts of a layer that a step of 64 tokens reads
#     most_touched(experts, 8, 64)    # how many of these the fullest of 8 groups has


ROUTING_KERNELS = (
    4  # kernels beside the products and the activation: the choice, sorting it by expert (2), and adding up
)


def experts_touched(experts: Experts, tokens: int) -> float:
    """Experts of a layer that so many tokens visit together, on average: X (1 - (1 - K/X)^T).

    Tokens choose independently of each other, and every expert equally often; real routers repeat themselves, which
    leaves more experts untouched.
    """
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


@lru_cache(maxsize=1 << 14)
def most_touched(experts: Experts, ep: int, tokens: int) -> float:
    """Of those, how many are on the group that has the most of them, on average: all others wait while it reads them.

    Each of a group's X/ep experts is touched with the same probability, as if independently of the others.
    """
    of_group, share = experts.count // ep, experts_touched(experts, tokens) / experts.count
    if ep == 1:
        return of_group * share
    within, expected = 0.0, 0.0
    for count in range(of_group):
        within += math.comb(of_group, count) * share**count * (1 - share) ** (of_group - count)
        expected += 1 - min(1.0, within) ** ep
    return max(1.0, expected)


def degrees(spec: ModelSpec, tp: int, dp: int = 1) -> list[int]:
    """The ep that tp x dp ranks can have, the largest last; 1 without experts. Ranks that have sequences of their own
    have whole experts: so do the servers that work like this."""
    experts, ranks = spec.experts, tp * dp
    if experts is None:
        return [1] if dp == 1 else []
    possible = [ep for ep in divisors(ranks) if experts.count % ep == 0 and experts.ffn % (ranks // ep) == 0]
    return possible if dp == 1 else [ep for ep in possible if ep == ranks]


def mixture(replica: "Replica", rows: int, busy: int) -> Parts:
    """Seconds of the experts of a block that all ranks of a stage together give `busy` x `rows` tokens."""
    spec, experts, device = replica.spec, replica.spec.experts, replica.device
    assert experts is not None
    tokens, inner = busy * rows, experts.ffn * replica.ep // replica.ranks
    hit = most_touched(experts, replica.ep, tokens)
    peak_rows = replica.uneven * tokens * experts.top_k / replica.ep  # rows on the fullest rank
    gated = spec.activation.startswith("swiglu")
    shapes = [((1 + gated) * inner, spec.hidden), (spec.hidden, inner)]
    products = [_grouped(replica, peak_rows, n, k, hit) for n, k in shapes]
    router = replica.matmul(rows, experts.count, spec.hidden, "bf16")
    active = (ELEMENTWISE_BYTES["fused"].swiglu if gated else ELEMENTWISE_BYTES["fused"].gelu)[0]
    moved = peak_rows * (active * inner + 2 * 4.0 * spec.hidden)  # rows are put into order, and added up
    launch = ROUTING_KERNELS * device.achieved.launch
    rest = Parts(pointwise=device.stream(moved, 0), launch=launch, ep=exchange(replica, rows))
    return plus(router, *products, rest)


def _grouped(replica: "Replica", rows: float, n: int, k: int, hit: float) -> Parts:
    """A product of `hit` experts in one kernel. What was measured of grouped kernels is their pace at tensor cores."""
    groups = math.ceil(hit)
    parts = replica.matmul(max(1, math.ceil(rows / hit)), n, k, replica.precision, groups)
    share = scaled(parts, hit / groups)
    return share._replace(compute=share.compute / GROUPED_GEMM_EFFICIENCY, launch=parts.launch)


def exchange(replica: "Replica", rows: int) -> float:
    """Seconds in which tokens reach their experts and come back, where ranks have sequences of their own (dp).

    All-to-all, which the fullest rank ends last, or all tokens to all ranks and sums back, whichever takes less.
    Without dp every rank has all tokens already, and the all-reduce of tp adds up the outputs of experts.
    """
    spec, experts = replica.spec, replica.spec.experts
    if replica.dp == 1 or experts is None:
        return 0.0
    forth, back = linear_bytes(replica.precision), 2
    assigned = replica.uneven * math.ceil(rows / replica.tp) * experts.top_k * spec.hidden  # elements
    all_tokens = float(rows * replica.dp * spec.hidden)
    gather = replica.collective("all-gather", "ep", forth * all_tokens)
    scatter = replica.collective("reduce-scatter", "ep", back * all_tokens)
    all_to_all = sum(replica.collective("all-to-all", "ep", size * assigned) for size in (forth, back))
    return min(all_to_all, gather + scatter)


# ---- step -----------------------------------------------------------------------------------------------------------


ATTENTION: Attention = "flash3"  # of the prefill: the best kernel that the device has
PREFILL_CHUNK = 2048  # tokens of prompts that are computed together: enough for the tensor cores, and little to hold
BLOCK_KERNELS = 7  # of a block, beside its GEMMs
TILE, SKINNY = 64, 16  # rows of the smallest tile in `cost/kernels.py`; of servers' kernels for fewer rows
SAMPLING_KERNELS = 8  # kernels after the head: scale, filter, softmax, draw
HOST_SECONDS = 0.2e-3  # seconds in which the host reads the tokens, schedules, and starts the next graph
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
        sizes = {"tp": self.tp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
        always = {"tp": self.tp} if self.dp == 1 else {}  # as dense models have it, also where it is 1
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1 or axis in always)

    @property
    def crosses(self) -> bool:
        """Whether tp leaves the node."""
        return self.tp > self.gpus

    @property
    def uneven(self) -> float:
        """Rows of the fullest group over the mean: no group has more than all."""
        return min(self.imbalance, self.ep)

    @cached_property
    def block(self) -> BlockOperations:
        """The operations of a block on one GPU; of a model with experts one that has some."""
        return block(self.spec, self.tp)  # of the last layer: `serve` takes no pattern, so it has attention

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return _stages(self.spec, self.pp)

    @cached_property
    def topology(self) -> Topology:
        # Its "ep" are all ranks of a stage, and they are neighbours.
        layout = Layout(tp=self.tp, dp=self.dp, pp=self.pp, ep=self.ranks)
        return Topology(self.device, self.gpus, layout, ("tp", "dp", "pp"), start=0.0)  # `collective` adds it

    @cached_property
    def _fast(self) -> Topology:
        """The same links under the protocol of small messages."""
        return with_small_message_links(self.topology)

    def collective(self, kind: Kind, axis: str, payload: float) -> float:
        """Seconds under the better of the two protocols, as NCCL chooses."""
        if self.topology.reaches[axis].ranks == 1:
            return 0.0
        base = self.device.achieved.launch + NCCL_BASE * self.topology.across(axis)
        return base + min(self.topology.time(kind, axis, payload), self._fast.time(kind, axis, payload))

    @cached_property
    def _free(self) -> Device:
        """Its tensor cores take no time: what remains is the bytes."""
        return self.device.achieving(gemm=math.inf, fp8=math.inf)

    def matmul(self, m: int, n: int, k: int, precision: str, groups: int = 1) -> Parts:
        """Of `groups` of the same shape, in one kernel."""
        launch = self.device.achieved.launch
        seconds = self.device.gemm(m, n, k, precision, groups) - launch
        free = self._free.gemm(m, n, k, precision, groups) - launch
        if m < TILE:
            seconds = max(free, seconds * math.ceil(m / SKINNY) * SKINNY / TILE)
        return (
            Parts(compute=seconds, launch=launch) if seconds > 1.0001 * free else Parts(weights=seconds, launch=launch)
        )

    def rows(self, rows: int, layer: Layer | None = None, busy: int = 0) -> Parts:
        """Of a block of this kind, or of the last, for so many tokens of a tp group at once, without attention.
        `busy`: groups that have tokens, all of them unless it is said."""
        layer = layer or self.spec.kinds(self.spec.layers - 1)
        spec, device, operations, routed = self.spec, self.device, block(self.spec, self.tp, layer), layer.routed
        matmuls = (
            self.matmul(*shape, self.precision)
            for shape in dense_gemms(operations.matmuls, rows, apart=False, sp_degree=1)
        )
        moved = ELEMENTWISE_BYTES["fused"]
        norm = getattr(moved, spec.norm)[0] + moved.residual[0]
        active = (moved.swiglu if spec.activation.startswith("swiglu") else moved.gelu)[0]
        turned = operations.attention.width + operations.attention.kv_width
        if operations.latent:
            turned = (operations.attention.heads + 1) * operations.attending.unread
        wide = spec.experts.shared_ffn if routed and spec.experts is not None else spec.ffn
        size = 2 * norm * spec.hidden + active * wide / self.tp + moved.rope[0] * turned
        # In fp8 a separate kernel casts attention's output. MLA norms its latents, and makes values by themselves.
        kernels = BLOCK_KERNELS + spec.qk_norm + (self.precision == "fp8") + (3 if operations.latent else 0)
        # Ranks of tp each send a part of the tokens to experts: what came back is gathered, with what they share.
        gathers = routed and self.dp > 1 and not wide
        second: Kind = "all-gather" if gathers else "all-reduce"
        reduce = sum(self.collective(kind, "tp", 2.0 * rows * spec.hidden) for kind in ("all-reduce", second))
        rest = Parts(pointwise=device.stream(rows * size, 0), launch=kernels * device.achieved.launch, tp=reduce)
        return plus(*matmuls, rest, *([mixture(self, rows, busy or self.dp)] if routed else []))

    def _bottom(self, rows: int) -> Parts:
        """The embedding."""
        moved = 4.0 * rows * self.spec.hidden
        reduce = self.collective("all-reduce", "tp", moved / 2)
        return Parts(pointwise=self.device.stream(moved, 0), launch=2 * self.device.achieved.launch, tp=reduce)

    def _top(self, rows: int) -> Parts:
        """The last norm, the head and the choice of a token; every tp rank has all logits for that."""
        spec = self.spec
        logits = self.matmul(rows, head(spec, self.tp).outputs, spec.hidden, "bf16")
        gather = self.collective("all-gather", "tp", 2.0 * rows * spec.vocab)
        moved = LOGIT_BYTES * rows * spec.vocab
        rest = Parts(
            pointwise=self.device.stream(moved, 0), launch=SAMPLING_KERNELS * self.device.achieved.launch, tp=gather
        )
        return plus(logits, rest)

    def cache_read(self, context: float, layer: Layer | None = None) -> float:
        """Bytes that one GPU reads for one sequence in one block of this kind, or the last, and holds of it: what its
        mixer and MLP say that they keep."""
        layer = layer or self.spec.kinds(self.spec.layers - 1)
        return self.cache_bytes * cached_numbers(self.spec, self.tp, layer, context)

    def attend(self, rows: int, context: float, layer: Layer | None = None) -> Parts:
        """Of a block: one query of each of `rows` sequences."""
        read = self.device.stream(rows * self.cache_read(context, layer), 0)
        operations = self.block if layer is None else block(self.spec, self.tp, layer)
        if not operations.latent:
            return Parts(cache=read)
        latent = operations.attending.ups[-1][0].inputs
        features = 2 * latent + operations.attending.unread  # scores also meet the rotary key, values do not
        flops = 2.0 * rows * operations.attention.heads * features * context
        work = flops / (self.device.peak() * getattr(self.device.achieved, ATTENTION))
        return Parts(compute=work) if work > read else Parts(cache=read)

    @cached_property
    def _kinds(self) -> list[dict[Layer, int]]:
        """How many layers of each kind every stage has."""
        return [self.spec.counted(stage.layers) for stage in self.stages]

    def _loads(self, layer: Callable[[Layer], Parts], bottom: Parts, top: Parts) -> list[Parts]:
        """Of every stage, by what a block of each kind takes, and the ends."""
        by_kind = {kind: layer(kind) for kind in set().union(*self._kinds)}
        loads = []
        for stage, kinds in zip(self.stages, self._kinds, strict=True):
            blocks = (scaled(by_kind[kind], count) for kind, count in kinds.items())
            loads.append(plus(Parts(), *blocks, *[bottom] * stage.first, *[top] * stage.last))
        return loads

    def step(self, batch: int, context: float) -> Parts:
        """From one token of each of `batch` sequences to the next, when each has `context` tokens behind it.

        A pipeline has pp groups of sequences in flight, one per stage: a token's way is as long as without it, and
        every stage reads its weights once for each group.
        """
        rows, busy = math.ceil(batch / (self.pp * self.dp)), min(self.dp, batch)

        def layer(kind: Layer) -> Parts:
            return plus(self.rows(rows, kind, busy), self.attend(rows, context, kind))

        loads = self._loads(layer, self._bottom(rows), self._top(rows))
        parts = plus(*loads)
        # The last stage sends its tokens back to the first; a group waits where the one before it is not yet through.
        send = self.collective("send", "pp", 2.0 * rows * self.spec.hidden)
        slowest = min(self.pp, batch) * (max(load.total for load in loads) + send)
        parts = parts._replace(pp=self.pp * send + max(0.0, slowest - (parts.total + self.pp * send)))
        host = (
            HOST_SECONDS if self.graphs else HOST_SECONDS + max(0.0, self.spec.layers * software().host - parts.total)
        )
        return parts._replace(host=host)

    def prefill(self, prompt: int, prompts: int = 1) -> Prefill:
        """One prompt's latency; and the time of one among `prompts` that are there at once.

        A long prompt goes through the stages in chunks, one behind the other; short ones are computed together. Each
        group of dp computes its own, at once.
        """
        alone, _ = self._prompts(prompt, 1, 1)
        busy = min(self.dp, prompts)
        together = max(1, min(prompts // busy, PREFILL_CHUNK // prompt))
        return Prefill(alone + HOST_SECONDS, self._prompts(prompt, together, busy)[1] / (together * busy))

    def _prompts(self, prompt: int, count: int, busy: int) -> tuple[float, float]:
        """Seconds through all stages, and in the slowest of them; `count` prompts on each of `busy` groups."""
        spec, tokens = self.spec, prompt * count
        chunks = math.ceil(tokens / PREFILL_CHUNK)
        rows = math.ceil(tokens / chunks)
        # Without CUDA graphs the host launches every chunk.
        least = 0.0 if self.graphs else software().host * chunks

        def layer(kind: Layer) -> Parts:
            operations = block(spec, self.tp, kind)
            scores = operations.attention
            dim = (scores.head_dim + scores.v_dim) / 2
            sizes = (count, scores.heads, dim, prompt, scores.keys(prompt / 2))
            attend = self.device.attention(ATTENTION, *sizes)[0] if scores.heads else 0.0
            # Keys and values of earlier chunks are made of their latents again.
            earlier = mla_up_projections(operations, rows * (chunks - 1) // 2)[-1:] if chunks > 1 else []
            again = sum(self.matmul(*up, self.precision).total for up in earlier)
            return Parts(compute=max(least, (self.rows(rows, kind, busy).total + again) * chunks + attend))

        bottom, top = scaled(self._bottom(rows), chunks), self._top(count)
        spent = [load.total for load in self._loads(layer, bottom, top)]
        sends = (self.pp - 1) * self.collective("send", "pp", 2.0 * rows * spec.hidden)
        return sum(spent) / chunks + (chunks - 1) / chunks * max(spent) + sends, max(spent)


@lru_cache(maxsize=1024)
def _stages(spec: ModelSpec, pp: int) -> tuple[Stage, ...]:
    # A decode step reads the head's weights as it reads a block's, so balancing FLOPs also balances bytes.
    return stages_of(spec, Layout(pp=pp), 1)


# ---- memory ---------------------------------------------------------------------------------------------------------
# What a GPU that serves holds: weights, the cache of its sequences, a chunk of a prefill, and a margin.


MAX_SEQUENCES = 1 << 20  # sequences; nobody has more


class ServingMemory(NamedTuple):
    """Bytes of one GPU."""

    weights: float
    cache: float
    activations: float
    margin: float  # context, and holes between what is allocated; the cache is one pool and has none

    @property
    def total(self) -> float:
        return sum(self)


def memory_needed(replica: Replica, batch: int, tokens: int, prompt: int) -> ServingMemory:
    """On the stage that needs the most. Every sequence has the memory that it needs at its end."""
    spec, per_group = replica.spec, -(-batch // replica.dp)  # sequences of a tp group
    rows = max(min(PREFILL_CHUNK, prompt * per_group), -(-per_group // replica.pp))
    stream = 2.0 * rows * (3 * spec.hidden + _inner(replica))  # stream, normed stream, sum
    logits = 6.0 * -(-per_group // replica.pp) * spec.vocab  # in bf16 and float32
    by_stage = []
    for stage in replica.stages:
        weights, activations = stage_weights(replica, stage), stream + logits * stage.last
        cache = per_group * sum(replica.cache_read(tokens, spec.kinds(layer)) for layer in stage.layers)
        by_stage.append(
            ServingMemory(weights, cache, activations, CUDA_CONTEXT_BYTES + FRAGMENTATION * (weights + activations))
        )
    return max(by_stage, key=lambda memory: memory.total)


def _inner(replica: Replica) -> float:
    """Features of a token within a block: q, k, v; gate, up and their product, of experts those that it visits, with
    its copies on the way to them, as the fullest rank has them."""
    spec, attention = replica.spec, replica.block.attention
    heads = attention.width + 2 * attention.kv_width
    if spec.experts is None:
        return heads + 3 * spec.ffn / replica.tp
    experts, plain = spec.experts, 3 * spec.ffn / replica.tp * (len(spec.routed_layers) < spec.layers)
    visits = replica.uneven * replica.dp * experts.top_k / replica.ep
    routed = visits * (3 * experts.ffn * replica.ep / replica.ranks + 2 * spec.hidden)
    return heads + max(plain, routed + 3 * experts.shared_ffn / replica.tp)


def stage_weights(replica: Replica, stage: Stage) -> float:
    """Bytes of one rank."""
    spec, table = replica.spec, 2.0 * head(replica.spec, replica.tp).size
    share, kinds = (replica.tp, replica.ranks, replica.precision), spec.counted(stage.layers).items()
    layers = sum(count * _block_weights(spec, *share, kind) for kind, count in kinds)
    tables = stage.first + stage.last - (stage.first and stage.last and spec.tied)
    learned = 2.0 * spec.context * spec.hidden * (stage.first and spec.positions == "learned")
    return layers + tables * table + learned + 2.0 * spec.hidden * stage.last


@lru_cache(maxsize=4096)
def _block_weights(spec: ModelSpec, tp: int, ranks: int, precision: str, layer: Layer) -> float:
    """Bytes of a block on one rank: its part of the linears, and of the experts, which all ranks of a stage share;
    norms and routers are whole on every rank; biases hardly count."""
    parameters = sum(parameter.size for parameter in spec.block_parameters(spec.first(layer)))
    rest = parameters - sum(matmul.size for matmul in _low_precision_linears(spec, 1, layer))
    linears = sum(matmul.size / (ranks if matmul.experts else 1) for matmul in _low_precision_linears(spec, tp, layer))
    return linear_bytes(precision) * linears + 2.0 * rest


def _low_precision_linears(spec: ModelSpec, tp: int, layer: Layer) -> list[Matmul]:
    """The linears that may be in 8 bits: all but routers."""
    return [matmul for matmul in block(spec, tp, layer).matmuls if matmul.tp != "replicated_partial"]


def whole_weights(spec: ModelSpec, precision: str) -> float:
    """Bytes of the model, once."""
    kinds = spec.counted().items()
    linears = sum(count * sum(matmul.size for matmul in _low_precision_linears(spec, 1, kind)) for kind, count in kinds)
    return linear_bytes(precision) * linears + 2.0 * (spec.parameter_count - linears)


def whole_cache(spec: ModelSpec, cache_bytes: int, tokens: int = 1) -> float:
    """Bytes that so many tokens leave in the cache, over all layers; in those with a window no more than it holds."""
    return cache_bytes * sum(count * cached_numbers(spec, 1, layer, tokens) for layer, count in spec.counted().items())


def cached_numbers(spec: ModelSpec, tp: int, layer: Layer, tokens: float) -> float:
    """Numbers that a block caches for so many tokens on one of `tp` ranks."""
    caches = (ask(kind, "cache", spec, tp, wanted=WANTED_CACHE) for kind in layer.branches)
    return sum(cache.numbers(tokens) for cache in caches if cache is not None)


def memory_limit(device: Device) -> float:
    """Bytes of a GPU that a plan may fill."""
    return USABLE_FRACTION * device.accelerator.memory


def largest(replica: Replica, tokens: int, prompt: int) -> int:
    """Sequences that a replica has memory for; 0 where not even one."""
    space = memory_limit(replica.device)

    def too_many(batch: int) -> bool:
        return memory_needed(replica, batch, tokens, prompt).total > space

    high = 1
    while high < MAX_SEQUENCES and not too_many(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2 + 1, key=too_many) - 1
