"""Which step is a spike: a rule on the numbers of the steps before, the same on every rank to the bit."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec

from fivefold.job.config import WatchConfig
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.files import open_regular
from fivefold.trainer.records import METRICS, Judged, Step, StepDecision, read, to_line, trim

_LEAST = 0.05  # of the usual loss: less above it is no spike, however even the losses are


class StepNumbers(NamedTuple):
    """Of a step."""

    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def usual(recent: Sequence[StepNumbers]) -> StepNumbers | None:
    """The medians; None where there are no steps."""
    return StepNumbers(median(step.loss for step in recent), median(step.norm for step in recent)) if recent else None


def spikes(numbers: StepNumbers, recent: Sequence[StepNumbers], window: int, factor: float) -> bool:
    """Whether a step stands out from those before, of which half a window must be known.

    Its loss is above their median by more than `factor` times their median distance from it, and by more than a
    twentieth of it; or its gradient norm is above `factor` times their median norm.
    """
    if len(recent) < window // 2:
        return False
    middle = usual(recent)
    assert middle is not None
    distance = median(abs(step.loss - middle.loss) for step in recent)
    above = numbers.loss - middle.loss
    return above > max(factor * distance, _LEAST * abs(middle.loss)) or numbers.norm > factor * middle.norm > 0


# ---- decisions ------------------------------------------------------------------------------------------------------
# decisions.jsonl of a run: what was decided about steps, so that a start that comes to them again decides the same.
#
# Samples of the data order are used up and never come back, in a rollback neither. So a decision is found by the
# number of its batch's first sample, whatever happened to the steps in between, in any layout.


NAME = "decisions.jsonl"
_ALL = 1 << 62  # steps


class Decisions:
    """All that are known of a run, in the order of samples."""

    def __init__(self, decisions: Iterable[StepDecision] = ()):
        self.by_first = {
            decision.first: decision for decision in sorted(decisions, key=lambda decision: decision.samples)
        }

    def __iter__(self) -> Iterator[StepDecision]:
        return iter(self.by_first.values())

    def add(self, decisions: Iterable[StepDecision]) -> None:
        self.by_first = Decisions([*self, *decisions]).by_first

    def at(self, first: int, samples: int) -> StepDecision | None:
        """What was decided about the batch of these samples."""
        decisions = self.by_first.get(first)
        return decisions if decisions is not None and decisions.samples == samples and decisions.back is None else None

    def onward(self, step: int, samples: int) -> int:
        """The sample with which a run goes on that has made `step` steps and used up `samples`: a later one, if it was
        here that rollbacks came back to."""
        back = [decision.samples for decision in self if (decision.back, decision.back_samples) == (step, samples)]
        return max(back, default=samples)

    def undone(self, samples: int) -> bool:
        """Whether a state that had used up so many samples was undone by a rollback to an earlier one."""
        return any(
            decision.back_samples < samples < decision.samples for decision in self if decision.back_samples is not None
        )

    def near(self, step: int, window: int) -> list[StepDecision]:
        """Those that changed what was learned, of steps from `window` steps before on: also of later ones, which a
        rollback has undone."""
        return [decision for decision in self if decision.changes and decision.step > step - window]


class KnownDecisions(msgspec.Struct, frozen=True):
    """What the files of a run tell its next start."""

    decisions: list[StepDecision] = []
    judged: int = 0  # samples up to which steps were judged: those are not judged anew
    damaged: int = 0  # lines that were left out


def known(directory: Path) -> KnownDecisions:
    """Of a run's directory, before its metrics are cut to the checkpoint that it goes on from. What it knows from the
    metrics stays known, and damaged lines are removed."""
    _, damaged = trim(directory / NAME, _ALL)
    records = [record for _, record in read(directory / NAME)]
    steps = (record.samples or 0 for _, record in read(directory / METRICS) if isinstance(record, Step))
    before = max((record.samples for record in records if isinstance(record, Judged)), default=0)
    judged = max(steps, default=0)
    if judged > before:
        write(directory, Judged(samples=judged))
    return KnownDecisions(
        [record for record in records if isinstance(record, StepDecision)], max(judged, before), damaged
    )


def write(directory: Path, record: StepDecision | Judged) -> None:
    """On the disk when this returns: a crash must not have another start decide otherwise."""
    with open_regular(directory / NAME, append=True) as file:
        file.write(to_line(record))
        os.fsync(file.fileno())


# ---- policy ---------------------------------------------------------------------------------------------------------
# What is done about a step that is a spike, or whose numbers are none: watch.spike and watch.nonfinite.
#
#     decision = policy.look(step, samples, loss, norm)      # None: nothing is wrong with it
#
# All ranks ask with the same bits and get the same answer. What a rollback comes back to is found later, by the
# trainer: until then its decision has no `back`.


class PolicyState(msgspec.Struct, frozen=True):
    """What a checkpoint's manifest has of it."""

    recent: list[StepNumbers] = []
    decisions: list[StepDecision] = []  # that changed what was learned


class Policy:
    def __init__(self, config: WatchConfig):
        self.config = config
        self.recent: deque[StepNumbers] = deque(maxlen=config.window)  # of steps that were made
        self.decisions = Decisions()
        self.judged = 0  # samples up to which another start has judged
        self.directory: Path | None = None  # where rank 0 keeps decisions
        self.say: Callable[[str], None] = lambda _: None

    def learn(self, known: KnownDecisions) -> None:
        """Of earlier starts; the same on all ranks."""
        self.decisions.add(known.decisions)
        self.judged = known.judged

    def look(self, step: int, first: int, samples: int, numbers: StepNumbers) -> StepDecision | None:
        """About the batch of samples `first` to `samples` - 1. TrainingError where it ends the run."""
        before = self.decisions.at(first, samples)
        why = self._why(before, samples, numbers)
        if why is None:
            self.recent.append(numbers)
            return None
        action = self._action(why, before)
        if before is not None and before.action == action:
            if not before.changes:
                self.recent.append(numbers)
            return before
        if action is None:
            raise TrainingError(
                f"step {step}: loss {numbers.loss} and gradient norm {numbers.norm} are not both finite; samples "
                f"{first} to {samples - 1}; the weights were not touched"
            )
        middle = usual(self.recent)
        decision = StepDecision(
            step=step,
            first=first,
            samples=samples,
            why=why,
            action=action,
            loss=_finite(numbers.loss),
            grad_norm=_finite(numbers.norm),
            usual_loss=middle.loss if middle else None,
            usual_norm=middle.norm if middle else None,
        )
        if not decision.changes:
            self.recent.append(numbers)
        else:
            self._limit(decision)
        return decision

    def _why(
        self, before: StepDecision | None, samples: int, numbers: StepNumbers
    ) -> Literal["spike", "nonfinite"] | None:
        """What another start found is not judged anew: the last bits may differ. What is no number is none."""
        if not numbers.finite:
            return "nonfinite"
        if before is not None:
            return before.why if before.why == "nonfinite" or self.config.spike != "off" or before.changes else None
        if self.config.spike == "off" or samples <= self.judged:
            return None
        return "spike" if spikes(numbers, self.recent, self.config.window, self.config.factor) else None

    def _action(self, why: str, before: StepDecision | None) -> Literal["warn", "skip", "rollback"] | None:
        """None: the run ends. What changed the curve once does so again."""
        if before is not None and before.changes:
            return before.action
        asked = self.config.spike if why == "spike" else self.config.nonfinite
        return None if asked == "stop" or asked == "off" else asked

    def _limit(self, decision: StepDecision) -> None:
        """No policy goes on for ever."""
        most, window = self.config.most, self.config.window
        if len(near := self.decisions.near(decision.step, window)) >= most:
            raise TrainingError(
                f"{decision.finding}; the run ends: steps {', '.join(str(before.step) for before in near)} were "
                f"skipped or rolled back already, and watch.most={most} within watch.window={window} steps; the "
                "weights were not touched"
            )

    def settle(self, decision: StepDecision) -> None:
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
        return msgspec.to_builtins(
            PolicyState(list(self.recent), [decision for decision in self.decisions if decision.changes])
        )

    def restore(self, table: dict[str, Any], where: object) -> None:
        """The steps before are those of the checkpoint; what was decided since stays decided."""
        try:
            kept = msgspec.convert(table, PolicyState)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: what its watchers knew cannot be read: {error}") from None
        self.recent.clear()
        self.recent.extend(kept.recent)
        self.decisions.add(decision for decision in kept.decisions if decision.first not in self.decisions.by_first)


def _finite(value: float) -> float | None:
    return value if StepNumbers(value, 0.0).finite else None


# ---- account --------------------------------------------------------------------------------------------------------
# What the watchers of a run cost, by name, as a share of its steps' time.
#
# account = Account()
# with account.of("spikes"):
#     ...                      # a watcher at work
# account.step(seconds)        # a step is over
# print(account)               # watchers  0.084% of the steps' time: spikes 0.001%, slow ranks 0.083%


class Account:
    """Of one rank. On a GPU these are the host's seconds: what a watcher leaves to the device, it waits for inside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = 0.0  # seconds of steps

    @contextmanager
    def of(self, watcher: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(watcher, time.perf_counter() - start)

    def add(self, watcher: str, seconds: float) -> None:
        self.seconds[watcher] = self.seconds.get(watcher, 0.0) + seconds

    def step(self, seconds: float) -> None:
        self.steps += seconds

    def shares(self) -> dict[str, float]:
        """By watcher, of the steps' time."""
        return {name: seconds / self.steps for name, seconds in self.seconds.items()} if self.steps else {}

    def __str__(self) -> str:
        shares = self.shares()
        each = ", ".join(f"{name} {share:.3%}" for name, share in shares.items())
        return f"{sum(shares.values()):.3%} of the steps' time: {each}" if shares else "none at work"
