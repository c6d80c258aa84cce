"""How far two results may be apart, and how that is measured.

The error of a tensor is max|a - b| / scale, where b is the reference's. The scale is max|b|, with two exceptions.

A gradient may be zero in theory: a softmax does not see a constant that is added to all scores, so the bias of k has no
gradient. Both runs then hold rounding noise, and noise has no relative error. Its summands are as large as the other
gradients of its block, so the largest of those is the scale. `zeros` finds these gradients in float64, whatever the
dtype of the proof: they are below 1e-10 of that scale. Any other gradient that is zero everywhere or missing fails.

A parameter is compared on the scale of max|b| or of the distance that AdamW can have moved it (the sum of the learning
rates), whichever is larger, because a bias starts at zero.

The bound counts K roundings on the longest path from a token to a gradient. Each rounding is off by at most eps/2, so
the two runs differ by at most eps in each. K such differences of either sign grow like a random walk (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019):
  float64   1e-10, as the project asks; runs show about 1e-15
  float32   eps x sqrt(K), eps = 2^-23; the additions inside matmuls count (`roundings`)
  bfloat16  eps x sqrt(K), eps = 2^-7; matmuls add in float32 and only their results are rounded (`bound_of`)

This bound is relative to the result, and so holds only for gradients that are about as large as what is summed to make
them. Where the summands cancel (a LayerNorm over few channels, a q/k norm over a short head, a nearly uniform softmax)
the same roundings are large next to the result. To first order the error of a run is e = sum_i J_i d_i: d_i is the
rounding of the i-th intermediate value, and J_i the derivative of the gradient by that value. Two correct runs have the
same J and independent d, so their errors have the same spread, whatever the cancellation. The reference measures that
spread (`Reference.noise`): it runs in float64 on the same rounded weights, which gives the true gradient, and several
times in the dtype of the proof, each time with every weight moved by one rounding, which draws all the d_i anew. The
noise of a tensor is the largest distance from the true gradient in any run and step. A layout's distance to the
reference is the difference of two such errors: at most twice the noise where the draws are typical. `SPREAD` is 4,
since a handful of draws can all be lucky. A gradient may be off by its bound or by SPREAD x noise, whichever is larger.
A wrong term is as large as a summand, and that is 1/eps times as large as the noise: it is still found.

For parameters the bound needs an optimizer that does not magnify noise. AdamW divides by sqrt(v) + eps, and with the
usual eps = 1e-8 a gradient that is rounding noise moves its weight by a whole learning rate in a random direction.
`OPTIMIZER` takes an eps of the size of the gradients. The step is then about as exact as they are, and about linear in
them: a gradient that is wrong by a factor is not normalised away.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fivefold.job.config import Job
from fivefold.optim.base import learning_rate
from fivefold.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "clip": 0.5, "warmup": 1}  # a clip below the first norms: it acts
SPREAD = 4.0  # times the rounding noise of the reference
_ZERO = 1e-10
_FEW, _FEW_OF_ALL = 8, 0.02  # tokens that may stray where no draw of the reference's had one


class Error(NamedTuple):
    """One comparison. `value` is infinite where there is nothing to compare with."""

    what: str  # loss | norm | gradient | parameter; of experts: routing | load | bias
    name: str  # of the parameter
    step: int  # from 1
    value: float
    bound: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # False for NaN

    def __str__(self) -> str:
        words = {"norm": "gradient norm", "gradient": "gradient of", "routing": "routing of", "load": "load of"}
        what = words.get(self.what, self.what)
        subject = f"the {what} {self.name}".rstrip()
        how = self.note or f"is off by {self.value:.2g}, and {self.bound:.2g} is allowed"
        return f"{subject} {how} (step {self.step})"


def bound_of(job: Job) -> float:
    if job.train.dtype == "float64":
        return 1e-10
    if job.train.dtype == "float32":
        return 2.0**-23 * math.sqrt(roundings(job.model, job.train.batch * job.data.seq, job.data.seq))
    # Tensors are rounded one after another. Norm, q, rotation, scores, o, sum; norm, gate, product, down, sum; and
    # the weighted sum of experts.
    each = 11 if job.model.experts is None else 12
    return 2.0**-7 * math.sqrt(2 * (each * job.model.layers + 3))


def replays(job: Job) -> bool:
    """Whether ranks send tokens where the reference did: a rounding may decide between experts of the same score."""
    return job.train.dtype != "float64"


def strays_allowed(job: Job, measured: int) -> float:
    """Tokens of a layer and step whose scores may choose other experts. `measured`: in the reference's own runs."""
    if not replays(job):
        return 0.0
    return SPREAD * measured + max(_FEW, _FEW_OF_ALL * job.train.batch * job.data.seq)


def router_name(layer: int) -> str:
    return f"layers.{layer}.mlp.router"


def roundings(spec: ModelSpec, tokens: int, seq: int) -> int:
    """Additions one after another: through each layer forward and back, the vocabulary, and the sum over tokens."""
    heads = spec.heads * spec.head_dim
    # Norm, q/k/v; scores, mixture, o; norm, gate (or router); down, and the sum over experts.
    inner = spec.ffn if spec.experts is None else max(spec.ffn, spec.experts.ffn + spec.experts.top_k)
    layer = 2 * spec.hidden + (spec.head_dim + seq + heads) + 2 * spec.hidden + inner
    return 2 * spec.layers * layer + spec.vocab + spec.hidden + tokens


# ---- the comparisons -----------------------------------------------------------------------------------------------


def number(what: str, step: int, actual: float, expected: float, bound: float) -> Error:
    return Error(what, "", step, abs(actual - expected) / (abs(expected) or 1.0), bound)


def counts(name: str, step: int, actual: "Tensor", expected: "Tensor") -> Error:
    """The load of experts: whole numbers, equal or not."""
    differ = (actual.cpu() != expected).nonzero()[:, 0].tolist()
    note = ""
    if differ:
        expert, several = differ[0], f"; {len(differ)} experts differ" if len(differ) > 1 else ""
        note = f"has {int(actual[expert])} tokens for expert {expert}, and one process {int(expected[expert])}{several}"
    return Error("load", name, step, float(len(differ)), 0.0, note)


def bias(name: str, step: int, actual: "Tensor", expected: "Tensor", rate: float, bound: float) -> Error:
    """What helps experts to be chosen moves by `rate` in a step; that is its scale."""
    return _tensors("bias", name, step, actual.cpu(), expected, max(_max(expected), rate), bound)


def zeros(gradients: Mapping[str, "Tensor"], spec: ModelSpec) -> set[str]:
    """The gradients, in float64, that are nothing but rounding noise."""
    largest = _largest(gradients, spec)
    return {name for name, gradient in gradients.items() if _max(gradient) <= _ZERO * largest[name]}


def gradients(
    actual: Mapping[str, "Tensor"],
    expected: Mapping[str, "Tensor"],
    step: int,
    bound: float,
    spec: ModelSpec,
    zero: Collection[str] = (),
    noise: Mapping[str, float] | None = None,
) -> list[Error]:
    """`zero` names the gradients that are zero in theory; `noise` has the rounding error of each gradient."""
    largest = _largest(expected, spec)
    errors = []
    for name, tensor in expected.items():
        scale = largest[name] if name in zero else _max(tensor)
        lost = SPREAD * (noise or {}).get(name, 0.0)
        allowed = max(bound, lost / scale) if scale else bound
        if name not in actual:
            errors.append(Error("gradient", name, step, math.inf, allowed, "is missing"))
        elif name not in zero and scale > lost and _max(actual[name]) == 0.0:
            errors.append(Error("gradient", name, step, math.inf, allowed, "is zero"))
        else:
            errors.append(_tensors("gradient", name, step, actual[name], tensor, scale, allowed))
    return errors


def distances(actual: Mapping[str, "Tensor"], exact: Mapping[str, "Tensor"]) -> dict[str, float]:
    """The largest difference in each tensor, absolute."""
    return {name: _max(actual[name].double() - tensor) for name, tensor in exact.items()}


def _largest(gradients: Mapping[str, "Tensor"], spec: ModelSpec) -> dict[str, float]:
    """For each gradient the largest entry in its block; what lies below and above the layers is one block."""
    block = {parameter.name: parameter.layer for parameter in spec.parameters()}
    largest: dict[int | None, float] = {}
    for name, gradient in gradients.items():
        largest[block[name]] = max(largest.get(block[name], 0.0), _max(gradient))
    return {name: largest[block[name]] for name in gradients}


def parameters(actual: Mapping[str, "Tensor"], expected: Mapping[str, "Tensor"], job: Job, bound: float) -> list[Error]:
    steps = job.train.steps
    distance = sum(learning_rate(job.optimizer, step, steps) for step in range(steps))
    return [
        _tensors("parameter", name, steps, actual[name], tensor, max(_max(tensor), distance), bound)
        if name in actual
        else Error("parameter", name, steps, math.inf, bound, "is missing")
        for name, tensor in expected.items()
    ]


def worst(errors: Iterable[Error]) -> Error | None:
    """The largest multiple of its bound; NaN is larger than anything."""

    def multiple(error: Error) -> float:
        if math.isnan(error.value):
            return math.inf
        return error.value / error.bound if error.bound else math.inf * error.value if error.value else 0.0

    return max(errors, key=multiple, default=None)


def _tensors(what: str, name: str, step: int, a: "Tensor", b: "Tensor", scale: float, bound: float) -> Error:
    if a.shape != b.shape:
        return Error(what, name, step, math.inf, bound, f"has shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    difference = _max(a.double() - b.double())
    return Error(what, name, step, difference / scale if scale else difference, bound)


def _max(tensor: "Tensor") -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
