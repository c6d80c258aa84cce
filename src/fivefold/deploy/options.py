"""What a user says beside the job and its machines, and to which kind of launch it belongs."""

import re
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "slurm": "an sbatch file",
    "torchrun": "the line to type on each node",
    "kubernetes": "a Kubernetes Job",
    "trainjob": "a TrainJob of Kubeflow Trainer",
    "ssh": "a script for the hosts of a file",
}
_BELONG = {
    **dict.fromkeys(("account", "partition", "time", "submit"), ("slurm",)),
    "host": ("torchrun",),
    "elastic": ("slurm", "torchrun"),
    "container": ("slurm", "kubernetes", "trainjob"),
    "claim": ("kubernetes", "trainjob"),
}
_NAME = re.compile(r"[\w.,@+-]+")
_ASCII = re.compile(_NAME.pattern, re.ASCII)
# Of Slurm: minutes, minutes:seconds, hours:minutes:seconds; and behind days, hours, hours:minutes ...
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{2}))?(?::(\d{2}))?", re.ASCII)
USUAL_TIME = "24:00:00"
_IMAGE = re.compile(r"[\w./:@+-]+", re.ASCII)
_ENROOT = re.compile(r"[\w./:@+#-]+", re.ASCII)  # REGISTRY#IMAGE


@dataclass(frozen=True)
class Options:
    """None is not said. An account or partition that is empty has no line."""

    account: str | None = None
    partition: str | None = None
    time: str | None = None  # limit of one start
    submit: bool = False
    host: str | None = None
    container: str | None = None  # an image
    claim: str | None = None  # of a volume
    hosts: Path | None = None  # a file
    restarts: int = 3
    elastic: bool = False  # goes on when nodes are lost, and when they are back

    @property
    def limit(self) -> int:
        """Seconds of one start."""
        found = _TIME.fullmatch(self.time or USUAL_TIME)
        assert found, "checked by `problems`"
        days, *rest = found.groups()
        numbers = [int(number) for number in rest if number is not None]
        units = [3600, 60, 1] if days or len(numbers) == 3 else [60, 1]
        return 86400 * int(days or 0) + sum(map(int.__mul__, numbers, units))

    def problems(self, kind: str) -> list[str]:
        foreign = [name for name, kinds in _BELONG.items() if getattr(self, name) and kind not in kinds]
        where = {name: " and ".join(f"--{one}" for one in _BELONG[name]) for name in foreign}
        problems = [f"--{name} belongs to {where[name]}, not to --{kind}" for name in foreign]
        for name, pattern in {
            "account": _NAME,
            "partition": _NAME,
            "host": _ASCII,
            "container": _ENROOT if kind == "slurm" else _IMAGE,
            "claim": _ASCII,
        }.items():
            value = getattr(self, name)
            if value and (not pattern.fullmatch(value) or value.startswith("-")):
                problems.append(f"--{name} {value!r} is no name")
        if self.time and not _TIME.fullmatch(self.time):
            problems.append(f"--time {self.time!r} is no time limit of Slurm; write for example 24:00:00 or 7-00")
        elif self.limit < 60:
            problems.append(
                f"--time {self.time!r} is less than a minute, which Slurm does not count; nearest: --time 1"
            )
        if not 0 <= self.restarts <= 1000:
            problems.append(f"--restarts {self.restarts} must be between 0 and 1000")
        open_names = [f"--{name}" for name in ("account", "partition") if getattr(self, name) is None]
        if self.submit and kind == "slurm" and open_names:
            problems.append(f"--submit needs {' and '.join(open_names)}; an empty name ('') leaves its line out")
        return problems
