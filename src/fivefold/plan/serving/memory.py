"""What a GPU that serves holds: weights, the cache of its sequences, a chunk of a prefill, and a margin."""

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.stages import Stage
from fivefold.plan.cost.experts import plain_layers
from fivefold.plan.cost.footprint import CONTEXT, FRAGMENTATION, HEADROOM
from fivefold.plan.cost.kernels import Device
from fivefold.plan.serving.parts import linear_bytes
from fivefold.plan.serving.step import CHUNK, Replica
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Matmul, block, head

MOST = 1 << 20  # sequences; nobody has more


class Held(NamedTuple):
    """Bytes of one GPU."""

    weights: float
    cache: float
    activations: float
    margin: float  # context, and holes between what is allocated; the cache is one pool and has none

    @property
    def total(self) -> float:
        return sum(self)


def held(replica: Replica, batch: int, tokens: int, prompt: int) -> Held:
    """On the stage that needs the most. Every sequence has the memory that it needs at its end."""
    spec, each = replica.spec, -(-batch // replica.dp)  # sequences of a tp group
    rows = max(min(CHUNK, prompt * each), -(-each // replica.pp))
    stream = 2.0 * rows * (3 * spec.hidden + _inner(replica))  # stream, normed stream, sum
    logits = 6.0 * -(-each // replica.pp) * spec.vocab  # in bf16 and float32
    found = []
    for stage in replica.stages:
        weights, activations = stage_weights(replica, stage), stream + logits * stage.last
        cache = each * len(stage.layers) * replica.cache_read(tokens)
        found.append(Held(weights, cache, activations, CONTEXT + FRAGMENTATION * (weights + activations)))
    return max(found, key=lambda one: one.total)


def _inner(replica: Replica) -> float:
    """Features of a token within a block: q, k, v; gate, up and their product, of experts those that it visits, with
    its copies on the way to them, as the fullest rank has them."""
    spec, attention = replica.spec, replica.block.attention
    heads = attention.width + 2 * attention.kv_width
    if spec.experts is None:
        return heads + 3 * spec.ffn / replica.tp
    own, plain = spec.experts, 3 * spec.ffn / replica.tp * (spec.dense_layers > 0)
    visits = replica.uneven * replica.dp * own.top_k / replica.ep
    routed = visits * (3 * own.ffn * replica.ep / replica.ranks + 2 * spec.hidden)
    return heads + max(plain, routed + 3 * own.shared_ffn / replica.tp)


def stage_weights(replica: Replica, stage: Stage) -> float:
    """Bytes of one rank."""
    spec, table = replica.spec, 2.0 * head(replica.spec, replica.tp).size
    few, share = plain_layers(spec, stage), (replica.tp, replica.ranks, replica.precision)
    layers = few * _block_weights(spec, *share, dense=True) + (len(stage.layers) - few) * _block_weights(spec, *share)
    tables = stage.first + stage.last - (stage.first and stage.last and spec.tied)
    learned = 2.0 * spec.context * spec.hidden * (stage.first and spec.positions == "learned")
    return layers + tables * table + learned + 2.0 * spec.hidden * stage.last


@lru_cache(maxsize=4096)
def _block_weights(spec: ModelSpec, tp: int, ranks: int, precision: str, dense: bool = False) -> float:
    """Bytes of a block on one rank: its part of the linears, and of the experts, which all ranks of a stage share;
    norms and routers are whole on every rank; biases hardly count."""
    every = sum(one.size for one in spec.block_parameters(0 if dense else spec.layers - 1))
    rest = every - sum(one.size for one in _narrow(spec, 1, dense))
    own = sum(one.size / (ranks if one.experts else 1) for one in _narrow(spec, tp, dense))
    return linear_bytes(precision) * own + 2.0 * rest


def _narrow(spec: ModelSpec, tp: int, dense: bool) -> list[Matmul]:
    """The linears that may be in 8 bits: all but routers."""
    return [one for one in block(spec, tp, dense).matmuls if one.tp != "tokens"]


def whole_weights(spec: ModelSpec, precision: str) -> float:
    """Bytes of the model, once."""
    few = spec.dense_layers if spec.experts else 0
    per_block = [sum(one.size for one in _narrow(spec, 1, dense)) for dense in (False, True)]
    linears = (spec.layers - few) * per_block[0] + few * per_block[1]
    return linear_bytes(precision) * linears + 2.0 * (spec.parameter_count - linears)


def whole_cache(spec: ModelSpec, cache_bytes: int, tokens: int = 1) -> float:
    """Bytes that so many tokens leave in the cache, over all layers; in those with a window no more than it holds."""
    own = block(spec).attention
    return spec.layers * own.cached * cache_bytes * own.keys(tokens)


def memory_limit(device: Device) -> float:
    """Bytes of a GPU that a plan may fill."""
    return HEADROOM * device.accelerator.memory


def largest(replica: Replica, tokens: int, prompt: int) -> int:
    """Sequences that a replica has memory for; 0 where not even one."""
    space = memory_limit(replica.device)

    def too_many(batch: int) -> bool:
        return held(replica, batch, tokens, prompt).total > space

    high = 1
    while high < MOST and not too_many(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2 + 1, key=too_many) - 1
