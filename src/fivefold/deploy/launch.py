"""From a job to a file that a cluster runs."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.deploy.deployment import Deployment
from fivefold.deploy.machines import machines
from fivefold.deploy.result import LaunchResult
from fivefold.deploy.slurm import SlurmOptions, sbatch
from fivefold.job.config import read_job
from fivefold.job.preflight import job_problems, open_data
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.support.files import write

_SUBMITTING = 120  # seconds for sbatch


@dataclass(frozen=True)
class Checked:
    """A job on its machines, checked as far as this machine can."""

    it: Deployment
    fill_in: list[str]  # what only the user knows
    notes: list[str]

    def result(self, kind: str, output: str, text: str, start: list[str], fill_in: Sequence[str] = ()) -> LaunchResult:
        machines = self.it.machines
        left = [*fill_in, *self.fill_in]
        return LaunchResult(
            kind, self.it.title, machines.nodes, machines.per_node, output, text, start, left, self.notes
        )


def deployment(
    file: str | None, changes: Sequence[str], cluster: str = "", nodes: int | None = None, per_node: int | None = None
) -> Checked:
    """Read a job, and hold it against the machines that are asked for."""
    job = read_job(file, list(changes))
    found = machines(job, cluster, nodes, per_node)
    problems, fill_in, notes = job_problems(job, found.world), [], list(found.notes)
    if not job.data.path:
        where = f"data.path in {file}" if file else "data.path=DIRECTORY"
        fill_in.append(f"{where}: tokens that `fivefold data prepare` made; without, it trains on Python's own source")
    elif os.path.exists(path_of(job.data.path)):
        open_data(job, problems)
    else:
        check = " ".join(filter(None, ["fivefold train", file, "--check"]))
        notes.append(
            f"data.path={job.data.path} is not on this machine and was not checked: `{check}` does, where it is"
        )
    if problems:
        raise UserError(problems)
    return Checked(Deployment(job, found, file or "", tuple(changes)), fill_in, notes)


def launch_slurm(job: Checked, output: Path, options: SlurmOptions, submit: bool = False) -> LaunchResult:
    """Write the sbatch file, and submit it if that is asked for."""
    problems = options.problems()
    if submit and options.blank:
        problems.append(f"--submit needs {' and '.join(options.blank)}; an empty name ('') leaves its line out")
    if problems:
        raise UserError(problems)
    text = sbatch(job.it, str(output), options)
    write(output, text)
    blanks = [f"{blank} in {output}, or give {option}" for option, blank in options.blank.items()]
    result = job.result("slurm", str(output), text, [shlex.join(["sbatch", str(output)])], blanks)
    if not submit:
        return result
    number = _submitted(output)
    return replace(result, submitted=number, follow=follow(number, job.it))


def _submitted(file: Path) -> str:
    """The number that Slurm gave it."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, timeout=_SUBMITTING)
    except FileNotFoundError:
        raise UserError(f"there is no sbatch on this machine; {file} is written: submit it where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch has not answered for {_SUBMITTING} s; whether {file} is queued: squeue --me") from None
    if done.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        raise UserError(f"sbatch has refused {file}: {said or f'exit code {done.returncode}'}")
    return done.stdout.split(";")[0].strip()  # "123;cluster" where there are several


def follow(number: str, it: Deployment) -> tuple[tuple[str, str], ...]:
    """Commands about a job of Slurm's, and what they do."""
    return (
        (f"squeue --jobs={number}", "whether it waits or runs"),
        (f"tail -F {it.plain_name}-{number}.out", "starts and ends"),
        (f"tail -F {it.log_directory}/slurm-{number}/rank-0.log", "steps and losses"),
        (f"scancel --signal=USR1 --batch {number}", "save, and queue it again"),
        (f"scancel {number}", "end it"),
    )
