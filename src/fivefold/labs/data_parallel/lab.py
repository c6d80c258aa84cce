"""Data parallelism with buckets that overlap the backward pass."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import LabMessage

SAMPLES, WIDTHS = 8, (6, 10, 10, 3)  # of the batch; of the layers between which a gelu stands
BUCKET = 600  # bytes, after which a bucket is sent
START = "the last layer's bias at the start"


def needs(layout: Mapping[str, int]) -> list[LabMessage]:
    """Parameters from the last to the first fill buckets, and one that has BUCKET bytes or more is sent."""
    ranks, buckets, held = tuple(range(layout["dp"])), [], 0
    for size in reversed([size for wide, out in pairwise(WIDTHS) for size in (out * wide, out)]):
        held += size * F64
        if held >= BUCKET:
            buckets.append(held)
            held = 0
    return [LabMessage("all-reduce", size, ranks) for size in [*buckets, *([held] if held else [])]]


def overlaps(ranks: Sequence[Sequence[LabMessage]]) -> str:
    for rank, messages in enumerate(ranks):
        kinds = [message.kind for message in messages]
        before = kinds[: kinds.index("backward")] if "backward" in kinds else kinds
        if "all-reduce" not in before:
            return (
                f"the numbers are right, but rank {rank} sends its first bucket after the whole backward pass: send "
                "one as soon as its gradients are there"
            )
        if "wait" in before:
            return (
                f"the numbers are right, but rank {rank} waits for a bucket while gradients are still to be computed: "
                "send it with async_op=True, and wait in finish()"
            )
    return ""


LAB = Lab(
    "data_parallel",
    "Data parallelism with buckets and overlap",
    "a mean of gradients, sent while the backward pass runs",
    (
        Case("layers", ("dp=2", "dp=4"), "three layers", needs, {START: None}, overlaps),
        Case("tied", ("dp=2", "dp=2,groups=2"), "a layer that is used twice", needs, {START: None}, overlaps),
    ),
    (
        Hint((START,), "ranks begin with the weights of rank 0: broadcast them"),
        Hint(("exactly x", "= dp"), "a mean over ranks is wanted, and this is the sum"),
        Hint(("exactly x", "= 1/dp"), "the mean is taken twice"),
        Hint(
            ("missing MEAN",),
            "these are never reduced; the last bucket may never be full: send it in finish()",
        ),
        Hint(("missing SUM",), "these gradients are divided and never reduced"),
        Hint(("zero or missing",), "what is reduced has to be copied back into the gradients"),
    ),
    bench=along("dp"),
)
