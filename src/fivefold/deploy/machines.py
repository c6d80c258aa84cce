"""Which machines a job is started on: nodes, ranks per node, and whether its layout fits them."""

from dataclasses import dataclass

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.support.formatting import either


@dataclass(frozen=True)
class Machines:
    nodes: int
    per_node: int  # ranks, each with a GPU of its own
    gpus: bool = True  # false: ranks compute on CPUs
    notes: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.per_node} {'GPUs' if self.gpus else 'ranks'}"


def machines(job: Job, cluster: str = "", nodes: int | None = None, per_node: int | None = None) -> Machines:
    """Those that are asked for: by number, by a cluster such as 8x8xH100, or by the job's own run.cluster."""
    for option, value in {"--nodes": nodes, "--per-node": per_node}.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value} must be at least 1")
    world, text = job.layout.world, cluster or job.run.cluster
    known = _of_cluster(text, "--cluster" if cluster else "run.cluster") if text else None
    gpus = job.train.device != "cpu" and (known is None or known.gpus)
    if known and not nodes and not per_node:
        found = Machines(known.nodes, known.per_node, gpus, known.notes)
    elif nodes or per_node:
        nodes = nodes or max(1, world // (per_node or 1))
        found = Machines(nodes, per_node or max(1, world // nodes), gpus)
    else:
        raise UserError(
            "the job does not say for which machines it is (run.cluster is empty); give --cluster 8x8xH100, or "
            f"--nodes N for its {world} ranks"
        )
    if found.world != world:
        raise UserError(_mismatch(job.layout, found))
    return Machines(found.nodes, found.per_node, gpus, (*found.notes, *_crossings(job.layout, found)))


def _of_cluster(text: str, where: str) -> Machines:
    try:
        cluster = Cluster.read(text)
    except UserError as error:
        raise UserError([f"{where}: {problem}" for problem in error.problems]) from None
    sizes = {group.gpus for group in cluster.groups}
    if len(sizes) > 1:
        raise UserError(
            f"{where}={text} has nodes of {either(sorted(sizes))} GPUs, and launchers start equally many ranks on "
            "each; give --nodes and --per-node"
        )
    names = list(dict.fromkeys(group.accelerator.name for group in cluster.groups))
    unlike = f"nodes of several kinds ({', '.join(names)}): ranks must count through them in this order; pin the nodes"
    notes = (unlike,) if len(names) > 1 else ()
    return Machines(cluster.nodes, sizes.pop(), names != ["CPU"], notes)


def _mismatch(layout: Layout, found: Machines) -> str:
    """The sentence, with the nearest machines and, where there is one, the nearest layout."""
    world, others = layout.world, layout.world // layout.dp
    ways = [f"--nodes {world // found.per_node}"] if world % found.per_node == 0 else []
    ways += [f"--nodes 1 --per-node {world}"] if not ways and world <= found.per_node else []
    ways += [f"layout.dp={found.world // others}"] if found.world % others == 0 else []
    nearest = f"; nearest: {either(ways)}" if ways else "; plan it again for that cluster"
    return f"the layout {layout} has {world} ranks, and {found} are {found.world}{nearest}"


def _crossings(layout: Layout, found: Machines) -> list[str]:
    """tp talks in every layer, and waits for it: over a network that costs more than all else."""
    if found.nodes == 1 or layout.tp == 1 or found.per_node % layout.tp == 0:
        return []
    return [
        f"tp={layout.tp} does not divide the {found.per_node} ranks of a node: its groups cross nodes, and every layer "
        "waits for the network"
    ]
