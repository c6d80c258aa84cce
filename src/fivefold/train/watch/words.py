"""What is said of ranks whose bits are wrong. No torch."""

from collections.abc import Sequence

from fivefold.layout.layout import Layout
from fivefold.train.watch.copies import Odd
from fivefold.train.watch.verdict import Verdict

_NAMED = 4  # tensors or ranks in a sentence


def place(layout: Layout, rank: int) -> str:
    at = layout.place(rank)
    return f"rank {rank} ({at})" if at else f"rank {rank}"


def listed(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return between.join(names[:_NAMED]) + more


def ranks_of(layout: Layout, ranks: Sequence[int]) -> str:
    return listed([place(layout, rank) for rank in ranks], " and ")


def differ(layout: Layout, odd: Odd, names: list[str]) -> str:
    ranks, verb = ranks_of(layout, odd.ranks), "hold" if len(odd.ranks) > 1 else "holds"
    if odd.others:
        others = ("ranks " if len(odd.others) > 1 else "rank ") + listed([str(rank) for rank in odd.others])
        return f"{ranks} {verb} other bits than {others} of {listed(names)}"
    return f"{ranks} should hold the same bits of {listed(names)}, and do not; no majority says who is right"


def computed(layout: Layout, found: Verdict) -> str:
    ends = {
        found.once: "got other gradients of the same microbatch one time than the other",
        found.always: "gets other gradients of the same microbatches than two others, each time",
        found.undecided: "get other gradients of the same microbatch, each time; no third says who is right",
    }
    said = "; ".join(f"{ranks_of(layout, ranks)} {end}" for ranks, end in ends.items() if ranks)
    together = layout.tp * layout.cp * layout.pp * layout.ep > 1
    return said + ("; what one of a group gets wrong, all that compute with it do" if together else "")
