"""What a step of a job must do on a device, each part measured there alone: `bench train --floor`.

Products, grouped products and attention run in the job's own shapes and dtype, as often as a step needs them, in 16-bit
or float32 numbers (8-bit ones have their own rates). All else is bound by memory: the fewest bytes that it can read and
write, at the speed of a long sum of two vectors. Nothing waits, and the load of experts is even. A part can be a little
quicker in a step than alone, where the same product runs without a pause and the device slows down to stay cool.
"""

from dataclasses import dataclass

from fivefold.job.config import Job
from fivefold.layout.sharding import slices
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block, head

_MASTER = 4  # bytes of a master, and of a moment


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
class FloorPart:
    """What a step must do, and how long it takes alone."""

    name: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def pace(self) -> str:
        if self.flops:
            return f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s"
        return f"{self.bytes / self.seconds / 1e12:.3g} TB/s"


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
    wide = {"bfloat16": 2, "float64": 8}.get(job.train.dtype, 4)
    gradient = wide if job.layout.microbatches == 1 else _MASTER  # several are added up in full precision
    copy = wide if wide < _MASTER else 0  # of the weight, that the model has beside its master
    state = 6 * _MASTER + gradient + copy  # the master and both moments are read and written
    blocks = model.dense_layers * _features(model, dense=True)
    blocks += (model.layers - model.dense_layers) * _features(model, dense=model.experts is None)
    return {
        "AdamW": model.parameter_count * state,
        "the gradient norm": model.parameter_count * gradient,
        "between products": tokens * wide * (blocks + 3 * model.vocab),
    }


def _features(model: ModelSpec, dense: bool) -> float:
    """Numbers that a block reads and writes for a token outside of its products, forward and backward."""
    hidden, attention, experts = model.hidden, block(model).attention, model.experts
    norms = 2 * (2 + 3) * hidden  # in and out; in, the gradient, out
    rotations = 4 * (attention.width + attention.kv_width) if model.positions == "rope" else 0
    if dense or experts is None:
        return norms + rotations + (3 + 5) * model.ffn
    slots = experts.top_k * hidden
    moved = (hidden + slots) + (slots + hidden)  # tokens to their slots, and back to tokens
    moved += (2 * slots + hidden) + (slots + hidden)  # the same backward; weights' gradients read what experts said
    return norms + rotations + moved + (3 + 5) * experts.top_k * experts.ffn + (3 + 5) * experts.shared_ffn
