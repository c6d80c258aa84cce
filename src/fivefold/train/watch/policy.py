"""What is done about a step that is a spike, or whose numbers are none: watch.spike and watch.nonfinite.

    decision = policy.look(step, samples, loss, norm)      # None: nothing is wrong with it

All ranks ask with the same bits and get the same answer. What a rollback comes back to is found later, by the trainer:
until then its decision has no `back`.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from fivefold.job.config import WatchConfig
from fivefold.support.errors import TrainingError, UserError
from fivefold.train.records import Decision
from fivefold.train.watch.decisions import NAME, Decisions, Known, write
from fivefold.train.watch.spikes import Numbers, spikes, usual


class Kept(msgspec.Struct, frozen=True):
    """What a checkpoint's manifest has of it."""

    recent: list[Numbers] = []
    decisions: list[Decision] = []  # that changed what was learned


class Policy:
    def __init__(self, config: WatchConfig):
        self.config = config
        self.recent: deque[Numbers] = deque(maxlen=config.window)  # of steps that were made
        self.decisions = Decisions()
        self.judged = 0  # samples up to which another start has judged
        self.directory: Path | None = None  # where rank 0 keeps decisions
        self.say: Callable[[str], None] = lambda _: None

    def learn(self, known: Known) -> None:
        """Of earlier starts; the same on all ranks."""
        self.decisions.add(known.decisions)
        self.judged = known.judged

    def look(self, step: int, first: int, samples: int, found: Numbers) -> Decision | None:
        """About the batch of samples `first` to `samples` - 1. TrainingError where it ends the run."""
        before = self.decisions.at(first, samples)
        why = self._why(before, samples, found)
        if why is None:
            self.recent.append(found)
            return None
        action = self._action(why, before)
        if before is not None and before.action == action:
            if not before.changes:
                self.recent.append(found)
            return before
        if action is None:
            raise TrainingError(
                f"step {step}: loss {found.loss} and gradient norm {found.norm} are not both finite; samples "
                f"{first} to {samples - 1}; the weights were not touched"
            )
        middle = usual(self.recent)
        decision = Decision(
            step=step,
            first=first,
            samples=samples,
            why=why,
            action=action,
            loss=_finite(found.loss),
            grad_norm=_finite(found.norm),
            usual_loss=middle.loss if middle else None,
            usual_norm=middle.norm if middle else None,
        )
        if not decision.changes:
            self.recent.append(found)
        else:
            self._limit(decision)
        return decision

    def _why(self, before: Decision | None, samples: int, found: Numbers) -> Literal["spike", "nonfinite"] | None:
        """What another start found is not judged anew: the last bits may differ. What is no number is none."""
        if not found.finite:
            return "nonfinite"
        if before is not None:
            return before.why if before.why == "nonfinite" or self.config.spike != "off" or before.changes else None
        if self.config.spike == "off" or samples <= self.judged:
            return None
        return "spike" if spikes(found, self.recent, self.config.window, self.config.factor) else None

    def _action(self, why: str, before: Decision | None) -> Literal["warn", "skip", "rollback"] | None:
        """None: the run ends. What changed the curve once does so again."""
        if before is not None and before.changes:
            return before.action
        asked = self.config.spike if why == "spike" else self.config.nonfinite
        return None if asked == "stop" or asked == "off" else asked

    def _limit(self, decision: Decision) -> None:
        """No policy goes on for ever."""
        most, window = self.config.most, self.config.window
        if len(near := self.decisions.near(decision.step, window)) >= most:
            raise TrainingError(
                f"{decision.found}; the run ends: steps {', '.join(str(one.step) for one in near)} were skipped or "
                f"rolled back already, and watch.most={most} within watch.window={window} steps; the weights were "
                "not touched"
            )

    def settle(self, decision: Decision) -> None:
        """It is what is done: remember it, and say so."""
        again = self.decisions.by_first.get(decision.first)
        self.decisions.add([decision])
        if again != decision and self.directory is not None:
            try:
                write(self.directory, decision)
            except OSError as error:
                self.say(f"{self.directory / NAME} cannot be written: {error.strerror}; the next checkpoint has it")
        self.say(f"{decision}" + (" (as it was decided before)" if again is not None else ""))

    # ---- with a checkpoint ---------------------------------------------------------------------------------------

    def keep(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        return msgspec.to_builtins(Kept(list(self.recent), [one for one in self.decisions if one.changes]))

    def restore(self, table: dict[str, Any], where: object) -> None:
        """The steps before are those of the checkpoint; what was decided since stays decided."""
        try:
            kept = msgspec.convert(table, Kept)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: what its watchers knew cannot be read: {error}") from None
        self.recent.clear()
        self.recent.extend(kept.recent)
        self.decisions.add(one for one in kept.decisions if one.first not in self.decisions.by_first)


def _finite(value: float) -> float | None:
    return value if Numbers(value, 0.0).finite else None
