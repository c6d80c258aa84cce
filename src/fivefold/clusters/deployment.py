"""`Deployment`: a job, the command that starts it, and its machines; what the files of all launchers say of them."""

import os
import re
from dataclasses import dataclass
from functools import cached_property

from fivefold.clusters.machines import Machines
from fivefold.clusters.quoting import quote_command
from fivefold.cost.model_state import checkpoint_bytes
from fivefold.job.config import Job
from fivefold.job.reading import lies_in_run
from fivefold.support.parsing import path_of
from fivefold.support.text import bytes_text, si

_NODE_WRITE_RATE = 1e9  # bytes/s to a shared file system: an assumption, on the low side
_MIN_NOTICE_S = 300  # Slurm checks time limits once a minute, and a short step has to end first


@dataclass(frozen=True)
class Deployment:
    """A job on its machines: what an sbatch file, a torchrun line, a manifest and a script for ssh are written from."""

    job: Job
    machines: Machines
    file: str = ""  # the job file, as the nodes read it
    changes: tuple[str, ...] = ()  # KEY=VALUE
    step_seconds: float | None = None  # as planned; None: not known
    packaged: bool = False  # the file is part of Fivefold, so that the nodes have it
    min_nodes: int = 0  # nodes with which an elastic job goes on; 0: it is not elastic

    def rank_command(self, command: str = "train") -> str:
        """The command line that each rank runs."""
        options = ["--elastic"] if self.min_nodes and command == "train" else []
        if self.file and lies_in_run(path_of(self.file)):
            options += [f"--plugin={name}" for name in self.job.plugins]
        return quote_command(["fivefold", command], self.file, self.changes, options)

    @property
    def needed_file(self) -> str:
        """The job file if the nodes must be able to read it; empty if it is part of Fivefold."""
        return "" if self.packaged else self.file

    @property
    def title(self) -> str:
        """What is started, in the first comment of every file."""
        model = self.job.model
        return f"{model.name}, {si(model.parameter_count)} parameters, {self.job.layout} on {self.machines}"

    @property
    def safe_name(self) -> str:
        """The run's name with characters that every scheduler takes; no program takes it for an option."""
        return re.sub(r"[^\w.-]+", "-", self.job.run.name).lstrip("-") or "run"

    @cached_property
    def save_seconds(self) -> float:
        """How long the nodes take to write a checkpoint, as assumed."""
        return self._checkpoint_bytes / (_NODE_WRITE_RATE * self.machines.nodes)

    @property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.job.model, self.job.train.dtype, self.job.optimizer)

    @property
    def save_notice(self) -> int:
        """How many seconds before a time limit ranks are told to save, in whole minutes."""
        return -(-int(_MIN_NOTICE_S + (self.step_seconds or 0) + 2 * self.save_seconds) // 60) * 60

    @property
    def save_estimate(self) -> str:
        """What a save has to wait for and to write, and the seconds of it, in words for a comment."""
        step = f"after a step of {self.step_seconds:.0f} s, as planned; " if (self.step_seconds or 0) >= 1 else ""
        return f"{step}{bytes_text(self._checkpoint_bytes)}, {self.save_seconds:.0f} s at 1 GB/s a node"

    @property
    def log_directory(self) -> str:
        """The directory for logs: run.dir, or "runs" if that is on object storage."""
        return "runs" if "://" in self.job.run.dir else self.job.run.dir

    @property
    def paths(self) -> dict[str, str]:
        """The settings of the job that are paths of a file system, if they are set."""
        job = self.job
        settings = job.data.places | {"run.dir": job.run.dir, "run.weights": job.run.weights}
        settings["layout.schedule"] = job.layout.schedule if os.path.isfile(job.layout.schedule) else ""
        return {key: path for key, path in settings.items() if path and "://" not in path}

    @property
    def mounts(self) -> list[str]:
        """Paths outside the current directory that a container has to see."""
        paths = {*self.paths.values(), os.path.dirname(self.needed_file)}
        return sorted(path for path in paths if path.startswith(("/", "~")))
