"""PyTorch's pipelining writes three of these schedules too; the compute orders must be the same, action by action."""

from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

WORDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def theirs(name: str, p: int, m: int, chunks: int, rank: int) -> list[str]:
    """The order PyTorch computes for a rank; its method needs numbers only, so no process group is made."""
    numbers = SimpleNamespace(
        pp_group_size=p,
        num_stages=chunks * p,
        n_local_stages=chunks,
        rank=rank,
        number_of_rounds=m // p,
        microbatches_per_round=p,
        _n_microbatches=m,
    )
    operations = getattr(torch_schedules, name)._calculate_single_rank_operations(numbers, rank)
    return [word for operation in operations if operation is not None for word in words(operation)]


def words(operation: Any) -> list[str]:
    if operation.sub_actions:
        return [word for part in operation.sub_actions for word in words(part)]
    return [f"{WORDS[operation.computation_type.name]}{operation.stage_index}.{operation.microbatch_index}"]


def ours(schedule: Schedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.compute(rank)]


VEES = [("ScheduleZBVZeroBubble", "zb-v"), ("ScheduleDualPipeV", "dualpipe-v")]
INTERLEAVED = ("ScheduleInterleaved1F1B", "interleaved")


@pytest.mark.parametrize(
    ("torch_name", "name", "p", "m", "chunks"),
    [(*names, p, m, 2) for names in VEES for p, m in [(2, 4), (4, 8), (4, 10), (8, 20)]]
    # and where groups are of p
    + [(*INTERLEAVED, *sizes) for sizes in [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)]],
)
def test_the_orders_are_pytorchs(torch_name: str, name: str, p: int, m: int, chunks: int) -> None:
    schedule = build(name, p, m, chunks=chunks)
    for rank in range(p):
        assert ours(schedule, rank) == theirs(torch_name, p, m, chunks, rank)
