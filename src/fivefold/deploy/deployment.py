"""What is deployed: a job, the words that start it, and the machines."""

import os
import re
from dataclasses import dataclass
from functools import cached_property

from fivefold.deploy import shell
from fivefold.deploy.machines import Machines
from fivefold.job.config import Job
from fivefold.plan.cost.memory import checkpoint_bytes
from fivefold.support.formatting import bytes_text, si

_PER_NODE = 1e9  # bytes per second that a node writes to a shared file system: an assumption, on the low side
_LEAST = 300  # seconds: Slurm looks at time limits once a minute, and a short step has to end first


@dataclass(frozen=True)
class Deployment:
    job: Job
    machines: Machines
    file: str = ""  # the job file, as the nodes read it
    changes: tuple[str, ...] = ()  # KEY=VALUE
    step: float = 0.0  # seconds, as planned; 0: not known
    packaged: bool = False  # the file comes with Fivefold, and the nodes have it
    least: int = 0  # nodes with which an elastic job goes on; 0: it is not elastic

    def words(self, command: str = "train") -> str:
        """What each rank runs."""
        elastic = ["--elastic"] if self.least and command == "train" else []
        return shell.command(["fivefold", command], self.file, self.changes, elastic)

    @property
    def own_file(self) -> str:
        """One that the nodes must see."""
        return "" if self.packaged else self.file

    @property
    def title(self) -> str:
        model = self.job.model
        return f"{model.name}, {si(model.parameter_count)} parameters, {self.job.layout} on {self.machines}"

    @property
    def plain_name(self) -> str:
        """The run's name, as every scheduler takes it, and no program for an option."""
        return re.sub(r"[^\w.-]+", "-", self.job.run.name).lstrip("-") or "run"

    @cached_property
    def seconds_to_save(self) -> float:
        return self._checkpoint / (_PER_NODE * self.machines.nodes)

    @property
    def _checkpoint(self) -> int:
        return checkpoint_bytes(self.job.model, self.job.train.dtype, self.job.optimizer)

    @property
    def notice(self) -> int:
        """Seconds before a time limit at which ranks are told to save: whole minutes."""
        return -(-int(_LEAST + self.step + 2 * self.seconds_to_save) // 60) * 60

    @property
    def saving(self) -> str:
        step = f"after a step of {self.step:.0f} s, as planned; " if self.step >= 1 else ""
        return f"{step}{bytes_text(self._checkpoint)}, {self.seconds_to_save:.0f} s at 1 GB/s a node"

    @property
    def log_directory(self) -> str:
        """Below the runs, unless they are no directory of this file system."""
        return "runs" if "://" in self.job.run.dir else self.job.run.dir

    @property
    def mounts(self) -> list[str]:
        """Paths outside the current directory that a container has to see."""
        paths = {self.job.data.path, self.job.run.dir, os.path.dirname(self.own_file)}
        return sorted(path for path in paths if path.startswith(("/", "~")))
