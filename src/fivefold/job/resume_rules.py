"""What a run that goes on may change: one table, and the sentences for what it refuses.

A run directory holds one loss curve over one data order. A command by hand that finds one of its name may not bend it
by accident: settings that would are refused, unless the directory itself was named (`fivefold train runs/first
optimizer.lr=1e-4`), which says that they are meant. The table in docs/jobs.md is this one.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from fivefold.data.base import is_place
from fivefold.job.config import Job
from fivefold.optim.lr_schedule import learning_rate
from fivefold.support.errors import Problem
from fivefold.support.parsing import toml_value
from fivefold.support.storage_place import Place

FREE = "free"  # no number of the curve changes, or only its last bits
MEANT = "meant"  # other samples, or other updates from here on: refused unless the directory was named
RATE = "rate"  # refused if it changes the learning rate of steps that are done, unless the schedule's length was said
NEVER = "never"  # the weights of another function

# Of a whole section, and of settings that differ from it. What is not named is as strict as its section.
RULES = {
    "model": NEVER,  # other shapes, or another function of the same shapes, such as another choice of experts
    "model.name": FREE,
    "model.dropout": MEANT,  # the model is the same, and its training is not
    "model.init_std": MEANT,  # without effect from here on: whoever changes it means another run
    "layout": FREE,  # the order of additions
    "data": MEANT,  # seq, seed and document_mask make other samples
    "optimizer": MEANT,
    "optimizer.schedule_steps": RATE,
    "loss": MEANT,
    "train": MEANT,  # batch, seed, dtype, fp8, what keeps the load of experts even
    "train.steps": RATE,
    **dict.fromkeys(
        ("train.device", "train.share_gpu", "train.compile", "train.deterministic"), FREE
    ),  # rounding, as layouts do
    **dict.fromkeys(
        ("train.eval_every", "train.eval_samples", "train.log_every", "train.count", "train.digest"), FREE
    ),  # only look
    "train.timeout": FREE,
    "checkpoint": FREE,
    "watch": FREE,  # most only look
    **dict.fromkeys([f"watch.{key}" for key in ("spike", "nonfinite", "window", "factor", "rollback")], MEANT),
    "elastic": FREE,
    "trace": FREE,
    "run": FREE,
}
_MAX_SHOWN = 6  # differences in a sentence
_COMPARED_STEPS = 1000  # steps at which two curves are compared


@dataclass(frozen=True)
class Change:
    key: str  # section.setting
    before: Any
    now: Any
    rule: str

    def __str__(self) -> str:
        return f"{self.key}: {text_of(self.before)} -> {text_of(self.now)}"


def changes(before: Job, now: Job, tokens: tuple[str, str] = ("", "")) -> list[Change]:
    """What differs between the run so far and a job that would go on with it, apart from the run's own name.

    `tokens` are the fingerprints of both data sets; an empty one is not known, and equals any.
    """
    old, new = ({section: flat(table) for section, table in msgspec.to_builtins(job).items()} for job in (before, now))
    differing = [
        Change(f"{section}.{key}", old[section].get(key), new[section].get(key), rule_of(f"{section}.{key}"))
        for section in new
        for key in {**old[section], **new[section]}
        if old[section].get(key) != new[section].get(key) and f"{section}.{key}" not in ("run.name", "run.dir")
    ]
    if all(tokens) and tokens[0] != tokens[1]:
        differing = [change for change in differing if not (change.key.startswith("data.") and change.rule == FREE)]
        was, is_ = (f"{data} ({print_[:8]})" for data, print_ in zip((before.data, now.data), tokens, strict=True))
        differing.append(Change("data", was, is_, MEANT))
    return differing


def flat(table: dict[str, Any]) -> dict[str, Any]:
    """A section in which the settings of a table have its name before theirs: experts.top_k. Tuples are lists, as files
    have them: a stored class that nobody imported does not know which it had."""
    table = {key: [*value] if isinstance(value, tuple) else value for key, value in table.items()}
    inner = (
        (f"{key}.{name}", it) for key, value in table.items() if isinstance(value, dict) for name, it in value.items()
    )
    return {key: value for key, value in table.items() if not isinstance(value, dict)} | dict(inner)


def rule_of(key: str) -> str:
    if key.startswith("data.") and is_place(key):
        return FREE  # the same tokens may lie elsewhere; other tokens are refused by their fingerprint
    return RULES.get(key) or RULES[key.partition(".")[0]]


def resume_problems(
    before: Job, now: Job, done: int, differing: list[Change], directory: Place, *, named: bool
) -> list[str]:
    """Why a job may not go on with a run that has made `done` steps; `named`: the directory was given by name."""
    own = "--fresh" if named else "run.name=NAME or --fresh"
    never = [change for change in differing if change.rule == NEVER]
    if never:
        other = (
            f"{directory} has another model: {_changes_text(never)}; {own} trains this one in a directory of its own"
        )
        return [Problem("run.resume.model", other)]
    if not done:  # imported weights have no curve yet
        return []
    if not named and (meant := [change for change in differing if change.rule == MEANT]):
        return [
            Problem(
                "run.resume.settings",
                f"{directory} was trained with other settings: {_changes_text(meant)}; {own} trains this job in a "
                f"directory of its own, and 'fivefold train {directory}' resumes the job that is there, which "
                "KEY=VALUE after it changes",
            )
        ]
    return _rate(before, now, done)


def bends(before: Job, now: Job, done: int) -> bool:
    """Whether the schedule's length moves the rate of steps that are done, and nobody said so: a jump comes next.

    Lengths are compared on the curve of the run so far. Another peak or warm-up says nothing of a length; another
    schedule does.
    """
    old, new = before.optimizer, now.optimizer
    if new.schedule_steps not in (0, old.schedule_steps) or new.schedule != old.schedule or now.train.steps <= done:
        return False
    stretched = msgspec.structs.replace(old, schedule_steps=new.schedule_steps)
    return any(
        learning_rate(old, step, before.train.steps) != learning_rate(stretched, step, now.train.steps)
        for step in {*range(0, done, max(1, done // _COMPARED_STEPS)), done - 1}
    )


def _rate(before: Job, now: Job, done: int) -> list[str]:
    if not bends(before, now, done):
        return []
    new, length = now.optimizer, before.optimizer.schedule_steps or before.train.steps
    was = learning_rate(before.optimizer, done - 1, before.train.steps)
    kept = learning_rate(msgspec.structs.replace(new, schedule_steps=length), done, length)
    here = learning_rate(new, done, now.train.steps)
    keeps = f"optimizer.schedule_steps={length} keeps it, and the rate {_way(was, kept)}; "
    return [
        Problem(
            "run.resume.rate",
            f"train.steps={now.train.steps} changes the learning rate of the {done} steps that are done: their "
            f"{new.schedule} schedule was {length} steps long; {keeps if length > new.warmup else ''}"
            f"optimizer.schedule_steps={max(now.train.steps, new.warmup + 1)} means the other curve, and it "
            f"{_way(was, here)}",
        )
    ]


def _way(before: float, now: float) -> str:
    return f"stays at {now:.3g}" if before == now else f"goes from {before:.3g} to {now:.3g}"


def _changes_text(differing: list[Change]) -> str:
    more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    return ", ".join(map(str, differing[:_MAX_SHOWN])) + more


def text_of(value: Any) -> str:
    """A setting's value in a sentence."""
    if isinstance(value, list | tuple) and value:
        return toml_value(value)
    if value is None or value in ("", [], ()):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
