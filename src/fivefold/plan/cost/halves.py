"""A stage's passes as the halves of joined pairs, and what of the experts' messages compute hides in a step.

stage_halves(spec, stage, work, held=0.0)       # segments of its F and of its B, for schedule/pairs.py
"""

from typing import NamedTuple

from fivefold.layout.stages import Stage
from fivefold.plan.cost.travel import Travel
from fivefold.plan.cost.work import Passes, Work
from fivefold.schedule.actions import BACKWARD
from fivefold.schedule.clock import Lane
from fivefold.schedule.costs import Costs
from fivefold.schedule.pairs import Segment, Segments


class Travelled(NamedTuple):
    """Seconds of a rank's step in which experts' messages are on their way, and how many of them are hidden."""

    whole: float = 0.0
    shared: float = 0.0  # by the shared expert
    paired: float = 0.0  # by the other half of a joined pair


STAYED = Travelled()


def stage_halves(stage: Stage, work: Work, dense: Work, held: float) -> tuple[Segments, Segments]:
    """`dense` is the work of a block without experts; what is sent without overlap (`held`) ends either pass."""
    spec = work.spec
    blocks = [block_halves(dense if spec.dense(layer) else work) for layer in stage.layers]
    below = [_plain(work.bottom)] if stage.first else []
    above = [_plain(work.top)] if stage.last and spec.vocab > 1 else []
    every = [*below, *blocks, *above]
    end = (Segment(held),)
    forward = sum((one for one, _ in every), ()) + end
    return forward, sum((one for _, one in reversed(every)), ()) + end


def block_halves(work: Work) -> tuple[Segments, Segments]:
    """A block's forward and whole backward pass."""
    if work.mixture is None:
        return _plain(work.block)
    travel, (forward, inputs, weights) = Travel(work.mixture), work.block
    # As long as they take without any overlap.
    less, less_back = travel.hidden
    ahead, back = forward.total + less, inputs.total + weights.total + less_back
    if work.layout.recompute != "full":
        return travel.forward(ahead), travel.backward(back)
    # It runs forward again before its own, messages and all.
    again = inputs.recompute + forward.ep
    return travel.forward(ahead), travel.forward(again + less) + travel.backward(back - again)


def _plain(passes: Passes) -> tuple[Segments, Segments]:
    forward, inputs, weights = (part.total for part in passes)
    return (Segment(forward),), (Segment(inputs + weights),)


def block_travelled(work: Work) -> Travelled:
    """Of one microbatch in one block."""
    if work.mixture is None:
        return STAYED
    travel, times = Travel(work.mixture), 2 if work.layout.recompute == "full" else 1
    (sent, back), (less, less_back) = work.mixture.sent, travel.hidden
    return Travelled(times * sent + back, times * less + less_back)


def saved(lane: Lane, costs: Costs) -> float:
    """Seconds that a rank's passes take less than F, I and W by themselves, because compute hides messages."""
    found, first = 0.0, None
    for action in lane.actions:
        if action.kind is BACKWARD:
            found += costs.i[action.stage] + costs.w[action.stage] - costs.b[action.stage]
            if first is not None:
                found += costs.f[first] + costs.b[action.stage] - costs.joined(first, action.stage)
        first = action.stage if action.joined else None
    return found
