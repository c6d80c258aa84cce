"""`Deployment`: a job, the command that starts it, and its machines; the options of a launch; variables of ranks."""

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from fivefold.clusters import quoting
from fivefold.clusters.quoting import comment
from fivefold.cost.model_state import checkpoint_bytes
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job, of_a_run
from fivefold.layout.layout import Layout
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import path_of
from fivefold.support.text import bytes_text, counted, divisors, either, si

# ---- machines -------------------------------------------------------------------------------------------------------
# The machines that a job is started on: nodes, ranks per node, and whether its layout fits them.


@dataclass(frozen=True)
class Machines:
    nodes: int
    per_node: int  # ranks, each with a GPU of its own
    gpus: bool = True  # false: ranks compute on CPUs
    notes: tuple[str, ...] = ()
    cluster: Cluster | None = None  # as the planner reads it, if it is known

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} x {self.per_node} {'GPUs' if self.gpus else 'ranks'}"


def machines(
    job: Job, cluster: str = "", nodes: int | None = None, per_node: int | None = None, hosts: int = 0
) -> Machines:
    """The machines that are asked for: by number, by a cluster such as 8x8xH100, or by the job's own run.cluster.

    `nodes`, or the number of `hosts` in a file, replaces the cluster's number of nodes; their size stays the cluster's
    unless --per-node gives another.
    """
    for option, value in {"--nodes": nodes, "--per-node": per_node}.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value} must be at least 1", "option.range")
    if hosts and nodes and hosts != nodes:
        apart = f"--nodes {nodes} and a file of {counted(hosts, 'host')} do not agree; leave --nodes out"
        raise UserError(apart, "launch.nodes.hosts")
    world, text, nodes = job.layout.world, cluster or job.run.cluster, hosts or nodes
    of_cluster = _of_cluster(text, "--cluster" if cluster else "run.cluster", per_node) if text else None
    gpus = job.train.device != "cpu" and (of_cluster is None or of_cluster.gpus)
    if of_cluster and not per_node:
        wanted = Machines(nodes or of_cluster.nodes, of_cluster.per_node, gpus)
    elif nodes or per_node:
        wanted = Machines(nodes or max(1, world // (per_node or 1)), per_node or _evenly(world, nodes or 1), gpus)
    else:
        raise UserError(
            "the job does not say for which machines it is (run.cluster is empty); give --cluster 8x8xH100, or "
            f"--nodes N for its {world} ranks",
            "launch.cluster.missing",
        )
    if wanted.world != world:
        raise UserError(_mismatch(job, wanted, hosts), "launch.ranks")
    notes = (of_cluster.notes if of_cluster else ()) + _crossings(job.layout, wanted)
    resized = _resized(of_cluster.cluster, wanted) if of_cluster and of_cluster.cluster else None
    return replace(wanted, notes=notes, cluster=resized)


def least_nodes(job: Job, wanted: Machines) -> int:
    """The fewest nodes with which an elastic job starts: those of elastic.least, but at least half of all, because a
    scheduler would begin with the few nodes that are free, and more nodes are worth a wait."""
    least, world = job.elastic.least, wanted.world
    if wanted.nodes == 1:
        raise UserError(
            f"--elastic is for nodes that are lost, and {wanted} have no other; `fivefold train --nproc "
            f"{wanted.per_node} --elastic` continues without lost ranks of one node",
            "elastic.nodes",
        )
    if not job.checkpoint.save:
        raise UserError("--elastic resumes from checkpoints, and checkpoint.save=false makes none", "elastic.save")
    if least > world:
        more = f"elastic.least={least} is more than the {world} ranks of {wanted}; nearest: {world}"
        raise UserError(more, "elastic.least.ranks")
    return max(-(-least // wanted.per_node), -(-wanted.nodes // 2))


def _resized(cluster: Cluster, wanted: Machines) -> Cluster | None:
    """The cluster with the nodes that are asked for; None if its groups differ, so that their kind is not clear."""
    if (cluster.nodes, cluster.world) == (wanted.nodes, wanted.world):
        return cluster
    first, *others = cluster.groups
    return None if others else Cluster((msgspec.structs.replace(first, nodes=wanted.nodes, gpus=wanted.per_node),))


def _of_cluster(text: str, where: str, per_node: int | None) -> Machines:
    try:
        cluster = Cluster.read(text)
    except UserError as error:
        raise UserError(error.framed(f"{where}: ")) from None
    sizes = {group.gpus for group in cluster.groups}
    if len(sizes) > 1 and not per_node:
        raise UserError(
            f"{where}={text} has nodes of {either(sorted(sizes))} GPUs, and launchers start equally many ranks on "
            "each; give --nodes and --per-node",
            "launch.cluster.unequal",
        )
    names = list(dict.fromkeys(group.accelerator.name for group in cluster.groups))
    unlike = f"nodes of several kinds ({', '.join(names)}): ranks must count through them in this order; pin the nodes"
    notes = (unlike,) if len(names) > 1 else ()
    return Machines(cluster.nodes, per_node or sizes.pop(), names != ["CPU"], notes, cluster)


def _evenly(world: int, nodes: int) -> int:
    """The ranks of a node if only the number of nodes is known."""
    if world % nodes:
        near = sorted(divisors(world), key=lambda count: abs(count - nodes))[:2]
        raise UserError(
            f"the layout's {world} ranks do not divide over {nodes} nodes; nearest: --nodes {either(sorted(near))}",
            "launch.nodes.ranks",
        )
    return world // nodes


def _mismatch(job: Job, wanted: Machines, hosts: int) -> str:
    """A sentence that the layout does not fit the machines, with the nearest machines and the nearest dp, if any."""
    layout, per_node = job.layout, wanted.per_node
    world, without_dp = layout.world, layout.world // layout.dp
    fixes = []
    if world % per_node == 0:
        nodes = world // per_node
        fixes.append(f"a file of {counted(nodes, 'host')}" if hosts else f"--nodes {nodes}")
    elif not hosts and world <= per_node:
        fixes.append(f"--nodes 1 --per-node {world}")
    if wanted.world % without_dp == 0:
        other = msgspec.structs.replace(layout, dp=wanted.world // without_dp)
        if not other.problems(job.model, world=wanted.world, seq=job.data.seq, batch=job.train.batch):
            fixes.append(f"layout.dp={other.dp}")
    nearest = f"; nearest: {either(fixes)}" if fixes else "; plan it again for that cluster"
    return f"the layout {layout} has {world} ranks, and {wanted} are {wanted.world}{nearest}"


def _crossings(layout: Layout, wanted: Machines) -> tuple[str, ...]:
    """A note if groups of tp cross nodes: every layer waits for their collectives, which are slow over a network."""
    if wanted.nodes == 1 or layout.tp == 1 or wanted.per_node % layout.tp == 0:
        return ()
    return (
        f"tp={layout.tp} does not divide the {wanted.per_node} ranks of a node: its groups cross nodes, and every "
        "layer waits for the network",
    )


# ---- deployment -----------------------------------------------------------------------------------------------------


_PER_NODE = 1e9  # bytes per second that a node writes to a shared file system: an assumption, on the low side
_LEAST = 300  # seconds: Slurm checks time limits once a minute, and a short step has to end first


@dataclass(frozen=True)
class Deployment:
    job: Job
    machines: Machines
    file: str = ""  # the job file, as the nodes read it
    changes: tuple[str, ...] = ()  # KEY=VALUE
    step: float = 0.0  # seconds of a step, as planned; 0: not known
    packaged: bool = False  # the file is part of Fivefold, so that the nodes have it
    least: int = 0  # nodes with which an elastic job goes on; 0: it is not elastic

    def words(self, command: str = "train") -> str:
        """The command line that each rank runs."""
        options = ["--elastic"] if self.least and command == "train" else []
        if self.file and of_a_run(path_of(self.file)):
            options += [f"--plugin={name}" for name in self.job.plugins]
        return quoting.command(["fivefold", command], self.file, self.changes, options)

    @property
    def own_file(self) -> str:
        """The job file if the nodes must be able to read it; empty if it is part of Fivefold."""
        return "" if self.packaged else self.file

    @property
    def title(self) -> str:
        model = self.job.model
        return f"{model.name}, {si(model.parameter_count)} parameters, {self.job.layout} on {self.machines}"

    @property
    def plain_name(self) -> str:
        """The run's name with characters that every scheduler takes; no program takes it for an option."""
        return re.sub(r"[^\w.-]+", "-", self.job.run.name).lstrip("-") or "run"

    @cached_property
    def seconds_to_save(self) -> float:
        return self._checkpoint / (_PER_NODE * self.machines.nodes)

    @property
    def _checkpoint(self) -> int:
        return checkpoint_bytes(self.job.model, self.job.train.dtype, self.job.optimizer)

    @property
    def notice(self) -> int:
        """How many seconds before a time limit ranks are told to save, in whole minutes."""
        return -(-int(_LEAST + self.step + 2 * self.seconds_to_save) // 60) * 60

    @property
    def saving(self) -> str:
        step = f"after a step of {self.step:.0f} s, as planned; " if self.step >= 1 else ""
        return f"{step}{bytes_text(self._checkpoint)}, {self.seconds_to_save:.0f} s at 1 GB/s a node"

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
        paths = {*self.paths.values(), os.path.dirname(self.own_file)}
        return sorted(path for path in paths if path.startswith(("/", "~")))


# ---- options --------------------------------------------------------------------------------------------------------
# The options of a launch beside the job and its machines, and the kinds of launch that take them.


KINDS = {
    "slurm": "an sbatch file",
    "torchrun": "the torchrun command of each node",
    "kubernetes": "a Kubernetes Job",
    "trainjob": "a TrainJob of Kubeflow Trainer",
    "ssh": "a script for the hosts of a file",
}
_KINDS_OF_OPTION = {
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
USUAL_TIME = "24:00:00"
_IMAGE = re.compile(r"[\w./:@+-]+", re.ASCII)
_ENROOT = re.compile(r"[\w./:@+#-]+", re.ASCII)  # REGISTRY#IMAGE


@dataclass(frozen=True)
class Options:
    """The options of a launch; None: not given. An empty account or partition leaves its line out."""

    account: str | None = None
    partition: str | None = None
    time: str | None = None  # limit of one start
    submit: bool = False
    host: str | None = None  # of torchrun's rendezvous
    container: str | None = None  # an image
    claim: str | None = None  # a PersistentVolumeClaim
    hosts: Path | None = None  # a file that lists them
    restarts: int = 3
    elastic: bool = False  # continues without lost nodes, and with them when they are back

    @property
    def limit(self) -> int:
        """The time limit of one start, in seconds."""
        match = _TIME.fullmatch(self.time or USUAL_TIME)
        assert match, "checked by `problems`"
        days, *rest = match.groups()
        numbers = [int(number) for number in rest if number is not None]
        units = [3600, 60, 1] if days or len(numbers) == 3 else [60, 1]
        return 86400 * int(days or 0) + sum(map(int.__mul__, numbers, units))

    def problems(self, kind: str) -> list[Problem]:
        """What is wrong with the options for a kind of launch."""
        problems: list[Problem] = []
        for name, kinds in _KINDS_OF_OPTION.items():
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
        elif self.limit < 60:
            short = f"--time {self.time!r} is less than a minute, which Slurm does not count; nearest: --time 1"
            problems.append(Problem("launch.time", short))
        if not 0 <= self.restarts <= 1000:
            problems.append(Problem("option.range", f"--restarts {self.restarts} must be between 0 and 1000"))
        open_names = [f"--{name}" for name in ("account", "partition") if getattr(self, name) is None]
        if self.submit and kind == "slurm" and open_names:
            needed = f"--submit needs {' and '.join(open_names)}; an empty name ('') leaves its line out"
            problems.append(Problem("launch.submit.names", needed))
        return problems


# ---- environment ----------------------------------------------------------------------------------------------------
# The environment variables that ranks are started with, each with its reason. Defaults of torch and NCCL are kept.
#
# TORCH_NCCL_ASYNC_ERROR_HANDLING is not among them: torch's default ends a rank whose collective failed. Neither is
# CUDA_DEVICE_MAX_CONNECTIONS: no kernel of ours relies on the order in which streams are served.


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str
    chosen: bool = True  # false: it is written as a comment, for the user to set, and `why` says when


def variables(machines: Machines, threads: str, scratch: str, traces: str) -> list[Variable]:
    """The variables of ranks. `threads` is the number per rank, `scratch` a directory on the node's own disk, `traces`
    a directory that outlives the node."""
    chosen = [Variable("OMP_NUM_THREADS", threads, "each rank would take all cores of the node for itself")]
    if machines.gpus:
        chosen += [
            Variable(
                "TRITON_CACHE_DIR", f"{scratch}/triton", "kernels are compiled onto the node's own disk, not home"
            ),
            Variable("NCCL_DEBUG", "WARN", "NCCL says why it failed, and nothing else"),
            Variable(
                "TORCH_NCCL_TRACE_BUFFER_SIZE",
                "2000",
                "if a collective hangs, each rank writes its last ones; torchfrtrace finds the one who is missing",
            ),
            Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", ""),
            Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{traces}/nccl-rank-", ""),
        ]
    if machines.nodes > 1:
        chosen += _network(gpus=machines.gpus)
    return chosen


def _network(*, gpus: bool) -> list[Variable]:
    why = "only if the nodes have several networks, and the wrong one is taken; `ip -brief address` lists them"
    if not gpus:
        return [Variable("GLOO_SOCKET_IFNAME", "eth0", why, chosen=False)]
    return [
        Variable("NCCL_SOCKET_IFNAME", "=eth0", f"{why}; = means this name and no other", chosen=False),
        Variable(
            "NCCL_IB_HCA",
            "=mlx5_0,mlx5_1",
            "only if some adapters are for storage; `ibstat` lists them; = means these, not all that begin so",
            chosen=False,
        ),
    ]


def exports(chosen: list[Variable]) -> list[str]:
    """The variables as lines of a shell script, which expands their values."""
    lines = []
    for variable in chosen:
        lines += comment(f"{variable.name}: {variable.why}.") if variable.why else []
        lines.append(f'{"" if variable.chosen else "# "}export {variable.name}="{variable.value}"')
    return lines
