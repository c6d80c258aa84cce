"""The options of a launch beside the job and its machines, and the kinds of launch that take them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fivefold.support.errors import Problem, UserError


class LauncherKind(NamedTuple):
    """A kind of launch."""

    writes: str
    suffix: str = ""  # of the file, if it is not named; empty: the text is printed


LAUNCHERS = {
    "slurm": LauncherKind("an sbatch file", ".sbatch"),
    "torchrun": LauncherKind("the torchrun command of each node"),
    "kubernetes": LauncherKind("a Kubernetes Job", ".yaml"),
    "trainjob": LauncherKind("a TrainJob of Kubeflow Trainer", ".yaml"),
    "ssh": LauncherKind("a script for the hosts of a file", ".sh"),
}
_LAUNCHERS_WITH = {
    **dict.fromkeys(("account", "partition", "time", "submit"), ("slurm",)),
    "host": ("torchrun",),
    "elastic": ("slurm", "torchrun"),
    "container": ("slurm", "kubernetes", "trainjob"),
    "claim": ("kubernetes", "trainjob"),
}
_NAME = re.compile(r"[\w.,@+-]+")
_ASCII = re.compile(_NAME.pattern, re.ASCII)
# Slurm's time limits: minutes, minutes:seconds, hours:minutes:seconds; after "days-" hours, hours:minutes ...
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{2}))?(?::(\d{2}))?", re.ASCII)
DEFAULT_TIME_LIMIT = "24:00:00"
_IMAGE = re.compile(r"[\w./:@+-]+", re.ASCII)
_ENROOT = re.compile(r"[\w./:@+#-]+", re.ASCII)  # REGISTRY#IMAGE


def one_launcher(kinds: Sequence[str]) -> str:
    """The kind of launch that is asked for; raises unless there is one."""
    if len(kinds) == 1:
        return kinds[0]
    ways = ", ".join(f"--{kind} ({launcher.writes})" for kind, launcher in LAUNCHERS.items())
    given = f", and {' '.join(f'--{kind}' for kind in kinds)} are {len(kinds)}" if kinds else ""
    raise UserError(f"launch writes for one kind of cluster{given}; choose {ways}", "launch.kind")


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch; None: not given. An empty account or partition leaves its line out."""

    account: str | None = None
    partition: str | None = None
    time: str | None = None  # limit of one start
    submit: bool = False
    host: str | None = None  # of torchrun's rendezvous
    container: str | None = None  # an image
    claim: str | None = None  # a PersistentVolumeClaim
    hostfile: Path | None = None
    restarts: int = 3
    elastic: bool = False  # continues without lost nodes, and with them when they are back

    @property
    def time_limit(self) -> int:
        """The time limit of one start, in seconds."""
        match = _TIME.fullmatch(self.time or DEFAULT_TIME_LIMIT)
        assert match, "checked by `problems`"
        days, *rest = match.groups()
        numbers = [int(number) for number in rest if number is not None]
        units = [3600, 60, 1] if days or len(numbers) == 3 else [60, 1]
        return 86400 * int(days or 0) + sum(map(int.__mul__, numbers, units))

    def problems(self, kind: str) -> list[Problem]:
        """What is wrong with the options for a kind of launch."""
        problems: list[Problem] = []
        for name, kinds in _LAUNCHERS_WITH.items():
            if getattr(self, name) and kind not in kinds:
                owners = " and ".join(f"--{owner}" for owner in kinds)
                problems.append(Problem("launch.option.kind", f"--{name} belongs to {owners}, not to --{kind}"))
        for name, pattern in {
            "account": _NAME,
            "partition": _NAME,
            "host": _ASCII,
            "container": _ENROOT if kind == "slurm" else _IMAGE,
            "claim": _ASCII,
        }.items():
            value = getattr(self, name)
            if value and (not pattern.fullmatch(value) or value.startswith("-")):
                problems.append(Problem("launch.option.name", f"--{name} {value!r} is not a valid name"))
        if self.time and not _TIME.fullmatch(self.time):
            example = "write for example 24:00:00 or 7-00"
            problems.append(Problem("launch.time", f"--time {self.time!r} is not a Slurm time limit; {example}"))
        elif self.time_limit < 60:
            short = f"--time {self.time!r} is less than a minute, which Slurm does not count; nearest: --time 1"
            problems.append(Problem("launch.time", short))
        if not 0 <= self.restarts <= 1000:
            problems.append(Problem("option.range", f"--restarts {self.restarts} must be between 0 and 1000"))
        open_names = [f"--{name}" for name in ("account", "partition") if getattr(self, name) is None]
        if self.submit and kind == "slurm" and open_names:
            needed = f"--submit needs {' and '.join(open_names)}; an empty name ('') leaves its line out"
            problems.append(Problem("launch.submit.names", needed))
        return problems
