"""The proof obligations of a schedule. What passes here can be run; what does not is refused with a sentence.

  complete    every forward has its backward, on the rank that owns the stage, and every message its two ends
  order       within a rank, nothing runs before what it needs
  channels    both ends of every FIFO list their messages in the same order
  deadlock    with bounded buffers and nothing but waiting, every rank gets to the end of its list
  rendezvous  so it does if a message holds up both its ranks until they have met, as NCCL's may
  accumulate  weight gradients are summed in the order of a single device, so that they are the same to the bit
  bounds      activations, posted receives and slots stay within what is promised

The checker reads the action lists and nothing else: it knows no builder and no schedule by name.
"""

from collections.abc import Callable, Iterator, Sequence

from fivefold.schedule.check.bounds import bounds
from fivefold.schedule.check.complete import complete
from fivefold.schedule.check.deadlock import deadlock, rendezvous
from fivefold.schedule.check.index import Index, Problem
from fivefold.schedule.check.order import accumulate, channels, order
from fivefold.schedule.schedule import Schedule
from fivefold.support.errors import UserError

__all__ = ["Problem", "check", "prove"]

Proof = Callable[[Index], Iterator[Problem]]

# Each step takes for granted what the steps before it have shown.
STEPS: tuple[tuple[Proof, ...], ...] = ((complete,), (order, channels, accumulate), (deadlock, bounds), (rendezvous,))


def check(schedule: Schedule, numbers: Sequence[Sequence[int]] | None = None) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list is the proof that nothing is.

    `numbers[rank][place]` is how sentences count an action, where the user knows another list than the schedule's.
    """
    index = Index(schedule, numbers)
    for step in STEPS:
        problems = [found._replace(obligation=proof.__name__) for proof in step for found in proof(index)]
        if problems:
            return problems
    return []


def prove(schedule: Schedule) -> Schedule:
    """The schedule itself when it passes, a UserError with the reasons when it does not."""
    problems = check(schedule)
    if problems:
        about = f"schedule {schedule.name}"
        raise UserError(f"{about}: {problem}" for problem in problems)
    return schedule
