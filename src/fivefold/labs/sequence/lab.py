"""Sequence parallelism."""

from collections.abc import Mapping

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import LabMessage

B, D, HIDDEN = 2, 8, 12  # sequences, width, and width between the two matrices
OUTPUT, GATHERED, NORMED = "the output of the block", "what is gathered", "what the norm gives"
_PROBES = {NORMED: 1, GATHERED: None, OUTPUT: 1}


def needs(layout: Mapping[str, int]) -> list[LabMessage]:
    """An all-gather and a reduce-scatter forward, the same backward the other way round, and the norm's gradients."""
    ranks = tuple(range(layout["tp"]))
    whole = [LabMessage(kind, B * _TOKENS[len(ranks)] * D * F64, ranks) for kind in ("all-gather", "reduce-scatter")]
    return [*whole, *whole, *[LabMessage("all-reduce", D * F64, ranks)] * 2]


_TOKENS = {2: 6, 4: 8}  # by ranks: those of a sequence
LAB = Lab(
    "sequence",
    "Sequence parallelism",
    "an all-reduce in its two halves, and replicated weights that see other tokens",
    (
        Case("six", ("tp=2", "tp=2,groups=2"), "six tokens", needs, _PROBES),
        Case("eight", ("tp=4",), "eight tokens", needs, _PROBES),
    ),
    (
        Hint(
            (GATHERED, "tokens in another order"),
            "tokens are joined in dimension 1; torch's collectives join dimension 0",
        ),
        Hint((GATHERED, "shape"), "all ranks' tokens are gathered along dimension 1"),
        Hint(
            (OUTPUT, "tokens in another order"),
            "of the sum each rank keeps its part of neighbouring ones, the r-th in dimension 1",
        ),
        Hint(
            (OUTPUT, "differs"),
            "each rank has a summand for all tokens: sum them, and keep this rank's, the r-th of neighbouring ones",
        ),
        Hint((OUTPUT, "= tp x"), "summands are added twice, or are whole: up and down are to be sharded"),
        Hint((OUTPUT, "= 1/tp x"), "a sum is wanted, and not the mean"),
        Hint((OUTPUT, "by a bias"), "a bias that every rank adds before the sum is there tp times"),
        *(Hint((name, "missing SUM"), "whole on every rank, of which each uses a part: keep this rank's part alone")
          for name in ("norm.up", "norm.down")),
        Hint(("norm", "missing SUM"), "the norm's weights are on every rank, and each sees other tokens: sum their "
                                      "gradients over tp"),
        Hint(("x", "exactly x", "= 1/tp"), "a gradient is to be summed, and not averaged"),
        Hint(("exactly x", "= tp"), "a gradient that is whole already is summed once more"),
        Hint(
            ("no one factor",),
            "the backward pass of an all-gather is a reduce-scatter, since each rank has a part of every token's "
            "gradient, and that of a reduce-scatter is an all-gather",
        ),
        Hint(
            ("invalid gradient",),
            "the backward pass of an all-gather is a reduce-scatter, which leaves this rank's tokens, and that of a "
            "reduce-scatter is an all-gather",
        ),
        Hint(("add up to the truth",), "the backward pass of an all-gather is a reduce-scatter, which sums"),
    ),
    bench=along("tp"),
)  # fmt: skip
