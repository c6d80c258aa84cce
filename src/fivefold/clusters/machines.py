"""The machines that a job is started on: nodes, ranks per node, and whether its layout fits them."""

from dataclasses import dataclass, replace

import msgspec

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.launch.local import sharing_problem
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_RANKS, check_range, within
from fivefold.support.text import divisors, either, plural


@dataclass(frozen=True)
class Machines:
    """Equal nodes, and what is to be said about starting the job on them."""

    nodes: int
    per_node: int  # ranks, each with a GPU of its own
    gpus: bool = True  # false: ranks compute on CPUs
    notes: tuple[str, ...] = ()
    cluster: Cluster | None = None  # as the planner reads it, if it is known

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{plural(self.nodes, 'node')} x {self.per_node} {'GPUs' if self.gpus else 'ranks'}"


def choose_machines(
    job: Job, cluster: str = "", nodes: int | None = None, per_node: int | None = None, hosts: int = 0
) -> Machines:
    """The machines that are asked for: by number, by a cluster such as 8x8xH100, or by the job's own run.cluster.

    `nodes`, or the number of `hosts` in a file, replaces the cluster's number of nodes; their size stays the cluster's
    unless --per-node gives another.
    """
    for option, value in {"--nodes": nodes, "--per-node": per_node}.items():
        check_range(option, value, within(1, MAX_RANKS))
    if hosts and nodes and hosts != nodes:
        apart = f"--nodes {nodes} and a file of {plural(hosts, 'host')} do not agree; leave --nodes out"
        raise UserError(apart, "launch.nodes.hosts")
    world, text, nodes = job.layout.world, cluster or job.run.cluster, hosts or nodes
    of_cluster = _read_cluster(text, "--cluster" if cluster else "run.cluster", per_node) if text else None
    gpus = job.train.device != "cpu" and (of_cluster is None or of_cluster.gpus)
    if of_cluster and not per_node:
        wanted = Machines(nodes or of_cluster.nodes, of_cluster.per_node, gpus)
    elif nodes or per_node:
        wanted = Machines(
            nodes or max(1, world // (per_node or 1)), per_node or _ranks_per_node(world, nodes or 1), gpus
        )
    else:
        raise UserError(
            "the job does not say for which machines it is (run.cluster is empty); give --cluster 8x8xH100, or "
            f"--nodes N for its {world} ranks",
            "launch.cluster.missing",
        )
    if wanted.world != world:
        raise UserError(_mismatch_sentence(job, wanted, hosts), "launch.ranks")
    notes = (of_cluster.notes if of_cluster else ()) + _note_tp_crosses_nodes(job.layout, wanted)
    resized = _resized_cluster(of_cluster.cluster, wanted) if of_cluster and of_cluster.cluster else None
    return replace(wanted, notes=notes, cluster=resized)


def gpu_sharing_problem(job: Job, machines: Machines) -> str | None:
    """Why `train.share_gpu=nccl` cannot be on these machines: what their ranks would say."""
    gpus = machines.per_node if machines.gpus else 0
    return sharing_problem(job.train, gpus, machines.per_node, apart=machines.nodes > 1)


def check_sharing_there(job: Job) -> None:
    """Raises UserError for that problem on the job's own run.cluster, of which it may use a part."""
    if job.train.share_gpu != "nccl":
        return
    whole, world = _read_cluster(job.run.cluster, "run.cluster", None), job.layout.world
    used = Machines(-(-world // whole.per_node), min(world, whole.per_node), whole.gpus and job.train.device != "cpu")
    if problem := gpu_sharing_problem(job, used):
        raise UserError(problem)


def min_elastic_nodes(job: Job, wanted: Machines) -> int:
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
        raise UserError("--elastic resumes from checkpoints, but checkpoint.save=false writes none", "elastic.save")
    if least > world:
        more = f"elastic.least={least} is more than the {world} ranks of {wanted}; nearest: {world}"
        raise UserError(more, "elastic.least.ranks")
    return max(-(-least // wanted.per_node), -(-wanted.nodes // 2))


def _resized_cluster(cluster: Cluster, wanted: Machines) -> Cluster | None:
    """The cluster with the nodes that are asked for; None if its groups differ, so that their kind is not clear."""
    if (cluster.nodes, cluster.world) == (wanted.nodes, wanted.world):
        return cluster
    first, *others = cluster.groups
    return None if others else Cluster((msgspec.structs.replace(first, nodes=wanted.nodes, gpus=wanted.per_node),))


def _read_cluster(text: str, where: str, per_node: int | None) -> Machines:
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


def _ranks_per_node(world: int, nodes: int) -> int:
    """The ranks of a node if only the number of nodes is known."""
    if world % nodes:
        near = sorted(divisors(world), key=lambda count: abs(count - nodes))[:2]
        raise UserError(
            f"the layout's {world} ranks do not divide over {nodes} nodes; nearest: --nodes {either(sorted(near))}",
            "launch.nodes.ranks",
        )
    return world // nodes


def _mismatch_sentence(job: Job, wanted: Machines, hosts: int) -> str:
    """A sentence that the layout does not fit the machines, with the nearest machines and the nearest dp, if any."""
    layout, per_node = job.layout, wanted.per_node
    world, without_dp = layout.world, layout.world // layout.dp
    fixes = []
    if world % per_node == 0:
        nodes = world // per_node
        fixes.append(f"a file of {plural(nodes, 'host')}" if hosts else f"--nodes {nodes}")
    elif not hosts and world <= per_node:
        fixes.append(f"--nodes 1 --per-node {world}")
    if wanted.world % without_dp == 0:
        other = msgspec.structs.replace(layout, dp=wanted.world // without_dp)
        if not other.problems(job.model, world=wanted.world, seq=job.data.seq, batch=job.train.batch):
            fixes.append(f"layout.dp={other.dp}")
    nearest = f"; nearest: {either(fixes)}" if fixes else "; plan it again for that cluster"
    return f"the layout {layout} has {world} ranks, and {wanted} are {wanted.world}{nearest}"


def _note_tp_crosses_nodes(layout: Layout, wanted: Machines) -> tuple[str, ...]:
    """A note if groups of tp cross nodes: every layer waits for their collectives, which are slow over a network."""
    if wanted.nodes == 1 or layout.tp == 1 or wanted.per_node % layout.tp == 0:
        return ()
    return (
        f"tp={layout.tp} does not divide the {wanted.per_node} ranks of a node: its groups cross nodes, and every "
        "layer waits for the network",
    )
