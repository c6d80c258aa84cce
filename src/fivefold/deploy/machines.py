"""Which machines a job is started on: nodes, ranks per node, and whether its layout fits them."""

from dataclasses import dataclass, replace

import msgspec

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted, either
from fivefold.support.numbers import divisors


@dataclass(frozen=True)
class Machines:
    nodes: int
    per_node: int  # ranks, each with a GPU of its own
    gpus: bool = True  # false: ranks compute on CPUs
    notes: tuple[str, ...] = ()
    cluster: Cluster | None = None  # what is known of them

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} x {self.per_node} {'GPUs' if self.gpus else 'ranks'}"


def machines(
    job: Job, cluster: str = "", nodes: int | None = None, per_node: int | None = None, hosts: int = 0
) -> Machines:
    """Those that are asked for: by number, by a cluster such as 8x8xH100, or by the job's own run.cluster.

    Other nodes than a cluster's, or `hosts` that have names, are of its size unless --per-node gives another.
    """
    for option, value in {"--nodes": nodes, "--per-node": per_node}.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value} must be at least 1")
    if hosts and nodes and hosts != nodes:
        raise UserError(f"--nodes {nodes} and a file of {counted(hosts, 'host')} do not agree; leave --nodes out")
    world, text, nodes = job.layout.world, cluster or job.run.cluster, hosts or nodes
    known = _of_cluster(text, "--cluster" if cluster else "run.cluster", per_node) if text else None
    gpus = job.train.device != "cpu" and (known is None or known.gpus)
    if known and not per_node:
        found = Machines(nodes or known.nodes, known.per_node, gpus)
    elif nodes or per_node:
        found = Machines(nodes or max(1, world // (per_node or 1)), per_node or _evenly(world, nodes or 1), gpus)
    else:
        raise UserError(
            "the job does not say for which machines it is (run.cluster is empty); give --cluster 8x8xH100, or "
            f"--nodes N for its {world} ranks"
        )
    if found.world != world:
        raise UserError(_mismatch(job, found, hosts))
    notes = (known.notes if known else ()) + _crossings(job.layout, found)
    return replace(found, notes=notes, cluster=_resized(known.cluster, found) if known and known.cluster else None)


def least_nodes(job: Job, found: Machines) -> int:
    """With which an elastic job starts: those of elastic.least, but half of them, because a scheduler that has a few
    free ones would begin with these, and a plan for all is worth a wait."""
    least, world = job.elastic.least, found.world
    if found.nodes == 1:
        raise UserError(
            f"--elastic is for nodes that are lost, and {found} have no other; `fivefold train --nproc "
            f"{found.per_node} --elastic` goes on without lost ranks of one node"
        )
    if not job.checkpoint.save:
        raise UserError("--elastic goes on from checkpoints, and checkpoint.save=false makes none")
    if least > world:
        raise UserError(f"elastic.least={least} is more than the {world} ranks of {found}; nearest: {world}")
    return max(-(-least // found.per_node), -(-found.nodes // 2))


def _resized(cluster: Cluster, found: Machines) -> Cluster | None:
    """The cluster with the nodes that are asked for, where it is clear of which kind they are."""
    if (cluster.nodes, cluster.world) == (found.nodes, found.world):
        return cluster
    first, *others = cluster.groups
    return None if others else Cluster((msgspec.structs.replace(first, nodes=found.nodes, gpus=found.per_node),))


def _of_cluster(text: str, where: str, per_node: int | None) -> Machines:
    try:
        cluster = Cluster.read(text)
    except UserError as error:
        raise UserError([f"{where}: {problem}" for problem in error.problems]) from None
    sizes = {group.gpus for group in cluster.groups}
    if len(sizes) > 1 and not per_node:
        raise UserError(
            f"{where}={text} has nodes of {either(sorted(sizes))} GPUs, and launchers start equally many ranks on "
            "each; give --nodes and --per-node"
        )
    names = list(dict.fromkeys(group.accelerator.name for group in cluster.groups))
    unlike = f"nodes of several kinds ({', '.join(names)}): ranks must count through them in this order; pin the nodes"
    notes = (unlike,) if len(names) > 1 else ()
    return Machines(cluster.nodes, per_node or sizes.pop(), names != ["CPU"], notes, cluster)


def _evenly(world: int, nodes: int) -> int:
    """Ranks of a node, where nothing but the number of nodes is known."""
    if world % nodes:
        near = sorted(divisors(world), key=lambda count: abs(count - nodes))[:2]
        raise UserError(
            f"the layout's {world} ranks do not divide over {nodes} nodes; nearest: --nodes {either(sorted(near))}"
        )
    return world // nodes


def _mismatch(job: Job, found: Machines, hosts: int) -> str:
    """The sentence, with the nearest machines and, where the job can have it, the nearest layout."""
    layout, per_node = job.layout, found.per_node
    world, others = layout.world, layout.world // layout.dp
    fitting = world // per_node if world % per_node == 0 else 0
    ways = [f"a file of {counted(fitting, 'host')}" if hosts else f"--nodes {fitting}"] if fitting else []
    ways += [f"--nodes 1 --per-node {world}"] if not ways and not hosts and world <= per_node else []
    if found.world % others == 0:
        smaller = msgspec.structs.replace(layout, dp=found.world // others)
        legal = not smaller.problems(job.model, world=found.world, seq=job.data.seq, batch=job.train.batch)
        ways += [f"layout.dp={smaller.dp}"] if legal else []
    nearest = f"; nearest: {either(ways)}" if ways else "; plan it again for that cluster"
    return f"the layout {layout} has {world} ranks, and {found} are {found.world}{nearest}"


def _crossings(layout: Layout, found: Machines) -> tuple[str, ...]:
    """tp talks in every layer, and waits for it: over a network that costs more than all else."""
    if found.nodes == 1 or layout.tp == 1 or found.per_node % layout.tp == 0:
        return ()
    return (
        f"tp={layout.tp} does not divide the {found.per_node} ranks of a node: its groups cross nodes, and every layer "
        "waits for the network",
    )
