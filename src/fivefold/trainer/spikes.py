"""Loss spikes: a rule on the numbers of the steps before, and what is done about a spike or a step that is not finite.

All ranks apply it to the same bits, and so decide alike.
"""

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
from fivefold.trainer.records import METRICS_FILE, Judged, Step, StepDecision, read, to_line, trim

_MIN_RISE = 0.05  # relative to the median loss: a smaller rise is no spike, however even the losses are


class StepNumbers(NamedTuple):
    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def medians(recent: Sequence[StepNumbers]) -> StepNumbers | None:
    """The median loss and norm; None where there are no steps."""
    return StepNumbers(median(step.loss for step in recent), median(step.norm for step in recent)) if recent else None


def is_spike(numbers: StepNumbers, recent: Sequence[StepNumbers], window: int, factor: float) -> bool:
    """Whether a step is a spike compared with those before; never if these are fewer than half a window.

    Its loss is above their median by more than `factor` times their median distance from it, and by more than a
    twentieth of it; or its gradient norm is above `factor` times their median norm.
    """
    if len(recent) < window // 2:
        return False
    usual = medians(recent)
    assert usual is not None
    distance = median(abs(step.loss - usual.loss) for step in recent)
    rise = numbers.loss - usual.loss
    return rise > max(factor * distance, _MIN_RISE * abs(usual.loss)) or numbers.norm > factor * usual.norm > 0


# ---- decisions ------------------------------------------------------------------------------------------------------
# decisions.jsonl of a run: the decisions about steps, so that a restart that repeats the steps decides the same.
#
# Samples of the data order are used once, also after a rollback. So a decision is found by the number of its batch's
# first sample, whatever happened to the steps in between, in any layout.


DECISIONS_FILE = "decisions.jsonl"
_LAST_STEP = 1 << 62  # no step is after it


class Decisions:
    """The decisions of a run, in the order of samples."""

    def __init__(self, decisions: Iterable[StepDecision] = ()):
        self.by_first = {
            decision.first: decision for decision in sorted(decisions, key=lambda decision: decision.samples)
        }

    def __iter__(self) -> Iterator[StepDecision]:
        return iter(self.by_first.values())

    def add(self, decisions: Iterable[StepDecision]) -> None:
        self.by_first = Decisions([*self, *decisions]).by_first

    def at(self, first: int, samples: int) -> StepDecision | None:
        """The decision about the batch of samples `first` to `samples` - 1, unless it rolled back."""
        decision = self.by_first.get(first)
        return decision if decision is not None and decision.samples == samples and decision.back is None else None

    def onward(self, step: int, samples: int) -> int:
        """The number of the next sample after `step` steps and `samples` samples: a later one, if rollbacks returned
        to this step."""
        skipped_to = [
            decision.samples for decision in self if (decision.back, decision.back_samples) == (step, samples)
        ]
        return max(skipped_to, default=samples)

    def undone(self, samples: int) -> bool:
        """Whether a state after so many samples was undone by a rollback to an earlier one."""
        return any(
            decision.back_samples < samples < decision.samples for decision in self if decision.back_samples is not None
        )

    def recent_changes(self, step: int, window: int) -> list[StepDecision]:
        """The skips and rollbacks since `window` steps before `step`; also after it, of steps that a rollback undid."""
        return [decision for decision in self if decision.changes and decision.step > step - window]


class KnownDecisions(msgspec.Struct, frozen=True):
    """The decisions that a run's files have for its next start."""

    decisions: list[StepDecision] = []
    judged: int = 0  # steps of samples before this number are not checked for spikes again
    damaged: int = 0  # how many lines were left out


def read_decisions(directory: Path) -> KnownDecisions:
    """Reads the decisions of a run's directory, before its metrics are trimmed to the checkpoint it resumes from.

    Removes damaged lines, and writes down how far the metrics came.
    """
    _, damaged = trim(directory / DECISIONS_FILE, _LAST_STEP)
    records = [record for _, record in read(directory / DECISIONS_FILE)]
    steps = (record.samples or 0 for _, record in read(directory / METRICS_FILE) if isinstance(record, Step))
    written = max((record.samples for record in records if isinstance(record, Judged)), default=0)
    judged = max(steps, default=0)
    if judged > written:
        write(directory, Judged(samples=judged))
    decisions = [record for record in records if isinstance(record, StepDecision)]
    return KnownDecisions(decisions, max(judged, written), damaged)


def write(directory: Path, record: StepDecision | Judged) -> None:
    """Writes and syncs a record, so that after a crash a restart decides the same."""
    with open_regular(directory / DECISIONS_FILE, append=True) as file:
        file.write(to_line(record))
        os.fsync(file.fileno())


# ---- policy ---------------------------------------------------------------------------------------------------------
# What is done about a step that is a spike or not finite: watch.spike and watch.nonfinite.
#
#     decision = policy.look(step, first, samples, StepNumbers(loss, norm))      # None: nothing is wrong with it
#
# All ranks call it with the same bits and get the same decision. The checkpoint that a rollback returns to is found
# later, by the trainer: until then its decision has no `back`.


class PolicyState(msgspec.Struct, frozen=True):
    """The part of a policy that a checkpoint's manifest has."""

    recent: list[StepNumbers] = []
    decisions: list[StepDecision] = []  # skips and rollbacks


class Policy:
    def __init__(self, config: WatchConfig, optimizer: str = ""):
        """`optimizer`: the plugin that updates the weights, if one does."""
        self.config, self.optimizer = config, optimizer
        self.recent: deque[StepNumbers] = deque(maxlen=config.window)  # of steps that updated weights
        self.decisions = Decisions()
        self.judged = 0  # steps of samples before this number were checked for spikes by an earlier start
        self.directory: Path | None = None  # where rank 0 writes decisions
        self.say: Callable[[str], None] = lambda _: None

    def learn(self, known: KnownDecisions) -> None:
        """Takes over the decisions of earlier starts; the same on all ranks."""
        self.decisions.add(known.decisions)
        self.judged = known.judged

    def look(self, step: int, first: int, samples: int, numbers: StepNumbers) -> StepDecision | None:
        """The decision about the step of samples `first` to `samples` - 1; None if it is neither a spike nor NaN.

        Raises TrainingError where the run is to end.
        """
        earlier = self.decisions.at(first, samples)
        why = self._why(earlier, samples, numbers)
        if why is None:
            self.recent.append(numbers)
            return None
        action = self._action(why, earlier)
        if earlier is not None and earlier.action == action:
            if not earlier.changes:
                self.recent.append(numbers)
            return earlier
        if action is None:
            left = f"; they are as {self.optimizer}, a plugin, has left them, which may be the cause"
            raise TrainingError(
                f"step {step}: loss {numbers.loss} and gradient norm {numbers.norm} are not both finite; samples "
                f"{first} to {samples - 1}; the weights were not touched{left if self.optimizer and step > 1 else ''}"
            )
        usual = medians(self.recent)
        decision = StepDecision(
            step=step,
            first=first,
            samples=samples,
            why=why,
            action=action,
            loss=_finite(numbers.loss),
            grad_norm=_finite(numbers.norm),
            usual_loss=usual.loss if usual else None,
            usual_norm=usual.norm if usual else None,
        )
        if decision.changes:
            self._check_limit(decision)
        else:
            self.recent.append(numbers)
        return decision

    def _why(
        self, earlier: StepDecision | None, samples: int, numbers: StepNumbers
    ) -> Literal["spike", "nonfinite"] | None:
        """What is wrong with a step, if anything. The last bits of a repeated step may differ, so steps that an earlier
        start has checked keep its `earlier` decision, or none; but NaN is always wrong."""
        if not numbers.finite:
            return "nonfinite"
        if earlier is not None:
            return earlier.why if earlier.why == "nonfinite" or self.config.spike != "off" or earlier.changes else None
        if self.config.spike == "off" or samples <= self.judged:
            return None
        return "spike" if is_spike(numbers, self.recent, self.config.window, self.config.factor) else None

    def _action(self, why: str, earlier: StepDecision | None) -> Literal["warn", "skip", "rollback"] | None:
        """The action of the job's settings; of an earlier decision if that changed weights. None: the run ends."""
        if earlier is not None and earlier.changes:
            return earlier.action
        setting = self.config.spike if why == "spike" else self.config.nonfinite
        return None if setting == "stop" or setting == "off" else setting

    def _check_limit(self, decision: StepDecision) -> None:
        """Raises TrainingError where too many steps were skipped or rolled back."""
        most, window = self.config.most, self.config.window
        recent = self.decisions.recent_changes(decision.step, window)
        if len(recent) >= most:
            raise TrainingError(
                f"{decision.finding}; the run ends: steps {', '.join(str(earlier.step) for earlier in recent)} were "
                f"skipped or rolled back already, and watch.most={most} within watch.window={window} steps; the "
                "weights were not touched"
            )

    def settle(self, decision: StepDecision) -> None:
        """Keeps a decision that is being carried out, writes it, and prints it."""
        earlier = self.decisions.by_first.get(decision.first)
        self.decisions.add([decision])
        if earlier != decision and self.directory is not None:
            try:
                write(self.directory, decision)
            except OSError as error:
                self.say(
                    f"{self.directory / DECISIONS_FILE} cannot be written: {error.strerror}; the next checkpoint has it"
                )
        self.say(f"{decision}" + (" (as it was decided before)" if earlier is not None else ""))

    # ---- in checkpoints ------------------------------------------------------------------------------------------

    def keep(self) -> dict[str, Any]:
        """The state for the manifest of a checkpoint."""
        return msgspec.to_builtins(
            PolicyState(list(self.recent), [decision for decision in self.decisions if decision.changes])
        )

    def restore(self, table: dict[str, Any], where: object) -> None:
        """Takes the recent steps from a checkpoint's manifest. Decisions that were made since stay."""
        try:
            state = msgspec.convert(table, PolicyState)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}: what its watchers knew cannot be read: {error}", "checkpoint.damaged") from None
        self.recent.clear()
        self.recent.extend(state.recent)
        self.decisions.add(decision for decision in state.decisions if decision.first not in self.decisions.by_first)


def _finite(value: float) -> float | None:
    return value if StepNumbers(value, 0.0).finite else None


# ---- account --------------------------------------------------------------------------------------------------------
# The time that the watchers of a run take, by name, as a share of its steps' time.
#
# account = Account()
# with account.of("spikes"):
#     ...                      # a watcher at work
# account.step(seconds)        # a step is over
# print(account)               # watchers  0.084% of the steps' time: spikes 0.001%, slow ranks 0.083%


class Account:
    """The seconds of one rank's watchers: the host's, also on a GPU, where watchers wait for their own kernels."""

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
        """{watcher: its share of the steps' time}."""
        return {name: seconds / self.steps for name, seconds in self.seconds.items()} if self.steps else {}

    def __str__(self) -> str:
        shares = self.shares()
        texts = ", ".join(f"{name} {share:.3%}" for name, share in shares.items())
        return f"{sum(shares.values()):.3%} of the steps' time: {texts}" if shares else "none at work"
