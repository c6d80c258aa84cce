"""How far two results may be apart, and how that is measured.

Error of a tensor: max|a - b| / scale, b being the reference's; the scale is max|b|, with two exceptions.

A gradient that is zero in theory (the bias of k: a softmax does not see a constant added to all scores) is rounding
noise in both runs, and noise has no relative error. What was added up to make it is as large as the other gradients of
its block, so the largest of those is the scale: both have to be nothing beside it. Which gradients these are is found
in float64, whatever the dtype of the proof: those below 1e-10 of that scale (`zeros`). Any other gradient that is zero
everywhere, or is not there, fails.

A parameter is compared on the scale of max|b| or of the way that AdamW can have taken it, the sum of the rates,
whichever is larger: a bias starts at zero.

The bound, for K roundings on the longest way from a token to a gradient. Each is off by at most eps/2, so the two runs
differ by at most eps in each, and K of them, of either sign, grow like a random walk (Higham and Mary, SIAM J. Sci.
Comput. 41, 2019):
  float64   1e-10, which is asked; runs show about 1e-15
  float32   eps x sqrt(K), eps = 2^-23; the additions inside products count (`roundings`)
  bfloat16  eps x sqrt(K), eps = 2^-7; products add in float32, and only their results are rounded (`_results`)
For parameters this needs an optimizer that does not magnify noise: AdamW divides by sqrt(v) + eps, and with the usual
eps = 1e-8 a gradient that is rounding noise moves its weight a whole rate in a random direction. `OPTIMIZER` takes an
eps of the size of the gradients, so that the step is about as exact as they are, and also about linear in them: a
gradient that is wrong by a factor is not normalised away.
"""

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from fivefold.job.config import Dtype, Job
from fivefold.job.learning_rate import learning_rate
from fivefold.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "clip": 0.5, "warmup": 1}  # a clip below the first norms: it acts
_ZERO = 1e-10


class Error(NamedTuple):
    """One comparison. `value` is infinite where there is nothing to compare with."""

    what: str  # loss | norm | gradient | parameter
    name: str  # of the parameter
    step: int  # from 1
    value: float
    bound: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # False for NaN

    def __str__(self) -> str:
        what = {"norm": "gradient norm", "gradient": "gradient of"}.get(self.what, self.what)
        subject = f"the {what} {self.name}".rstrip()
        how = self.note or f"is off by {self.value:.2g}, and {self.bound:.2g} is allowed"
        return f"{subject} {how} (step {self.step})"


def bound_of(job: Job) -> float:
    spec, tokens = job.model, job.train.batch * job.data.seq
    dtype: Dtype = job.train.dtype
    if dtype == "float64":
        return 1e-10
    if dtype == "float32":
        return 2.0**-23 * math.sqrt(roundings(spec, tokens, job.data.seq))
    return 2.0**-7 * math.sqrt(_results(spec))


def roundings(spec: ModelSpec, tokens: int, seq: int) -> int:
    """Additions one after another: through each layer forward and back, the vocabulary, and the sum over tokens."""
    heads = spec.heads * spec.head_dim
    # Norm, q/k/v; scores, mixture, o; norm, gate; down.
    layer = 2 * spec.hidden + (spec.head_dim + seq + heads) + 2 * spec.hidden + spec.ffn
    return 2 * spec.layers * layer + spec.vocab + spec.hidden + tokens


def _results(spec: ModelSpec) -> int:
    """Tensors that are rounded one after another: norm, q, rotation, scores, o, sum; norm, gate, product, down, sum."""
    return 2 * (11 * spec.layers + 3)


# ---- the comparisons -----------------------------------------------------------------------------------------------


def number(what: str, step: int, found: float, wanted: float, bound: float) -> Error:
    return Error(what, "", step, abs(found - wanted) / (abs(wanted) or 1.0), bound)


def zeros(gradients: dict[str, "Tensor"]) -> set[str]:
    """The gradients, in float64, that are nothing but rounding noise."""
    largest = _largest(gradients)
    return {name for name, gradient in gradients.items() if _max(gradient) <= _ZERO * largest[_block(name)]}


def gradients(
    found: dict[str, "Tensor"], wanted: dict[str, "Tensor"], zero: Collection[str], step: int, bound: float
) -> list[Error]:
    """`zero` are the names of those that are zero in theory."""
    largest = _largest(wanted)
    errors = []
    for name, tensor in wanted.items():
        scale = largest[_block(name)] if name in zero else _max(tensor)
        if name not in found:
            errors.append(Error("gradient", name, step, math.inf, bound, "is missing"))
        elif name not in zero and scale > 0.0 and _max(found[name]) == 0.0:
            errors.append(Error("gradient", name, step, math.inf, bound, "is zero"))
        else:
            errors.append(_tensors("gradient", name, step, found[name], tensor, scale, bound))
    return errors


def _largest(gradients: dict[str, "Tensor"]) -> dict[str, float]:
    """The largest entry in each block."""
    largest: dict[str, float] = {}
    for name, gradient in gradients.items():
        largest[_block(name)] = max(largest.get(_block(name), 0.0), _max(gradient))
    return largest


def parameters(found: dict[str, "Tensor"], wanted: dict[str, "Tensor"], job: Job, bound: float) -> list[Error]:
    steps = job.train.steps
    way = sum(learning_rate(job.optimizer, step, steps) for step in range(steps))
    return [
        _tensors("parameter", name, steps, found[name], tensor, max(_max(tensor), way), bound)
        if name in found
        else Error("parameter", name, steps, math.inf, bound, "is missing")
        for name, tensor in wanted.items()
    ]


def worst(errors: Iterable[Error]) -> Error | None:
    """The largest multiple of its bound; NaN is larger than anything."""
    return max(errors, key=lambda e: math.inf if math.isnan(e.value) else e.value / e.bound, default=None)


def _tensors(what: str, name: str, step: int, a: "Tensor", b: "Tensor", scale: float, bound: float) -> Error:
    if a.shape != b.shape:
        return Error(what, name, step, math.inf, bound, f"has shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    difference = _max(a.double() - b.double())
    return Error(what, name, step, difference / scale if scale else difference, bound)


def _max(tensor: "Tensor") -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _block(name: str) -> str:
    """'layers.3' of 'layers.3.attention.k.bias'; what stands outside the layers is one block."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
