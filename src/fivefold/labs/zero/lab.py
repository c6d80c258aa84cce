"""ZeRO 1 and 3."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fivefold.foreign.compare import Deviation
from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import APART, MARKS, LabMessage

SAMPLES = 8  # of the batch
STAGE_1, STAGE_3 = (5, 9, 2), (5, 9, 3)  # widths of two layers without biases: no sum and no size is even
LR, MOMENTUM = 0.1, 0.9
LAYER = "the output of the first layer"


def sizes_of(widths: Sequence[int]) -> list[int]:
    """Elements of each weight."""
    return [out * wide for wide, out in pairwise(widths)]


_ALL = sum(sizes_of(STAGE_1))


def of_stage_1(layout: Mapping[str, int]) -> list[LabMessage]:
    """The mean of the gradients, and the updated shards."""
    ranks = tuple(range(layout["dp"]))
    padded = -(-_ALL // len(ranks)) * len(ranks) * F64
    return [LabMessage("reduce-scatter", padded, ranks), LabMessage("all-gather", padded, ranks)]


def of_stage_3(layout: Mapping[str, int]) -> list[LabMessage]:
    """Each layer's weight forward and again backward, and its gradient."""
    ranks = tuple(range(layout["dp"]))
    padded = [-(-size // len(ranks)) * len(ranks) * F64 for size in sizes_of(STAGE_3)]
    kinds = ("all-gather", "all-gather", "reduce-scatter")
    return [LabMessage(kind, size, ranks) for size in padded for kind in kinds]


def sharded_state(ranks: Sequence[Sequence[LabMessage]]) -> str:
    most = -(-_ALL // len(ranks))
    for rank, messages in enumerate(ranks):
        held = max((message.payload for message in messages if message.kind == "state"), default=0)
        if held > most:
            return (
                f"the numbers are right, but the optimizer of rank {rank} has {held} elements of state, and its shard "
                f"has {most} at most: give it the shard alone"
            )
    return ""


def freed(ranks: Sequence[Sequence[LabMessage]]) -> str:
    for rank, messages in enumerate(ranks):
        if any(message.kind == "state" for message in messages):
            return (
                f"the numbers are right, but rank {rank} keeps a whole weight from forward to backward: free it, and "
                "gather it again"
            )
    return ""


_REMAINDER = (
    "sizes do not divide by the ranks, so shards differ by one: what is sent is padded to equal parts, and afterwards "
    "the padding is left out, and no element"
)


def of_update(failed: Sequence[Deviation], messages: Sequence[Sequence[LabMessage]]) -> str:
    """What an update leaves out: the shards of others, or what remains of a division."""
    return _not_gathered(messages) or _last_elements(failed)


def _not_gathered(messages: Sequence[Sequence[LabMessage]]) -> str:
    kinds = {one.kind for of_rank in messages for one in of_rank}
    if APART in kinds and len(kinds.difference(MARKS)) == 1 and kinds & {"reduce-scatter", "all-reduce"}:
        return "ranks have different weights after the step: each has updated only its shard, and nobody gathers"
    return ""


def _last_elements(failed: Sequence[Deviation]) -> str:
    [size] = sizes_of(STAGE_1)[-1:]
    first_step = [one for one in failed if one.step == 1]
    if [(one.quantity, one.name) for one in first_step] != [("parameter", "second.weight")]:
        return ""
    first, _, last = first_step[0].elements.partition(" to ")
    if not first.isdigit() or int(last) != size - 1 or size - int(first) > 3:
        return ""
    count = size - int(first)
    which = f"the last {count} elements, {first} to {last}" if count > 1 else f"the last element, {first}"
    return f"gradients are right, and {which} of second.weight, {'are' if count > 1 else 'is'} not updated"


LAB = Lab(
    "zero",
    "ZeRO 1 and 3",
    "who keeps which part of state and weights, and what that costs in messages",
    (
        Case(
            "stage1",
            ("dp=2", "dp=4", "dp=2,groups=2"),
            "ZeRO 1, 63 elements",
            of_stage_1,
            judge=sharded_state,
            diagnose=of_update,
        ),
        Case("stage3", ("dp=2", "dp=4", "dp=2,groups=2"), "ZeRO 3, 45 and 27 elements", of_stage_3, {LAYER: 0}, freed),
    ),
    (
        Hint((LAYER,), "the shards of the weight are joined in the order of ranks, without what padded them"),
        Hint(
            ("invalid gradient",),
            "the gradient of a shard has the shape of the shard: reduce-scatter that of the whole weight, and leave "
            "the padding out",
        ),
        Hint(("raised RuntimeError", "size"), _REMAINDER),
        Hint(("raised RuntimeError", "shape"), _REMAINDER),
        Hint(("held by no rank",), _REMAINDER),
        Hint(("the last", "not updated"), _REMAINDER),
        Hint(("gradients", "exactly x", "= dp"), "a mean over ranks is wanted, and this is the sum"),
        Hint(("gradients", "exactly x", "= 1/dp"), "the mean is taken twice"),
        Hint(("missing MEAN",), "gradients are never reduced"),
        Hint(("missing SUM",), "gradients are divided and never reduced"),
        Hint(("parameters move x",), "the gradient of a shard is the mean over ranks: no sum, and not divided twice"),
        Hint(
            ("parameters after the update are not",),
            "a step updates the shard by the mean of all ranks' gradients, and gives all ranks the updated shards, "
            "joined in the order of ranks",
        ),
        Hint(("parameters are not updated",), "each rank needs the shards that others updated"),
    ),
    steps=3,
    bench=along("dp"),
)
