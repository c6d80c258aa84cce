"""What is known of a layout that differs from one process, and the words in which its causes are told."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fivefold.foreign.adapter import MULTIPLY, Layout
from fivefold.foreign.compare import Deviation, Tensors, at_numbers, gradient_scale
from fivefold.foreign.measurement import Insight, Observation, OneProcess, RankValues, Values

_FITS = 1e-8  # of float64; narrower dtypes fit within a tenth
_DIGITS = {"float64": 8, "float32": 4, "bfloat16": 2}  # of a factor, that rounding leaves
SHOWN = 4  # names that a sentence lists
# What to read.
REPORTS = "https://github.com/NVIDIA/Megatron-LM/issues/7452"  # eleven layouts that changed the gradient, with causes
_TORCH = "https://docs.pytorch.org/docs/stable"
DDP = f"{_TORCH}/generated/torch.nn.parallel.DistributedDataParallel.html"
AUTOGRAD = f"{_TORCH}/notes/autograd.html"
CLIPPING = f"{_TORCH}/generated/torch.nn.utils.clip_grad_norm_.html"
OPTIMIZERS = f"{_TORCH}/optim.html"
RANDOMNESS = f"{_TORCH}/notes/randomness.html"
PRECISION = f"{_TORCH}/amp.html"
MODULES = f"{_TORCH}/distributed.tensor.parallel.html"
ACCUMULATION = "https://huggingface.co/blog/gradient_accumulation"


@dataclass(frozen=True)
class Cause:
    text: str
    likely: str  # what usually is behind it, or nothing
    read: str  # where it is told at length


class ModuleRow(NamedTuple):
    """What a module gives, and what its output's gradient is, next to one process; on the rank where it is worst."""

    module: str
    rank: int
    forward: str  # same | differs | -
    backward: str  # same | x 2 | differs | -


@dataclass
class Evidence:
    """One failing layout: everything of its first step."""

    layout: Layout
    reference: OneProcess
    ranks: Sequence[RankValues]
    deviations: Sequence[Deviation]
    known: Mapping[str, float]
    insight: Insight | None = None
    traces: Mapping[int, Observation] = field(default_factory=dict)  # by rank
    dtype: str = "float64"

    def __post_init__(self) -> None:
        self.tensors = Tensors(self.reference.shapes)
        self.truth = self.reference.gradients[0]
        self.scale = gradient_scale(self.tensors, self.truth)
        self.fits = _FITS if self.dtype == "float64" else 0.1
        size = len(self.truth)
        self.held = [at_numbers(rank.numbers, rank.gradients[0], size) for rank in self.ranks]
        bad = {d.name for d in self.deviations if d.quantity == "gradient" and d.step == 1 and not d.passed}
        self.failing = [index for index, name in enumerate(self.tensors.names) if name in bad]

    def rounded(self, factor: float) -> float:
        return float(f"{factor:.{_DIGITS[self.dtype]}g}")

    def name(self, factor: float) -> str:
        """What a factor that was rounded may be."""
        close = 1e-7 if self.dtype == "float64" else 0.5 * 10.0 ** (1 - _DIGITS[self.dtype])
        return factor_name(factor, self.layout, self.known, len(self.ranks), close)

    def part(self, identity: int) -> slice:
        return slice(int(self.tensors.starts[identity]), int(self.tensors.ends[identity]))

    def names(self, identities: Sequence[int]) -> str:
        return listed([self.tensors.names[identity] for identity in identities])

    def close(self, values: Values, expected: Values, scale: float) -> bool:
        return bool(np.abs(values - expected).max(initial=0.0) <= self.fits * (scale or 1.0))


AXES = (*MULTIPLY, "ep", "etp")  # words of a layout that are sizes of groups; others count if KNOWN has them


def factor_name(factor: float, layout: Layout, known: Mapping[str, float], world: int, close: float = 1e-7) -> str:
    """All that a factor may be: the size of an axis, of two together, a number the adapter knows; or one through it.

    "dp", "1/tp", "dp or tp", "dp x tp or microbatches": one factor cannot tell them apart."""
    sizes = {key: float(value) for key, value in layout.items()
             if key in AXES and isinstance(value, int) and value > 1}  # fmt: skip
    own = {key: float(value) for key, value in known.items()}
    own |= {key: float(value) for key, value in layout.items() if key in known and isinstance(value, int)}
    candidates = sizes | {f"{a} x {b}": sizes[a] * sizes[b] for a, b in combinations(sizes, 2)}
    candidates |= {key: value for key, value in own.items() if value not in (0, 1) and key not in candidates}
    if float(world) not in candidates.values() and world > 1:
        candidates["ranks"] = float(world)
    names = [name for name, size in candidates.items() if math.isclose(factor, size, rel_tol=close)]
    names += [f"1/({name})" if " x " in name else f"1/{name}" for name, size in candidates.items()
              if math.isclose(factor, 1 / size, rel_tol=close)]  # fmt: skip
    return " or ".join(names)


# ---- words ----------------------------------------------------------------------------------------------------------


def all_of(evidence: Evidence, identities: Sequence[int]) -> str:
    count, total = len(identities), len(evidence.tensors.names)
    return f"all {total} gradients" if count == total else f"{count} of {total} gradients"


def listed(names: Sequence[str]) -> str:
    """a, b, c and 4 more"""
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: SHOWN - 1])} and {len(names) - SHOWN + 1} more"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def spans(numbers: Sequence[int]) -> str:
    """0-3, 6"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
