"""Expert parallelism."""

from collections.abc import Sequence

from fivefold.labs.lab import Case, Hint, Lab, along
from fivefold.labs.messages import MARKS, LabMessage, told

D, HIDDEN, EXPERTS, TOP = 6, 8, 4, 2  # width, an expert's width, experts, and how many of them each token goes to
MOST = 3 + 2  # forward the numbers of tokens, the tokens, and the results; backward the gradients of both
OUTPUT = "the output"


def exchanges(ranks: Sequence[Sequence[LabMessage]]) -> str:
    """Tokens go to the ranks of their experts alone: an all-gather sends all to all."""
    numbers = 8 * EXPERTS * len(ranks)  # bytes of how many tokens each expert gets from each rank
    for rank, messages in enumerate(ranks):
        to_their_experts = (*MARKS, "all-to-all", "send", "receive")
        odd = [one for one in messages if one.kind not in to_their_experts and one.payload > numbers]
        if odd:
            return (
                f"the numbers are right, but rank {rank} sends {told(odd)}: a token is needed on the ranks of its "
                f"{TOP} experts alone"
            )
        calls = [one for one in messages if one.kind == "all-to-all"]
        if len(calls) > MOST:
            return f"the numbers are right, but rank {rank} sends {told(calls)} where {MOST} are enough"
    return ""


LAB = Lab(
    "experts",
    "Expert parallelism",
    "route, exchange and combine tokens whose numbers nobody knows beforehand",
    (
        Case("tokens", ("ep=2", "ep=4"), "ten tokens, two experts each", None, {OUTPUT: 0}, exchanges),
        Case("few", ("ep=2", "ep=4", "ep=2,groups=2"), "ranks without tokens, idle experts", None, {OUTPUT: 0},
             exchanges),
    ),
    (
        Hint(
            (OUTPUT, "tokens in another order"),
            "results come back in the order in which tokens were sent: undo the sort",
        ),
        Hint(
            (OUTPUT, "differs"),
            "a token's result sums its experts', times the softmax over the chosen scores; look at whose result it is "
            "(undo the sort), and at which expert computes what (rank r has neighbouring ones)",
        ),
        Hint(("router", "no one factor"), "the router learns by the weights: they must not be detached"),
        Hint(("router", "zero or missing"), "the router learns by the weights: they must not be detached"),
        Hint(("down", "missing SUM"), "every expert is on one rank: keep this rank's alone"),
        Hint(("up", "missing SUM"), "every expert is on one rank: keep this rank's alone"),
        Hint(("up", "missing"), "an expert has the tokens of all ranks: backward of an exchange is the one back"),
        Hint(("exactly x",), "an expert has the tokens of all ranks: its gradient is whole, and not to be reduced"),
    ),
    bench=along("ep"),
)  # fmt: skip
