"""`fivefold launch`: checks a job against its machines, and writes the file that starts it there."""

import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.clusters import kubernetes, slurm, torchrun
from fivefold.clusters.deployment import KINDS, Deployment, Machines, Options, least_nodes, machines
from fivefold.clusters.quoting import command, documents, path
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
_SUBMITTING = 120  # seconds for sbatch


@dataclass(frozen=True)
class CheckedJob:
    """A job on its machines, checked as far as this machine can."""

    it: Deployment
    notes: list[str]


def launch(
    kinds: Sequence[str],
    file: str | None = None,
    changes: Sequence[str] = (),
    output: Path | None = None,
    options: Options = Options(),  # noqa: B008 - frozen
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
    hosts = torchrun.read_hosts(options.hosts) if options.hosts else []
    checked = deployment(file, changes, cluster, nodes, per_node, options, len(hosts))
    return written(kind, checked, output, options, hosts)


def deployment(
    file: str | None,
    changes: Sequence[str],
    cluster: str = "",
    nodes: int | None = None,
    per_node: int | None = None,
    options: Options = Options(),  # noqa: B008 - frozen
    hosts: int = 0,
) -> CheckedJob:
    """Read a job, and check it against the machines that are asked for."""
    if "=" in (file or ""):
        setting = f"{file!r} would be a setting for `fivefold train`, as it has a '='; rename the job file"
        raise UserError(setting, "launch.file.name")
    job = read_job(file, list(changes))
    wanted = machines(job, cluster, nodes, per_node, hosts)
    least = least_nodes(job, wanted) if options.elastic else 0
    problems, notes = job_problems(job, wanted.world), list(wanted.notes)
    try:
        path_of(job.run.dir.lstrip("~"))  # without the home of a user who may exist only on the cluster
    except UserError as error:
        problems += error.framed("run.dir: ")
    elsewhere = [f"{key}={place}" for key, place in job.data.places.items() if not os.path.exists(path_of(place))]
    if elsewhere:
        check = command(["fivefold", "train"], file or "", changes, ["--check"])
        notes.append(
            f"{' and '.join(elsewhere)} is not on this machine and was not checked: `{check}` does, where it is"
        )
    elif not job.data.usual:
        open_data(job, problems)
    if options.submit and needs_data(job):
        empty = f"--submit: data.path is not filled in, and ranks would refuse {job.model.name} without it"
        problems.append(Problem("data.path.missing", empty))
    if problems:
        raise UserError(problems)
    step = _planned(job, wanted, notes)
    packaged = bool(file) and not os.path.isfile(path_of(file or ""))
    name = str(Path(file)) if file else ""  # as it was read here: bash takes `job.toml/` for a directory
    return CheckedJob(Deployment(job, wanted, name, tuple(changes), step, packaged, least), notes)


def _planned(job: Job, wanted: Machines, notes: list[str]) -> float:
    """The planned seconds of a step, 0 if the planner does not know the machines; a note says so if memory is short."""
    if not wanted.gpus or wanted.cluster is None:
        return 0.0
    try:
        option = as_it_stands(job, wanted.cluster)
    except UserError as error:
        notes.append(f"time and memory are not known on {wanted.cluster}: {error}")
        return 0.0
    if not option.fits:
        needs, have = option.footprint.total / 1e9, option.device_memory / 1e9
        notes.append(
            f"as planned, this does not fit: the most loaded rank needs {needs:.1f} of {have:.1f} GB; `fivefold plan` "
            f"with --cluster {wanted.cluster} finds a layout that does, if there is one"
        )
    return option.seconds


def written(kind: str, checked: CheckedJob, output: Path | None, options: Options, hosts: list[str]) -> LaunchResult:
    """Write the file for a kind of cluster, and submit it if that is asked for; returns what is left to do."""
    it, name, restarts = checked.it, str(output or ""), options.restarts
    if kind == "slurm":
        text, start = slurm.sbatch(it, name, options), [command(["sbatch"], name)]
    elif kind == "torchrun":
        text = torchrun.lines(it, options.host or "", f"{it.plain_name}-{secrets.token_hex(4)}", restarts)
        nodes = f"each of the {it.machines.nodes} nodes" if it.machines.nodes > 1 else "the node"
        start = [f"on {nodes}: " + (command(["bash"], name) if name else "the above")]
    elif kind == "ssh":
        text, start = torchrun.ssh_script(it, hosts, restarts), [command(["bash"], name)]
    else:
        make = kubernetes.indexed_job if kind == "kubernetes" else kubernetes.train_job
        text = documents(*make(it, options.container or "", options.claim or "", restarts))
        start = [command(["kubectl", "apply", "--filename"], name)]
    if output is not None:
        write(output, text)
    places = {"--account": slurm.ACCOUNT, "--partition": slurm.PARTITION, "--host": torchrun.HOST}
    places |= {"--container": kubernetes.IMAGE, "--claim": kubernetes.CLAIM}
    blanks = [
        f"{place} in {name or 'the lines above'}, or give {option}" for option, place in places.items() if place in text
    ]
    if needs_data(it.job):
        place = name if kind in ("kubernetes", "trainjob") else it.own_file
        again = "; then launch again, so that the container sees it" if kind == "slurm" and options.container else ""
        where = f" in {place}" if place else "=DIRECTORY"
        blanks.append(f"data.path{where}: a directory that `fivefold data prepare` has made{again}")
    notes = checked.notes + (kubernetes.notes(it) if kind in ("kubernetes", "trainjob") else [])
    if it.least == it.machines.nodes:
        notes.append(f"elastic.least={it.job.elastic.least} needs all {it.least} nodes: it cannot continue without one")
    elif it.least:
        most, ranks = it.machines.nodes, it.machines.world
        notes.append(f"it starts as soon as {it.least} of {most} nodes are there; elastic.least={ranks} waits for all")
    if kind == "slurm" and options.limit < 2 * it.notice:
        notes.append(f"--time {options.time} is short: saving is begun {options.limit // 2} s before its end")
    result = LaunchResult(kind, it.title, it.machines.nodes, it.machines.per_node, name, text, start, blanks, notes)
    if not options.submit or output is None:
        return result
    number = _submitted(output)
    return replace(result, submitted=number, follow=follow(number, it))


def _submitted(file: Path) -> str:
    """Submit a file to Slurm; returns its job id."""
    try:
        words = ["sbatch", "--parsable", str(file.absolute())]  # absolute, so that no name is taken for an option
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SUBMITTING)
    except FileNotFoundError:
        absent = f"there is no sbatch on this machine; {file} is written: submit it where Slurm is"
        raise UserError(absent, "launch.sbatch.missing") from None
    except subprocess.TimeoutExpired:
        silent = f"sbatch has not answered for {_SUBMITTING} s; whether {file} is queued: squeue --me"
        raise UserError(silent, "launch.sbatch.silent") from None
    if done.returncode:
        lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        reason = " ".join(lines) or f"exit code {done.returncode}"
        raise UserError(f"sbatch has refused {file}: {reason}", "launch.sbatch.refused")
    job_id, *_ = done.stdout.split(";")  # "123", or "123;cluster" where there are several clusters
    return job_id.strip()


def follow(number: str, it: Deployment) -> tuple[tuple[str, str], ...]:
    """Commands for a submitted Slurm job, and what they do."""
    return (
        (f"squeue --jobs={number}", "whether it waits or runs"),
        (f"tail -F {it.plain_name}-{number}.out", "starts and ends"),
        (f"tail -F {path(it.log_directory)}/slurm-{number}/rank-0.log", "steps and losses"),
        (f"scancel --signal=USR1 --batch {number}", "save, and queue it again"),
        (f"scancel {number}", "end it"),
    )
