"""The error of a layout's results against one process, and the tolerances for it.

The error of a tensor is max|a - b| / scale, where b is the reference's. The scale is max|b|, with two exceptions.

A gradient may be zero in theory: a softmax does not see a constant that is added to all scores, so the bias of k has no
gradient. Both runs then have rounding noise in it, and noise has no relative error. Its summands are as large as the
other gradients of its block, so the largest of those is the scale. `zero_gradients` finds these gradients in float64,
whatever the dtype of the proof: they are below 1e-10 of that scale. Any other gradient that is zero everywhere or
missing fails.

A parameter is compared on the scale of max|b| or of the distance that AdamW can have moved it (the sum of the learning
rates), whichever is larger, because a bias starts at zero.

The tolerance counts K roundings on the longest path from a token to a gradient. Each rounding is off by at most eps/2,
so the two runs differ by at most eps in each. K such differences of either sign grow like a random walk (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019):
  float64   1e-10, as the project asks; runs show about 1e-15
  float32   eps x sqrt(K), eps = 2^-23; the additions inside matmuls count (`longest_sum`)
  bfloat16  eps x sqrt(K), eps = 2^-7; matmuls add in float32 and only their results are rounded (`tolerance_of`)

This tolerance is relative to the result, and so is right only for gradients that are about as large as their summands.
Where the summands cancel (a LayerNorm over few channels, a q/k norm over a short head, a nearly uniform softmax) the
same roundings are large next to the result. To first order the error of a run is e = sum_i J_i d_i: d_i is the
rounding of the i-th intermediate value, and J_i the derivative of the gradient by that value. Two correct runs have the
same J and independent d, so their errors have the same spread, whatever the cancellation. The reference measures that
spread (`Reference.noise`): it runs in float64 on the same rounded weights, which gives the true gradient, and several
times in the dtype of the proof, each time with every weight moved by one rounding, which draws all the d_i anew. The
noise of a tensor is the largest distance from the true gradient in any run and step. A layout's distance to the
reference is the difference of two such errors: at most twice the noise where the draws are typical. `NOISE_FACTOR`
is 4, since a handful of draws can all be lucky. A gradient may be off by that tolerance or by NOISE_FACTOR x noise,
whichever is larger. A wrong term is as large as a summand, and that is 1/eps times as large as the noise: it is still
found.

For parameters the tolerance needs an optimizer that does not magnify noise. AdamW divides by sqrt(v) + eps, and with
the usual eps = 1e-8 a gradient that is rounding noise moves its weight by a whole learning rate in a random direction.
`OPTIMIZER` takes an eps of the size of the gradients. The step is then about as exact as they are, and about linear in
them: a gradient that is wrong by a factor is not normalised away.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fivefold.job.config import Job
from fivefold.optim.base import group_of
from fivefold.optim.lr_schedule import learning_rate
from fivefold.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "clip": 0.5, "warmup": 1}  # a clip below the first norms: it acts
NOISE_FACTOR = 4.0  # times the rounding noise of the reference
_NOISE_FLOOR = 1e-10  # of the largest gradient of its block: what is below it is rounding noise
_MIN_MISMATCHES, _MISMATCHED_SHARE = 8, 0.02  # tokens that may mismatch though none did in the reference's own runs


class ValueComparison(NamedTuple):
    """A number or tensor of a layout against the reference's. `error` is infinite where one of the two is missing."""

    quantity: str  # loss | norm | gradient | parameter; of experts: routing | load | bias
    name: str  # of the parameter or router; "": of the loss or norm
    step: int  # from 1
    error: float
    tolerance: float
    note: str = ""  # says in words what differs, in place of the error

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        words = {"norm": "gradient norm", "gradient": "gradient of", "routing": "routing of", "load": "load of"}
        subject = f"the {words.get(self.quantity, self.quantity)} {self.name}".rstrip()
        difference = self.note or f"is off by {self.error:.2g}, and {self.tolerance:.2g} is allowed"
        return f"{subject} {difference} (step {self.step})"


def tolerance_of(job: Job) -> float:
    """The relative error that a comparison may have in the job's dtype."""
    if job.train.dtype == "float64":
        return 1e-10
    if job.train.dtype == "float32":
        return 2.0**-23 * math.sqrt(longest_sum(job.model, job.train.batch * job.data.seq, job.data.seq))
    # Tensors are rounded one after another. Norm, q, rotation, scores, o, sum; norm, gate, product, down, sum; and
    # the weighted sum of experts.
    per_layer = 11 if job.model.experts is None else 12
    return 2.0**-7 * math.sqrt(2 * (per_layer * job.model.layers + 3))


def replays_routing(job: Job) -> bool:
    """Whether ranks send tokens where the reference did: a rounding may decide between experts of the same score."""
    return job.train.dtype != "float64"


def mismatch_tolerance(job: Job, reference_mismatches: int) -> float:
    """How many tokens of a layer and step may have scores that choose other experts than the reference did.

    `reference_mismatches`: the most that the reference's own runs had, which differ by rounding.
    """
    if not replays_routing(job):
        return 0.0
    return NOISE_FACTOR * reference_mismatches + max(
        _MIN_MISMATCHES, _MISMATCHED_SHARE * job.train.batch * job.data.seq
    )


def longest_sum(spec: ModelSpec, tokens: int, seq: int) -> int:
    """Additions one after another: through each layer forward and back, the vocabulary, and the sum over tokens."""
    heads = spec.heads * spec.head_dim
    # Norm, q/k/v; scores, weighted values, o; norm, gate (or router); down, and the sum over experts.
    inner = spec.ffn if spec.experts is None else max(spec.ffn, spec.experts.ffn + spec.experts.top_k)
    layer = 2 * spec.hidden + (spec.head_dim + seq + heads) + 2 * spec.hidden + inner
    return 2 * spec.layers * layer + spec.vocab + spec.hidden + tokens


# ---- the comparisons -----------------------------------------------------------------------------------------------


def compare_scalars(quantity: str, step: int, actual: float, expected: float, tolerance: float) -> ValueComparison:
    """Compares losses or gradient norms."""
    return ValueComparison(quantity, "", step, abs(actual - expected) / (abs(expected) or 1.0), tolerance)


def compare_loads(router: str, step: int, actual: "Tensor", expected: "Tensor") -> ValueComparison:
    """Compares the tokens of each expert: whole numbers, which must be equal."""
    differing = (actual.cpu() != expected).nonzero()[:, 0].tolist()
    note = ""
    if differing:
        expert = differing[0]
        note = f"has {int(actual[expert])} tokens for expert {expert}, and one process {int(expected[expert])}"
        if len(differing) > 1:
            note += f"; {len(differing)} experts differ"
    return ValueComparison("load", router, step, float(len(differing)), 0.0, note)


def compare_biases(
    name: str, step: int, actual: "Tensor", expected: "Tensor", rate: float, tolerance: float
) -> ValueComparison:
    """Compares the biases that balance the experts. They move by `rate` in a step, so the scale is at least that."""
    scale = max(_max_abs(expected), rate)
    return _compare_tensors("bias", name, step, actual.cpu(), expected, scale, tolerance)


def zero_gradients(gradients: Mapping[str, "Tensor"], spec: ModelSpec) -> set[str]:
    """The names of those gradients, in float64, that are nothing but rounding noise."""
    largest = _largest_in_block(gradients, spec)
    return {name for name, gradient in gradients.items() if _max_abs(gradient) <= _NOISE_FLOOR * largest[name]}


def compare_gradients(
    actual: Mapping[str, "Tensor"],
    expected: Mapping[str, "Tensor"],
    step: int,
    tolerance: float,
    spec: ModelSpec,
    zero: Collection[str] = (),
    noise: Mapping[str, float] | None = None,
) -> list[ValueComparison]:
    """Compares each gradient of `expected`; one that `actual` lacks fails.

    `zero` names the gradients that are zero in theory; `noise` has the rounding error of each gradient.
    """
    largest = _largest_in_block(expected, spec)
    comparisons = []
    for name, tensor in expected.items():
        scale = largest[name] if name in zero else _max_abs(tensor)
        noise_limit = NOISE_FACTOR * (noise or {}).get(name, 0.0)  # absolute
        limit = max(tolerance, noise_limit / scale) if scale else tolerance
        if name not in actual:
            comparisons.append(ValueComparison("gradient", name, step, math.inf, limit, "is missing"))
        elif name not in zero and scale > noise_limit and _max_abs(actual[name]) == 0.0:
            comparisons.append(ValueComparison("gradient", name, step, math.inf, limit, "is zero"))
        else:
            comparisons.append(_compare_tensors("gradient", name, step, actual[name], tensor, scale, limit))
    return comparisons


def max_differences(actual: Mapping[str, "Tensor"], exact: Mapping[str, "Tensor"]) -> dict[str, float]:
    """The largest difference in each tensor, absolute."""
    return {name: _max_abs(actual[name].double() - tensor) for name, tensor in exact.items()}


def _largest_in_block(gradients: Mapping[str, "Tensor"], spec: ModelSpec) -> dict[str, float]:
    """For each gradient the largest entry in its block; what lies below and above the layers is one block."""
    block = {parameter.name: parameter.layer for parameter in spec.parameters()}
    largest: dict[int | None, float] = {}
    for name, gradient in gradients.items():
        largest[block[name]] = max(largest.get(block[name], 0.0), _max_abs(gradient))
    return {name: largest[block[name]] for name in gradients}


def compare_parameters(
    actual: Mapping[str, "Tensor"], expected: Mapping[str, "Tensor"], job: Job, tolerance: float
) -> list[ValueComparison]:
    """Compares each parameter of `expected` after the last step; one that `actual` lacks fails."""
    steps = job.train.steps
    distance = sum(learning_rate(job.optimizer, step, steps) for step in range(steps))
    faster = {each.name: max(1.0, group_of(job.optimizer, each).lr_factor) for each in job.model.parameters()}
    comparisons = []
    for name, tensor in expected.items():
        if name in actual:
            scale = max(_max_abs(tensor), distance * faster.get(name, 1.0))
            comparisons.append(_compare_tensors("parameter", name, steps, actual[name], tensor, scale, tolerance))
        else:
            comparisons.append(ValueComparison("parameter", name, steps, math.inf, tolerance, "is missing"))
    return comparisons


def worst_comparison(comparisons: Iterable[ValueComparison]) -> ValueComparison | None:
    """The comparison whose error is the largest multiple of its tolerance; NaN is larger than anything."""

    def multiple(comparison: ValueComparison) -> float:
        if math.isnan(comparison.error):
            return math.inf
        if comparison.tolerance:
            return comparison.error / comparison.tolerance
        return math.inf if comparison.error else 0.0

    return max(comparisons, key=multiple, default=None)


def _compare_tensors(
    quantity: str, name: str, step: int, actual: "Tensor", expected: "Tensor", scale: float, tolerance: float
) -> ValueComparison:
    if actual.shape != expected.shape:
        note = f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return ValueComparison(quantity, name, step, math.inf, tolerance, note)
    difference = _max_abs(actual.double() - expected.double())
    return ValueComparison(quantity, name, step, difference / scale if scale else difference, tolerance)


def _max_abs(tensor: "Tensor") -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
