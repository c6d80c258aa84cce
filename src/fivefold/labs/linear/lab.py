"""Column- and row-parallel linear layers."""

from collections.abc import Callable, Mapping

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import LabMessage

B, S, D = 2, 6, 16  # sequences, tokens and width
THIN = (1, 3, 7)
OUT = 5  # features that thin gives


def two_sums(*elements: int) -> Callable[[Mapping[str, int]], list[LabMessage]]:
    """Forward an all-reduce of the output, and backward one of the input's gradient."""
    return lambda layout: [LabMessage("all-reduce", size * F64, tuple(range(layout["tp"]))) for size in elements]


COLUMN, ROW = "the output of the column-parallel layer", "the output of the row-parallel layer"
_PROBES = {COLUMN: -1, ROW: None}
LAB = Lab(
    "linear",
    "Column- and row-parallel linear layers",
    "which dimension of a weight is sharded, and which layer needs a sum",
    (
        Case("mlp", ("tp=2", "tp=4"), "an MLP with biases", two_sums(B * S * D, B * S * D), _PROBES),
        Case(
            "thin",
            ("tp=2", "tp=4", "tp=2,groups=2"),
            "hidden width 12, output 5",
            two_sums(3 * OUT, 3 * THIN[-1]),
            _PROBES,
        ),
    ),
    (
        Hint((ROW, "nobody adds"), "all-reduce what each rank's features give"),
        Hint((ROW, "x = tp"), "it is reduced twice: the second sum is over ranks that hold the whole sum"),
        Hint((ROW, "x = 1/tp"), "a sum is wanted, and not the mean"),
        Hint(
            (ROW, "by a bias"),
            "every rank adds the bias before the sum, which then has it tp times: add it once, after the all-reduce",
        ),
        Hint((COLUMN, "by a bias"), "the bias is sharded as the output's features are"),
        Hint((COLUMN, "features in another order"), "rank r has the r-th part of neighbouring rows, and no stride"),
        Hint(
            ("gradients (x)", "missing SUM"),
            "each rank has the part of the input's gradient that its output features give; the column-parallel layer "
            "has to sum them over tp in backward",
        ),
        Hint(
            ("(first.", "missing SUM"),
            "whole on every rank, of which each uses a part: keep this rank's part alone, as the parameter",
        ),
        Hint(
            ("(second.weight", "missing SUM"),
            "whole on every rank, of which each uses a part: keep this rank's part alone, as the parameter",
        ),
        Hint(
            ("exactly x", "= tp"),
            "the gradient of a sum is a copy: the backward pass of the row-parallel layer's all-reduce sends nothing",
        ),
    ),
    bench=along("tp"),
)
