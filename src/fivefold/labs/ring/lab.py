"""Ring attention."""

from collections.abc import Mapping, Sequence

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import MARKS, LabMessage, told

B, H, D = 2, 2, 4  # sequences, heads, and width of a head
TOKENS = 12  # of a sequence
OUTPUT = "the output"


def needs(layout: Mapping[str, int]) -> list[LabMessage]:
    """Keys and values go around the ring but for one step; backward they go around again, and their gradients all the
    way home. k and v, and their gradients, may travel together."""
    cp = layout["cp"]
    block = 2 * B * H * (TOKENS // cp) * D * F64
    return [LabMessage("send", block, tuple(range(cp)), 1)] * ((cp - 1) + (cp - 1) + cp)


def in_a_ring(ranks: Sequence[Sequence[LabMessage]]) -> str:
    """Blocks go to the next rank; what gathers them has the whole sequence in one place."""
    for rank, messages in enumerate(ranks):
        calls = [message for message in messages if message.kind not in (*MARKS, "receive")]
        if odd := [message for message in calls if message.kind != "send"]:
            return (
                f"the numbers are right, but rank {rank} calls {told(odd)}: then it holds more than two blocks of keys "
                "and values, which a ring is there to avoid"
            )
        following = (rank + 1) % len(ranks)
        if odd := [message for message in calls if message.peer != following]:
            there = f"rank {rank} sends to rank {odd[0].peer}"
            return f"the numbers are right, but {there}, and next in the ring is rank {following}"
    return ""


LAB = Lab(
    "ring",
    "Ring attention",
    "softmax in parts: how blocks of keys are merged, and what goes around the ring",
    (
        Case("whole", ("cp=2", "cp=3", "cp=4"), "every token sees all", needs, {OUTPUT: 2}, in_a_ring),
        Case("causal", ("cp=2", "cp=4", "cp=2,groups=2"), "causal", needs, {OUTPUT: 2}, in_a_ring),
        Case("large", ("cp=2",), "scores up to 1,000", needs, {OUTPUT: 2}, in_a_ring),
    ),
    (
        Hint((OUTPUT, "nan"), "a row that sees no key of a block has the maximum -inf; exp(-inf - -inf) is nan"),
        Hint(
            (OUTPUT, "differs"),
            "merge blocks by log-sum-exp, where a block's output counts exp(its lse - that of all); look at the scale, "
            "at whether all blocks are merged, and at whose tokens a block has: rank r - s has sent the one of step s",
        ),
        Hint(("(k", "differ"), "the gradient of a block travels with it, and is home after as many steps as ranks"),
        Hint(("(k, v", "missing SUM"), "each rank has a part of the gradient of every block: it travels on with it"),
        Hint(
            ("(k, v)", "no one factor"),
            "the gradient of a block is made on every rank: it travels with the block, and is home after as many steps "
            "as ranks",
        ),
        Hint(
            ("no one factor",),
            "the gradient of the scores is weights * (gradient v^T - delta), with the log-sum-exp and the output of "
            "all keys, and not of a block's own",
        ),
    ),
    bench=along("cp"),
)  # fmt: skip
