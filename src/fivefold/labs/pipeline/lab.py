"""An executor of pipeline schedules."""

from collections.abc import Callable, Mapping, Sequence

from fivefold.labs.lab import F64, Case, Hint, Lab
from fivefold.labs.messages import LabMessage
from fivefold.schedules.actions import FORWARD
from fivefold.schedules.costs import Durations
from fivefold.schedules.registry import build
from fivefold.schedules.result import Query

SAMPLES, WIDTH, LAYERS = 60, 4, 6  # 2 to 5 microbatches divide the samples
TIMED = 8  # microbatches of the step that is timed


def actions(schedule: str, stages: int, microbatches: int, rank: int) -> list[tuple[str, int]]:
    """What a rank computes, in this order: ("F", microbatch) and ("B", microbatch)."""
    return [
        ("F" if action.kind == FORWARD else "B", action.microbatch)
        for action in build(schedule, stages, microbatches).compute(rank)
    ]


def needs(schedule: str) -> Callable[[Mapping[str, int]], list[LabMessage]]:
    """Of a stage in the middle, every microbatch's activation and gradient; of two stages, one of them."""

    def by_layout(layout: Mapping[str, int]) -> list[LabMessage]:
        directions = 1 if layout["pp"] == 2 else 2
        return [LabMessage("send", SAMPLES // layout["m"] * WIDTH * F64, tuple(range(layout["pp"])), 1)] * (
            directions * layout["m"]
        )

    return by_layout


def in_order(schedule: str) -> Callable[[Sequence[Sequence[LabMessage]]], str]:
    """Whether every rank computed what the schedule says, in its order."""

    def judge(ranks: Sequence[Sequence[LabMessage]]) -> str:
        for rank, messages in enumerate(ranks):
            done = [message.kind for message in messages if message.kind in ("F", "B")]
            wanted = [kind for kind, _ in actions(schedule, len(ranks), done.count("F") or 1, rank)]
            if done != wanted:
                return (
                    f"the numbers are right, but rank {rank} computes {' '.join(done)}, and the schedule says "
                    f"{' '.join(wanted)}"
                )
        return ""

    return judge


def bubble(ranks: int) -> float:
    """Of 1F1B with equal stages, a backward that takes twice its forward, and messages that take nothing."""
    found = Query(("1f1b",), ranks, TIMED, times=Durations.parse("f=1,b=2")).simulate("1f1b")
    return found.bubble_makespan


LAB = Lab(
    "pipeline",
    "A pipeline executor",
    "run a schedule's actions: what to keep, whom to send to, and what must not wait",
    (
        Case("gpipe", ("pp=2,m=3", "pp=3,m=2"), "GPipe, fewer microbatches than stages", needs("gpipe"),
             judge=in_order("gpipe")),
        Case("one_f_one_b", ("pp=2,m=4", "pp=4,m=5", "pp=4,m=2", "pp=2,m=3,groups=2"), "1F1B, uneven stages",
             needs("1f1b"), judge=in_order("1f1b")),
    ),
    (
        Hint(("exactly x", "= m"), "the loss is the mean over all microbatches: each counts 1/m"),
        Hint(("exactly x", "= 1/m"), "each microbatch's loss is divided twice by their number"),
        Hint(("zero or missing",), "the gradient that a stage receives goes into backward of its own output, and the "
                                   "gradient of its input goes to the stage before"),
        Hint(("are left out",), "a microbatch that was computed is never sent backward"),
        Hint(("samples of the batch",), "backward of a microbatch belongs to its own forward: keep outputs by number"),
        Hint(
            ("no one factor",),
            "backward of a microbatch begins with the gradient that was received for it, and belongs to its own "
            "forward: keep outputs by number",
        ),
        Hint(("'NoneType'", "raised"), "what a stage receives has a gradient only after requires_grad_()"),
        Hint(("the loss is",), "`run` returns the loss of every microbatch, in order and not divided"),
    ),
    bench=lambda ranks: {"pp": ranks, "m": TIMED},
    bubble=bubble,
)  # fmt: skip
