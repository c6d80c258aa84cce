"""What a GPU holds when it serves: weights, the cache of its sequences, a chunk of a prefill, and a margin.

held(replica, batch, tokens, prompt).total     # bytes on the fullest stage, with `batch` sequences of `tokens` each
largest(replica, tokens, prompt)               # sequences that fit
"""

from dataclasses import asdict, dataclass
from typing import Any

from fivefold.layout.stages import Stage
from fivefold.plan.cost.footprint import CONTEXT, FRAGMENTATION, HEADROOM
from fivefold.plan.cost.kernels import Device
from fivefold.plan.serving.step import CHUNK, Replica
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block, head

MOST = 1 << 20  # sequences; nobody has more


@dataclass(frozen=True)
class Held:
    """Bytes of one GPU."""

    weights: float
    cache: float
    activations: float
    margin: float  # context, and holes between what is allocated; the cache is one pool and has none

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.activations + self.margin

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


def held(replica: Replica, batch: int, tokens: int, prompt: int) -> Held:
    """On the stage that needs the most. Every sequence has the memory that it needs at its end."""
    stages = (_of_stage(replica, stage, batch, tokens, prompt) for stage in replica.stages)
    return max(stages, key=lambda one: one.total)


def _of_stage(replica: Replica, stage: Stage, batch: int, tokens: int, prompt: int) -> Held:
    spec = replica.spec
    weights = stage_weights(replica, stage)
    cache = batch * tokens * len(stage.layers) * replica.cache_read(1)
    rows = max(min(CHUNK, prompt * batch), -(-batch // replica.pp))
    attention, down = replica.block.attention, replica.block.matmuls[-1]
    own = attention.width + 2 * attention.kv_width + 3 * down.inputs
    activations = 2.0 * rows * (3 * spec.hidden + own)  # stream, normed stream, sum; q k v; gate, up and their product
    if stage.last:
        activations += 6.0 * -(-batch // replica.pp) * spec.vocab  # logits in bf16 and float32
    return Held(weights, cache, activations, CONTEXT + FRAGMENTATION * (weights + activations))


def stage_weights(replica: Replica, stage: Stage) -> float:
    """Bytes of one tp rank."""
    spec, tp, width = replica.spec, replica.tp, linear_bytes(replica.precision)
    rest = spec.block_parameter_count - block(spec).weights  # norms are whole on every rank; biases hardly count
    layer = width * replica.block.weights + 2 * rest
    table = 2.0 * head(spec, tp).size
    tables = stage.first + stage.last - (stage.first and stage.last and spec.tied)
    learned = 2.0 * spec.context * spec.hidden * (stage.first and spec.positions == "learned")
    return len(stage.layers) * layer + tables * table + learned + 2.0 * spec.hidden * stage.last


def whole_weights(spec: ModelSpec, precision: str) -> float:
    """Bytes of the model, once."""
    linears = block(spec).weights * spec.layers
    return linear_bytes(precision) * linears + 2.0 * (spec.parameter_count - linears)


def whole_cache(spec: ModelSpec, cache_bytes: int) -> int:
    """Bytes that a token leaves in the cache, over all layers."""
    return 2 * spec.layers * block(spec).attention.kv_width * cache_bytes


def linear_bytes(precision: str) -> int:
    return 1 if precision == "fp8" else 2


def memory_limit(device: Device) -> float:
    """Bytes of a GPU that a plan may fill."""
    return HEADROOM * device.accelerator.memory


def largest(replica: Replica, tokens: int, prompt: int) -> int:
    """Sequences that a replica has memory for; 0 where not even one."""
    space = memory_limit(replica.device)

    def fits(batch: int) -> bool:
        return held(replica, batch, tokens, prompt).total <= space

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
