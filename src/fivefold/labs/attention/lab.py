"""Tensor-parallel attention."""

from collections.abc import Callable, Mapping

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import LabMessage

B, S, D, HEAD = 2, 6, 20, 4  # sequences, tokens, width of the stream, and of a head: no head is D / HEADS wide
HEADS = 8
SUMMED = "the output of the layer"
MIXED = "what the heads give"


def needs(kv_heads: int) -> Callable[[Mapping[str, int]], list[LabMessage]]:
    """Two all-reduces, as of every tensor-parallel block; of kv heads that ranks share, one of k's and v's gradient."""

    def by_layout(layout: Mapping[str, int]) -> list[LabMessage]:
        tp = layout["tp"]
        found = [LabMessage("all-reduce", B * S * D * F64, tuple(range(tp)))] * 2
        if (sharing := tp // kv_heads) > 1:
            found += [LabMessage("all-reduce", HEAD * D * F64, tuple(range(sharing)))] * 2
        return found

    return by_layout


# No rank shares a kv head there.
_WHOLE = (
    Hint(
        ("(attention.", "missing SUM"),
        "whole on every rank, of which each uses a part: keep the part of this rank's heads alone, as the parameter",
    ),
)
_FEWER = tuple(
    Hint(
        words,
        "ranks are more than kv heads here, so that a k or v cut into as many parts has less than a head: keep the "
        "whole kv head that this rank's query heads use",
    )
    for words in (("raised", "multiply up to the size"), ("raised", "is invalid for input of size"))
)
LAB = Lab(
    "attention",
    "Tensor-parallel attention",
    "heads over ranks, two all-reduces a layer, and kv heads that are fewer than ranks",
    (
        Case("heads", ("tp=2", "tp=4"), "eight heads", needs(8), {MIXED: -1, SUMMED: None}, hints=_WHOLE),
        # With tp=2 a rank has two kv heads of two query heads each: in which order, shows only here.
        Case(
            "grouped",
            ("tp=2", "tp=4", "tp=2,groups=2"),
            "four kv heads",
            needs(4),
            {MIXED: -1, SUMMED: None},
            hints=_WHOLE,
        ),
        Case("paired", ("tp=4",), "kv heads that two ranks share", needs(2), {MIXED: -1, SUMMED: None}, hints=_FEWER),
        Case(
            "shared", ("tp=2", "tp=4"), "kv heads that ranks share", needs(1), {MIXED: -1, SUMMED: None}, hints=_FEWER
        ),
    ),
    (
        Hint(
            (SUMMED, "nobody adds"), "`o` has the features of this rank's heads: its products are to be summed over tp"
        ),
        Hint((SUMMED, "= tp x"), "it is reduced twice"),
        Hint((SUMMED, "= 1/tp x"), "a sum is wanted, and not the mean"),
        Hint(
            (MIXED, "features in another order"),
            "a rank has neighbouring heads, and every query head the kv head of its group",
        ),
        Hint(
            (MIXED, "differs"),
            "look at the mask, at the scale 1/sqrt(head width), and at which kv head each query head uses",
        ),
        *(Hint((name, "missing SUM"), _WHOLE[0].sentence) for name in ("attention.q", "attention.o")),
        Hint(("is in __init__",), "`dist.new_group` is called by all ranks, for all groups and in the same order"),
        Hint(
            ("attention.k", "no one factor"),
            "only the ranks that share a kv head have parts of its gradient: sum over these, and not over all ranks",
        ),
        Hint(
            ("attention.k", "missing SUM"),
            "ranks that share a kv head have parts of its gradient: sum them",
        ),
        Hint(
            ("(x)", "missing SUM"), "every rank's heads give a part of the input's gradient: sum it over tp in backward"
        ),
        Hint(
            ("exactly x", "= tp"), "the gradient of a sum is a copy: the backward pass of the all-reduce sends nothing"
        ),
    ),
    bench=along("tp"),
)
