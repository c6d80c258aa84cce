"""What following the planner would have cost on sweeps: several layouts, measured for one model and batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fivefold.truth.score import RowScore

ENOUGH = 3  # layouts of a sweep


@dataclass(frozen=True)
class Choice:
    """A sweep: the layout that the planner chooses, and the best measured one."""

    name: str
    layouts: int
    chosen: RowScore
    best: RowScore

    @property
    def out_of_memory(self) -> bool:
        return self.chosen.row.status == "oom"

    @property
    def regret(self) -> float:
        """How much longer a step takes than with the best measured layout."""
        chosen, best = self.chosen.run, self.best.run
        if self.out_of_memory or chosen is None or best is None or not chosen.seconds or not best.seconds:
            return float("inf")
        return chosen.seconds / best.seconds - 1


def choices(results: Sequence[RowScore]) -> list[Choice]:
    """One per sweep: the planner chooses from all layouts that were tried, those that failed included."""
    sweeps: dict[tuple[str, ...], list[RowScore]] = {}
    for result in results:
        if result.run is not None and result.seconds is not None:
            sweeps.setdefault(_sweep(result), []).append(result)
    found = []
    for key, tried in sweeps.items():
        fitting = [result for result in tried if result.planned]
        timed = [result for result in tried if result.error is not None]
        if len(tried) < ENOUGH or len(timed) < 2 or not fitting:
            continue
        chosen = min(fitting, key=lambda result: result.seconds or 0.0)
        best = min(timed, key=lambda result: result.run.seconds if result.run and result.run.seconds else 0.0)
        found.append(Choice(", ".join(filter(None, key)), len(tried), chosen, best))
    return found


def median_regret(found: Sequence[Choice]) -> float | None:
    return median(choice.regret for choice in found) if found else None


def _sweep(result: RowScore) -> tuple[str, ...]:
    """Rows of one source with the same work on the same machines, and the same software."""
    row = result.row
    assert result.run is not None
    columns = ("source", "model", "seq_len", "gpu", "gpus", "global_batch", "precision")
    stack = result.run.case.stack
    return (*(row.text(column) for column in columns), f"{stack.attention}/{stack.norm}")
