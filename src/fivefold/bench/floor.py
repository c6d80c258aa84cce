"""The least that a step of a job can take on a device, from rates that are measured there: `bench train --floor`.

Products, grouped products and attention run alone, in the job's own shapes, and as often as a step needs them. All else
is bound by memory: the fewest bytes that it can read and write, at the speed of a long sum of two vectors. Nothing
waits, nothing is launched, the load of experts is even, and no kernel does less than one thing.
"""

from dataclasses import dataclass

from fivefold.job.config import Job
from fivefold.layout.sharding import slices
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block, head

_HALF, _FULL = 2, 4  # bytes of a bfloat16 and of a float32


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


@dataclass(frozen=True)
class Part:
    """What a step must do, and how long it takes alone."""

    name: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def pace(self) -> str:
        if self.flops:
            return f"{self.flops / self.seconds / 1e12:.0f} TFLOP/s"
        return f"{self.bytes / self.seconds / 1e12:.2f} TB/s"


def products(job: Job) -> list[Product]:
    """Of a step of a job on one device."""
    model, count = job.model, job.layout.microbatches
    tokens = job.train.batch * job.data.seq // count
    found: list[Product] = []
    for dense, layers in ((True, model.dense_layers), (False, model.layers - model.dense_layers)):
        for one in block(model, dense=dense).matmuls if layers else ():
            part = "products of experts" if one.experts else "products of blocks"
            rows = tokens * max(1, one.chosen)
            found.append(Product(part, rows, one.inputs, one.outputs, layers * count, one.experts))
    top, parts = head(model), slices(tokens, model.vocab)
    times = count * tokens / len(parts[0])
    return [*found, Product("products of the head", len(parts[0]), top.inputs, top.outputs, times)]


def memory(job: Job) -> dict[str, float]:
    """The fewest bytes of what is bound by memory."""
    model, tokens = job.model, job.train.batch * job.data.seq
    state = model.parameter_count * (6 * _FULL + 2 * _HALF)  # both moments and the master, twice; gradient and weight
    return {
        "AdamW": state,
        "the gradient norm": model.parameter_count * _HALF,
        "between products": tokens * _HALF * (model.layers * _features(model) + 3 * model.vocab),
    }


def _features(model: ModelSpec) -> float:
    """Numbers that a block reads and writes for a token outside of its products, forward and backward."""
    hidden, attention, experts = model.hidden, block(model).attention, model.experts
    norms = 2 * (2 + 3) * hidden  # in and out; in, the gradient, out
    rotations = 4 * (attention.width + attention.kv_width) if model.positions == "rope" else 0
    if experts is None:
        return norms + rotations + (3 + 5) * model.ffn
    slots = experts.top_k * hidden
    moved = (hidden + slots) + (slots + hidden)  # tokens to their slots, and back to tokens
    moved += (2 * slots + hidden) + (slots + hidden)  # the same backward; weights' gradients read what experts said
    return norms + rotations + moved + (3 + 5) * experts.top_k * experts.ffn + (3 + 5) * experts.shared_ffn
