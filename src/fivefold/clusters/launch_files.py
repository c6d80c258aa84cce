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
from fivefold.clusters.machines import Machines, choose_machines, gpu_sharing_problem, min_elastic_nodes
from fivefold.clusters.options import LAUNCHERS, LaunchOptions
from fivefold.clusters.quoting import quote_command, quote_path, yaml_documents
from fivefold.job.config import Job
from fivefold.job.preflight import job_problems, needs_data, open_data
from fivefold.job.reading import read_job
from fivefold.planner.plan import plan_given_layout
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
    nproc_per_node: int
    output_name: str  # the file; empty: none was asked for, and `file_text` is printed
    file_text: str
    start_commands: list[str]
    placeholders: list[str]  # what is left to fill in, and where
    notes: list[str]
    job_id: str = ""  # Slurm's, if it was submitted
    next_commands: tuple[tuple[str, str], ...] = ()  # (command, its purpose)

    def blocks(self) -> Iterator[Text | Table]:
        yield Text(self.title, "bold")
        if self.output_name:
            yield Text(f"written to {self.output_name}")
        else:
            yield Text(self.file_text.rstrip("\n"), typed=True)
        for sentence in self.placeholders:
            yield Text(f"fill in: {sentence}", "bad")
        for sentence in self.notes:
            yield Text(f"note: {sentence}")
        if self.job_id:
            yield Text(f"submitted as Slurm job {self.job_id}", "good")
        else:
            yield Text("\n".join(["start it:", *(f"  {line}" for line in self.start_commands)]), typed=True)
        if self.next_commands:
            yield Table(["~command", "~purpose"], self.next_commands)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": self.nodes,
            "ranks_per_node": self.nproc_per_node,
            "output": self.output_name or None,
            "text": self.file_text,
            "start": self.start_commands,
            "fill_in": self.placeholders,
            "notes": self.notes,
            "submitted": self.job_id or None,
            "follow": [command for command, _ in self.next_commands],
        }


# ---- launch ---------------------------------------------------------------------------------------------------------


_SBATCH_TIMEOUT_S = 120


@dataclass(frozen=True)
class CheckedDeployment:
    """A job on its machines, checked as far as this machine can."""

    deployment: Deployment
    notes: list[str]


def launch(
    kind: str,
    file: str | None = None,
    changes: Sequence[str] = (),
    output: Path | None = None,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008 - frozen
    *,
    cluster: str = "",
    nodes: int | None = None,
    per_node: int | None = None,
) -> LaunchResult:
    """Write what starts a job on a cluster: `kind` is one of `LAUNCHERS`."""
    if problems := options.problems(kind):
        raise UserError(problems)
    if output is None and (suffix := LAUNCHERS[kind].suffix):
        output = Path(f"{Path(file or 'job').stem}{suffix}")
    if output is not None and file and output.absolute() == path_of(file).absolute():
        raise UserError(f"-o {output} is the job file itself; give another name", "output.taken")
    check_writable(output)
    hosts = ssh.read_hosts(options.hostfile) if options.hostfile else []
    checked = check_deployment(
        file, changes, cluster=cluster, nodes=nodes, per_node=per_node, options=options, num_hosts=len(hosts)
    )
    result = _write_launch_file(kind, checked, output, options, hosts)
    if not options.submit or output is None:
        return result
    job_id = _submit(output)
    return replace(result, job_id=job_id, next_commands=next_commands(job_id, checked.deployment))


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_deployment(
    file: str | None,
    changes: Sequence[str],
    *,
    cluster: str = "",
    nodes: int | None = None,
    per_node: int | None = None,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008 - frozen
    num_hosts: int = 0,
) -> CheckedDeployment:
    """Read a job, and check it against the machines that are asked for."""
    if "=" in (file or ""):
        message = f"{file!r} would be a setting for `fivefold train`, as it has a '='; rename the job file"
        raise UserError(message, "launch.file.name")
    job = read_job(file, list(changes))
    machines = choose_machines(job, cluster, nodes, per_node, num_hosts)
    min_nodes = min_elastic_nodes(job, machines) if options.elastic else 0
    problems, notes = job_problems(job, machines.world), list(machines.notes)
    try:
        path_of(job.run.dir.lstrip("~"))  # without the home of a user who may exist only on the cluster
    except UserError as error:
        problems += error.framed("run.dir: ")
    missing_paths = [f"{key}={path}" for key, path in job.data.places.items() if not os.path.exists(path_of(path))]
    if missing_paths:
        check = quote_command(["fivefold", "train"], file or "", changes, ["--check"])
        notes.append(
            f"not on this machine, so not checked: {' and '.join(missing_paths)}; run `{check}` where it can be read"
        )
    elif not job.data.usual:
        open_data(job, problems)
    if options.submit and needs_data(job):
        message = f"--submit: data.path is not filled in, and ranks would refuse {job.model.name} without it"
        problems.append(Problem("data.path.missing", message))
    if sharing := gpu_sharing_problem(job, machines):
        problems.append(sharing)
    if problems:
        raise UserError(problems)
    step_seconds, planner_notes = _plan_step(job, machines)
    packaged = bool(file) and not os.path.isfile(path_of(file or ""))
    job_file = str(Path(file)) if file else ""  # as it was read here: bash takes `job.toml/` for a directory
    deployment = Deployment(
        job=job,
        machines=machines,
        file=job_file,
        changes=tuple(changes),
        step_seconds=step_seconds,
        packaged=packaged,
        min_nodes=min_nodes,
    )
    return CheckedDeployment(deployment, notes + planner_notes)


def _plan_step(job: Job, machines: Machines) -> tuple[float | None, list[str]]:
    """The planned seconds of a step, None if the planner does not know the machines; and notes, such as that memory is
    short."""
    if not machines.gpus or machines.cluster is None:
        return None, []
    try:
        planned = plan_given_layout(job, machines.cluster)
    except UserError as error:
        return None, [f"time and memory are not known on {machines.cluster}: {error}"]
    if planned.fits:
        return planned.seconds, []
    needs, have = planned.footprint.total / 1e9, planned.device_memory / 1e9
    return planned.seconds, [
        f"as planned, this does not fit: the most loaded rank needs {needs:.1f} of {have:.1f} GB; `fivefold plan` "
        f"with --cluster {machines.cluster} finds a layout that does, if there is one"
    ]


# ---- the file -------------------------------------------------------------------------------------------------------


def _write_launch_file(
    kind: str, checked: CheckedDeployment, output: Path | None, options: LaunchOptions, hosts: list[str]
) -> LaunchResult:
    """Write the file for a kind of cluster; returns what is left to do."""
    deployment, output_name = checked.deployment, str(output or "")
    file_text, start_command = _launch_text(kind, deployment, output_name, options, hosts)
    if output is not None:
        write(output, file_text)
    return LaunchResult(
        kind=kind,
        title=deployment.title,
        nodes=deployment.machines.nodes,
        nproc_per_node=deployment.machines.per_node,
        output_name=output_name,
        file_text=file_text,
        start_commands=[start_command],
        placeholders=_placeholders(kind, deployment, output_name, file_text, options),
        notes=checked.notes + _notes(kind, deployment, options),
    )


def _launch_text(
    kind: str, deployment: Deployment, output_name: str, options: LaunchOptions, hosts: list[str]
) -> tuple[str, str]:
    """The text of the file, and what is typed to start it."""
    if kind == "slurm":
        return slurm.sbatch(deployment, output_name, options), quote_command(["sbatch"], output_name)
    if kind == "torchrun":
        nodes, run_id = deployment.machines.nodes, f"{deployment.safe_name}-{secrets.token_hex(4)}"
        where = f"each of the {nodes} nodes" if nodes > 1 else "the node"
        start = f"on {where}: " + (quote_command(["bash"], output_name) if output_name else "the above")
        return torchrun.node_script(deployment, options.host or "", run_id, options.restarts), start
    if kind == "ssh":
        return ssh.ssh_script(deployment, hosts, options.restarts), quote_command(["bash"], output_name)
    manifests = kubernetes.indexed_job if kind == "kubernetes" else kubernetes.train_job
    text = yaml_documents(*manifests(deployment, options.container or "", options.claim or "", options.restarts))
    return text, quote_command(["kubectl", "apply", "--filename"], output_name)


def _placeholders(
    kind: str, deployment: Deployment, output_name: str, file_text: str, options: LaunchOptions
) -> list[str]:
    """What is left to fill in: each placeholder of the file, where it is, and what goes there."""
    by_option = {"--account": slurm.ACCOUNT, "--partition": slurm.PARTITION, "--host": torchrun.HOST}
    by_option |= {"--container": kubernetes.IMAGE, "--claim": kubernetes.CLAIM}
    where = output_name or "the lines above"
    found = [
        f"{placeholder} in {where}, or give {option}"
        for option, placeholder in by_option.items()
        if placeholder in file_text
    ]
    if needs_data(deployment.job):
        job_file = output_name if kind in ("kubernetes", "trainjob") else deployment.needed_file
        again = "; then launch again, so that the container sees it" if kind == "slurm" and options.container else ""
        setting = f" in {job_file}" if job_file else "=DIRECTORY"
        found.append(f"data.path{setting}: a directory that `fivefold data prepare` has made{again}")
    return found


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
        seconds = options.time_limit // 2
        notes.append(f"--time {options.time} is short: ranks are told to save {seconds} s before the limit")
    return notes


# ---- submitting -----------------------------------------------------------------------------------------------------


def _submit(file: Path) -> str:
    """Submit a file to Slurm; returns its job id."""
    try:
        command = ["sbatch", "--parsable", str(file.absolute())]  # absolute, so that no name is taken for an option
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_SBATCH_TIMEOUT_S)
    except FileNotFoundError:
        message = f"there is no sbatch on this machine; {file} is written: submit it where Slurm is"
        raise UserError(message, "launch.sbatch.missing") from None
    except subprocess.TimeoutExpired:
        message = f"sbatch has not answered for {_SBATCH_TIMEOUT_S} s; whether {file} is queued: squeue --me"
        raise UserError(message, "launch.sbatch.silent") from None
    if completed.returncode:
        lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in completed.stderr.splitlines())
        reason = " ".join(lines) or f"exit code {completed.returncode}"
        raise UserError(f"sbatch has refused {file}: {reason}", "launch.sbatch.refused")
    job_id, *_ = completed.stdout.split(";")  # "123", or "123;cluster" where there are several clusters
    return job_id.strip()


def next_commands(job_id: str, deployment: Deployment) -> tuple[tuple[str, str], ...]:
    """Commands for a submitted Slurm job, and their purposes."""
    logs = quote_path(deployment.log_directory)
    return (
        (f"squeue --jobs={job_id}", "see whether it waits or runs"),
        (f"tail -F {deployment.safe_name}-{job_id}.out", "follow its starts and ends"),
        (f"tail -F {logs}/slurm-{job_id}/rank-0.log", "follow steps and losses"),
        (f"scancel --signal=USR1 --batch {job_id}", "save, and queue it again"),
        (f"scancel {job_id}", "end it"),
    )
