"""Ring attention."""

from collections.abc import Mapping

from fivefold.labs.lab import F64, Case, Hint, Lab, along
from fivefold.labs.messages import LabMessage

B, H, D = 2, 2, 4  # sequences, heads, and width of a head
TOKENS = 12  # of a sequence
OUTPUT = "the output"


def needs(layout: Mapping[str, int]) -> list[LabMessage]:
    """Keys and values go around the ring but for one step; backward they go around again, and their gradients all the
    way home. k and v, and their gradients, may travel together."""
    cp = layout["cp"]
    block = 2 * B * H * (TOKENS // cp) * D * F64
    return [LabMessage("send", block, tuple(range(cp)), 1)] * ((cp - 1) + (cp - 1) + cp)


LAB = Lab(
    "ring",
    "Ring attention",
    "softmax in parts: how blocks of keys are merged, and what goes around the ring",
    (
        Case("whole", ("cp=2", "cp=3", "cp=4"), "every token sees all", needs, {OUTPUT: 2}),
        Case("causal", ("cp=2", "cp=4"), "causal", needs, {OUTPUT: 2}),
        Case("large", ("cp=2",), "scores up to 1,000", needs, {OUTPUT: 2}),
    ),
    (
        Hint((OUTPUT, "nan"), "a row that sees no key of a block has the maximum -inf; exp(-inf - -inf) is nan"),
        Hint((OUTPUT, "differs"), "merge blocks by log-sum-exp: a block's output counts exp(its lse - that of all)"),
        Hint(("(k", "differ"), "the gradient of a block travels with it, and is home after as many steps as ranks"),
        Hint(("(k, v", "missing SUM"), "each rank has a part of the gradient of every block: it travels on with it"),
        Hint(("no one factor",), "backward uses the log-sum-exp and the output of all keys, and not of a block's own"),
    ),
    bench=along("cp"),
)  # fmt: skip
