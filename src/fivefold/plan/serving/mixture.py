"""Experts of a replica that serves: which of them a step touches, how long they take, and what their ranks send.

The ranks of a stage, tp x dp, share the experts of its layers: ep groups of ranks have count/ep whole experts each, and
the tp x dp / ep ranks of a group divide their width. No expert is held twice, whatever ep is. With dp the ranks have
sequences of their own and meet only here.

    touched(experts, 64)        # experts that a step of 64 tokens reads, of a layer
    most_touched(experts, 8, 64)    # and of those how many are on the fullest of 8 groups
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from fivefold.plan.cost.experts import GROUPED
from fivefold.plan.cost.kernels import plus, times
from fivefold.plan.cost.stack import MOVED
from fivefold.plan.serving.parts import Parts, linear_bytes
from fivefold.spec.experts import Experts
from fivefold.spec.model import ModelSpec
from fivefold.support.numbers import divisors

if TYPE_CHECKING:
    from fivefold.plan.serving.step import Replica

ROUTING = 4  # kernels beside the products and the activation: the choice, sorting it by expert (2), and adding up


def touched(experts: Experts, tokens: int) -> float:
    """Experts of a layer that so many tokens visit together, on average: X (1 - (1 - K/X)^T).

    Tokens choose independently of each other, and every expert equally often; real routers repeat themselves, which
    leaves more experts untouched.
    """
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


@lru_cache(maxsize=1 << 14)
def most_touched(experts: Experts, ep: int, tokens: int) -> float:
    """Of those, how many are on the group that has the most of them, on average: all others wait while it reads them.

    Each of a group's X/ep experts is touched with the same probability, as if independently of the others.
    """
    each, share = experts.count // ep, touched(experts, tokens) / experts.count
    if ep == 1:
        return each * share
    within, expected = 0.0, 0.0
    for many in range(each):
        within += math.comb(each, many) * share**many * (1 - share) ** (each - many)
        expected += 1 - min(1.0, within) ** ep
    return max(1.0, expected)


def degrees(spec: ModelSpec, tp: int, dp: int = 1) -> list[int]:
    """The ep that tp x dp ranks can have, the largest last; 1 without experts. Ranks that have sequences of their own
    have whole experts: so do the servers that work like this."""
    own, ranks = spec.experts, tp * dp
    if own is None:
        return [1] if dp == 1 else []
    found = [ep for ep in divisors(ranks) if own.count % ep == 0 and own.ffn % (ranks // ep) == 0]
    return found if dp == 1 else [ep for ep in found if ep == ranks]


def mixture(replica: "Replica", rows: int, busy: int) -> Parts:
    """Seconds of the experts of a block that all ranks of a stage together give `busy` x `rows` tokens."""
    spec, own, device = replica.spec, replica.spec.experts, replica.device
    assert own is not None
    tokens, inner = busy * rows, own.ffn * replica.ep // replica.ranks
    hit = most_touched(own, replica.ep, tokens)
    here = replica.uneven * tokens * own.top_k / replica.ep  # rows on the fullest rank
    gated = spec.activation.startswith("swiglu")
    shapes = [((1 + gated) * inner, spec.hidden), (spec.hidden, inner)]
    products = [_grouped(replica, here, n, k, hit) for n, k in shapes]
    router = replica.matmul(rows, own.count, spec.hidden, "bf16")
    active = (MOVED["fused"].swiglu if gated else MOVED["fused"].gelu)[0]
    moved = here * (active * inner + 2 * 4.0 * spec.hidden)  # rows are put into order, and added up
    launch = ROUTING * device.reached.launch
    rest = Parts(pointwise=device.stream(moved, 0), launch=launch, ep=exchange(replica, rows))
    return plus(router, *products, rest)


def _grouped(replica: "Replica", rows: float, n: int, k: int, hit: float) -> Parts:
    """A product of `hit` experts in one kernel. What was measured of grouped kernels is their pace at tensor cores."""
    groups = math.ceil(hit)
    parts = replica.matmul(max(1, math.ceil(rows / hit)), n, k, replica.precision, groups)
    share = times(parts, hit / groups)
    return share._replace(compute=share.compute / GROUPED, launch=parts.launch)


def exchange(replica: "Replica", rows: int) -> float:
    """Seconds in which tokens reach their experts and come back, where ranks have sequences of their own (dp).

    All-to-all, which the fullest rank ends last, or all tokens to all ranks and sums back, whichever takes less.
    Without dp every rank has all tokens already, and the all-reduce of tp adds up what experts said.
    """
    spec, own = replica.spec, replica.spec.experts
    if replica.dp == 1 or own is None:
        return 0.0
    there, back = linear_bytes(replica.precision), 2
    slots = replica.uneven * math.ceil(rows / replica.tp) * own.top_k * spec.hidden
    every = float(rows * replica.dp * spec.hidden)
    gather = replica.collective("all-gather", "ep", there * every)
    scatter = replica.collective("reduce-scatter", "ep", back * every)
    trade = sum(replica.collective("all-to-all", "ep", size * slots) for size in (there, back))
    return min(trade, gather + scatter)
