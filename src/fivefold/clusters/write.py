"""`fivefold launch`: checks a job against its machines, and writes the file that starts it there."""

import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.clusters import kubernetes, slurm, ssh, torchrun
from fivefold.clusters.deployment import Deployment
from fivefold.clusters.machines import Machines, choose_machines, fewest_nodes, sharing_problem_there
from fivefold.clusters.options import KINDS, LaunchOptions
from fivefold.clusters.quoting import quote_command, quote_path, yaml_documents
from fivefold.job.config import Job, read_job
from fivefold.job.preflight import job_problems, needs_data, open_data
from fivefold.planner.plan import as_it_stands
from fivefold.render.blocks import Result, Table, Text, check_writable
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import write
from fivefold.support.parsing import path_of

# ---- result ---------------------------------------------------------------------------------------------------------
# The file that was written, how to start it, and what is left to fill in.


@dataclass(frozen=True)
class LaunchResult(Result):
    kind: str  # slurm | torchrun | kubernetes | trainjob | ssh
    title: str
    nodes: int
    per_node: int
    output: str  # the file; empty: none was asked for, and `text` is printed
    text: str
    start: list[str]  # commands that start it
    fill_in: list[str]
    notes: list[str]
    submitted: str = ""  # its Slurm job id
    follow: tuple[tuple[str, str], ...] = ()  # (command, what it shows)

    def blocks(self) -> Iterator[Text | Table]:
        yield Text(self.title, "bold")
        if self.output:
            yield Text(f"written to {self.output}")
        else:
            yield Text(self.text.rstrip("\n"), typed=True)
        for sentence in self.fill_in:
            yield Text(f"fill in: {sentence}", "bad")
        for sentence in self.notes:
            yield Text(f"note: {sentence}")
        if self.submitted:
            yield Text(f"submitted as Slurm job {self.submitted}", "good")
        else:
            yield Text("\n".join(["start it:", *(f"  {line}" for line in self.start)]), typed=True)
        if self.follow:
            yield Table(["~command", "~shows"], self.follow)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": self.nodes,
            "ranks_per_node": self.per_node,
            "output": self.output or None,
            "text": self.text,
            "start": self.start,
            "fill_in": self.fill_in,
            "notes": self.notes,
            "submitted": self.submitted or None,
            "follow": [command for command, _ in self.follow],
        }


# ---- launch ---------------------------------------------------------------------------------------------------------


_SUFFIX = {"slurm": ".sbatch", "kubernetes": ".yaml", "trainjob": ".yaml", "ssh": ".sh"}
_SBATCH_TIMEOUT = 120  # seconds


@dataclass(frozen=True)
class CheckedDeployment:
    """A job on its machines, checked as far as this machine can."""

    deployment: Deployment
    notes: list[str]


def launch(
    kinds: Sequence[str],
    file: str | None = None,
    changes: Sequence[str] = (),
    output: Path | None = None,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008 - frozen
    *,
    cluster: str = "",
    nodes: int | None = None,
    per_node: int | None = None,
) -> LaunchResult:
    """Write what starts a job on a cluster: `kinds` is one of slurm, torchrun, kubernetes, trainjob and ssh."""
    if len(kinds) != 1:
        ways = ", ".join(f"--{kind} ({what})" for kind, what in KINDS.items())
        given = f", and {' '.join(f'--{kind}' for kind in kinds)} are {len(kinds)}" if kinds else ""
        raise UserError(f"launch writes for one kind of cluster{given}; choose {ways}", "launch.kind")
    (kind,) = kinds
    if problems := options.problems(kind):
        raise UserError(problems)
    if output is None and kind in _SUFFIX:
        output = Path(f"{Path(file or 'job').stem}{_SUFFIX[kind]}")
    if output is not None and file and output.absolute() == path_of(file).absolute():
        raise UserError(f"-o {output} is the job file itself; give another name", "output.taken")
    check_writable(output)
    hosts = ssh.read_hosts(options.hosts) if options.hosts else []
    checked = check_deployment(file, changes, cluster, nodes, per_node, options, len(hosts))
    result = _write_launch_file(kind, checked, output, options, hosts)
    if not options.submit or output is None:
        return result
    job_id = _submit(output)
    return replace(result, submitted=job_id, follow=follow_commands(job_id, checked.deployment))


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_deployment(
    file: str | None,
    changes: Sequence[str],
    cluster: str = "",
    nodes: int | None = None,
    per_node: int | None = None,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008 - frozen
    hosts: int = 0,
) -> CheckedDeployment:
    """Read a job, and check it against the machines that are asked for."""
    if "=" in (file or ""):
        setting = f"{file!r} would be a setting for `fivefold train`, as it has a '='; rename the job file"
        raise UserError(setting, "launch.file.name")
    job = read_job(file, list(changes))
    machines = choose_machines(job, cluster, nodes, per_node, hosts)
    min_nodes = fewest_nodes(job, machines) if options.elastic else 0
    problems, notes = job_problems(job, machines.world), list(machines.notes)
    try:
        path_of(job.run.dir.lstrip("~"))  # without the home of a user who may exist only on the cluster
    except UserError as error:
        problems += error.framed("run.dir: ")
    elsewhere = [f"{key}={place}" for key, place in job.data.places.items() if not os.path.exists(path_of(place))]
    if elsewhere:
        check = quote_command(["fivefold", "train"], file or "", changes, ["--check"])
        notes.append(
            f"{' and '.join(elsewhere)} is not on this machine and was not checked: `{check}` does, where it is"
        )
    elif not job.data.usual:
        open_data(job, problems)
    if options.submit and needs_data(job):
        empty = f"--submit: data.path is not filled in, and ranks would refuse {job.model.name} without it"
        problems.append(Problem("data.path.missing", empty))
    if sharing := sharing_problem_there(job, machines):
        problems.append(sharing)
    if problems:
        raise UserError(problems)
    step_seconds, planner_notes = _plan_step(job, machines)
    packaged = bool(file) and not os.path.isfile(path_of(file or ""))
    name = str(Path(file)) if file else ""  # as it was read here: bash takes `job.toml/` for a directory
    deployment = Deployment(job, machines, name, tuple(changes), step_seconds, packaged, min_nodes)
    return CheckedDeployment(deployment, notes + planner_notes)


def _plan_step(job: Job, machines: Machines) -> tuple[float, list[str]]:
    """The planned seconds of a step, 0 if the planner does not know the machines; and notes, such as that memory is
    short."""
    if not machines.gpus or machines.cluster is None:
        return 0.0, []
    try:
        option = as_it_stands(job, machines.cluster)
    except UserError as error:
        return 0.0, [f"time and memory are not known on {machines.cluster}: {error}"]
    if option.fits:
        return option.seconds, []
    needs, have = option.footprint.total / 1e9, option.device_memory / 1e9
    return option.seconds, [
        f"as planned, this does not fit: the most loaded rank needs {needs:.1f} of {have:.1f} GB; `fivefold plan` "
        f"with --cluster {machines.cluster} finds a layout that does, if there is one"
    ]


# ---- the file -------------------------------------------------------------------------------------------------------


def _write_launch_file(
    kind: str, checked: CheckedDeployment, output: Path | None, options: LaunchOptions, hosts: list[str]
) -> LaunchResult:
    """Write the file for a kind of cluster; returns what is left to do."""
    deployment, name = checked.deployment, str(output or "")
    text, start = _launch_text(kind, deployment, name, options, hosts)
    if output is not None:
        write(output, text)
    return LaunchResult(
        kind,
        deployment.title,
        deployment.machines.nodes,
        deployment.machines.per_node,
        name,
        text,
        [start],
        _blanks(kind, deployment, name, text, options),
        checked.notes + _notes(kind, deployment, options),
    )


def _launch_text(
    kind: str, deployment: Deployment, name: str, options: LaunchOptions, hosts: list[str]
) -> tuple[str, str]:
    """The text of the file, and what is typed to start it."""
    if kind == "slurm":
        return slurm.sbatch(deployment, name, options), quote_command(["sbatch"], name)
    if kind == "torchrun":
        nodes, run_id = deployment.machines.nodes, f"{deployment.safe_name}-{secrets.token_hex(4)}"
        where = f"each of the {nodes} nodes" if nodes > 1 else "the node"
        start = f"on {where}: " + (quote_command(["bash"], name) if name else "the above")
        return torchrun.node_script(deployment, options.host or "", run_id, options.restarts), start
    if kind == "ssh":
        return ssh.ssh_script(deployment, hosts, options.restarts), quote_command(["bash"], name)
    manifests = kubernetes.indexed_job if kind == "kubernetes" else kubernetes.train_job
    text = yaml_documents(*manifests(deployment, options.container or "", options.claim or "", options.restarts))
    return text, quote_command(["kubectl", "apply", "--filename"], name)


def _blanks(kind: str, deployment: Deployment, name: str, text: str, options: LaunchOptions) -> list[str]:
    """What is left to fill in: sentences without their beginning."""
    placeholders = {"--account": slurm.ACCOUNT, "--partition": slurm.PARTITION, "--host": torchrun.HOST}
    placeholders |= {"--container": kubernetes.IMAGE, "--claim": kubernetes.CLAIM}
    where = name or "the lines above"
    blanks = [f"{blank} in {where}, or give {option}" for option, blank in placeholders.items() if blank in text]
    if needs_data(deployment.job):
        job_file = name if kind in ("kubernetes", "trainjob") else deployment.needed_file
        again = "; then launch again, so that the container sees it" if kind == "slurm" and options.container else ""
        setting = f" in {job_file}" if job_file else "=DIRECTORY"
        blanks.append(f"data.path{setting}: a directory that `fivefold data prepare` has made{again}")
    return blanks


def _notes(kind: str, deployment: Deployment, options: LaunchOptions) -> list[str]:
    """What is worth knowing before it is started."""
    machines, min_nodes = deployment.machines, deployment.min_nodes
    notes = kubernetes.notes(deployment) if kind in ("kubernetes", "trainjob") else []
    if min_nodes == machines.nodes:
        least = deployment.job.elastic.least
        notes.append(f"elastic.least={least} needs all {min_nodes} nodes: it cannot continue without one")
    elif min_nodes:
        notes.append(
            f"it starts as soon as {min_nodes} of {machines.nodes} nodes are there; elastic.least={machines.world} "
            "waits for all"
        )
    if kind == "slurm" and options.time_limit < 2 * deployment.save_notice:
        notes.append(f"--time {options.time} is short: saving is begun {options.time_limit // 2} s before its end")
    return notes


# ---- submitting -----------------------------------------------------------------------------------------------------


def _submit(file: Path) -> str:
    """Submit a file to Slurm; returns its job id."""
    try:
        words = ["sbatch", "--parsable", str(file.absolute())]  # absolute, so that no name is taken for an option
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SBATCH_TIMEOUT)
    except FileNotFoundError:
        absent = f"there is no sbatch on this machine; {file} is written: submit it where Slurm is"
        raise UserError(absent, "launch.sbatch.missing") from None
    except subprocess.TimeoutExpired:
        silent = f"sbatch has not answered for {_SBATCH_TIMEOUT} s; whether {file} is queued: squeue --me"
        raise UserError(silent, "launch.sbatch.silent") from None
    if done.returncode:
        lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        reason = " ".join(lines) or f"exit code {done.returncode}"
        raise UserError(f"sbatch has refused {file}: {reason}", "launch.sbatch.refused")
    job_id, *_ = done.stdout.split(";")  # "123", or "123;cluster" where there are several clusters
    return job_id.strip()


def follow_commands(job_id: str, deployment: Deployment) -> tuple[tuple[str, str], ...]:
    """Commands for a submitted Slurm job, and what they do."""
    logs = quote_path(deployment.log_directory)
    return (
        (f"squeue --jobs={job_id}", "whether it waits or runs"),
        (f"tail -F {deployment.safe_name}-{job_id}.out", "starts and ends"),
        (f"tail -F {logs}/slurm-{job_id}/rank-0.log", "steps and losses"),
        (f"scancel --signal=USR1 --batch {job_id}", "save, and queue it again"),
        (f"scancel {job_id}", "end it"),
    )
