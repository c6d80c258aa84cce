"""`fivefold draw mesh`: which rank of a layout stands where, and over which links each axis communicates.

mesh("dp=2,tp=4,pp=2", "2x8xH100").to_dict()["axes"]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires
from fivefold.plan.pictures.mesh import Panel, listed, mesh_scene
from fivefold.report import Block, Result, Table, Text
from fivefold.report.scene import Scene
from fivefold.support.errors import UserError
from fivefold.support.ranges import outside

MOST = 65_536  # ranks
SHOWN = ("tp", "cp", "pp", "dp", "ep", "replicate")  # the fastest first


@dataclass(frozen=True)
class MeshResult(Result):
    layout: Layout
    cluster: Cluster

    @cached_property
    def nodes(self) -> list[range]:
        """The ranks of each node."""
        sizes = [group.gpus for group in self.cluster.groups for _ in range(group.nodes)]
        ends = list(accumulate(sizes))
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @cached_property
    def panels(self) -> list[Panel]:
        """The axes of more than one rank."""
        found = []
        for axis in SHOWN:
            if (ranks := self.layout.size(axis)) > 1:
                group = self.layout.group(axis, 0)
                found.append(Panel(axis, ranks, group, self._where(axis, group)))
        return found

    def _where(self, axis: str, group: Sequence[int]) -> str:
        device = self.cluster.groups[0].accelerator
        nodes = sum(not set(node).isdisjoint(group) for node in self.nodes)
        count = self.layout.world // len(group)
        many = f"{count:,} group{'s' if count > 1 else ''} of {len(group):,}"
        if nodes == 1:
            return f"{many}, within a node: {device.inside.name}, {device.inside.bandwidth / 1e9:.3g} GB/s"
        return f"{many}, each over {nodes:,} nodes: {device.across.name}, {device.across.bandwidth / 1e9:.3g} GB/s"

    @cached_property
    def axes(self) -> list[dict[str, Any]]:
        """The axes of more than one rank, for JSON."""
        reaches = Wires(Device.of(self.cluster.groups[0].accelerator), self.cluster.groups[0].gpus, self.layout).reaches
        return [
            {
                "axis": one.axis,
                "ranks": one.ranks,
                "in_a_node": reaches[one.axis].together,
                "of_rank_0": list(one.group),
            }
            for one in self.panels
        ]

    def to_dict(self) -> dict[str, Any]:
        where = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return {
            "layout": str(self.layout),
            "cluster": str(self.cluster),
            "world": self.layout.world,
            "axes": self.axes,
            "ranks": [
                {"rank": rank, "node": where[rank]} | self.layout.coordinates(rank) for rank in range(self.layout.world)
            ],
        }

    def scene(self) -> Scene | None:
        return mesh_scene(self.layout, self.nodes, self.panels, str(self.cluster)) if self.panels else None

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.layout} on {self.cluster}: {self.layout.world:,} ranks", "bold")
        rows = [(one.axis, f"{one.ranks:,}", one.where, listed(one.group)) for one in self.panels]
        if rows:
            yield Table(["axis", ">ranks", "~where", "~of rank 0"], rows)
        else:
            yield Text("one rank: there is nothing to divide")


def mesh(layout: str | Layout, cluster: str | Path | Cluster | None = None) -> MeshResult:
    """Where each rank of a layout stands. Without a cluster: nodes of eight H100s, or one node if fewer are enough.

    ff.mesh("dp=2,tp=8,pp=4", "8x8xH100")
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if wrong := outside(layout, "layout"):
        raise UserError(list(wrong.values()))
    if layout.world > MOST:
        raise UserError(f"{layout} has {layout.world} ranks, and a mesh of more than {MOST:,} is not drawn")
    if layout.dp % layout.replicate:
        raise UserError(f"replicate={layout.replicate} does not divide dp={layout.dp}")
    gpus = next(size for size in range(min(8, layout.world), 0, -1) if layout.world % size == 0)
    machines = Cluster.read(cluster or f"{layout.world // gpus}x{gpus}xH100")
    if machines.world != layout.world:
        product = " x ".join(f"{axis}={many}" for axis, many in layout.degrees.items() if many > 1) or "1"
        raise UserError(
            f"{product} is {layout.world} ranks, and {machines} has {machines.world}; nearest: "
            f"dp={max(1, machines.world * layout.dp // layout.world)}, or a cluster of {layout.world}"
        )
    if layout.size("stage") % (layout.ep * layout.replicate):
        copies = f" x replicate={layout.replicate}" if layout.replicate > 1 else ""
        raise UserError(f"ep={layout.ep}{copies} does not divide the {layout.size('stage')} ranks of a stage")
    return MeshResult(layout, machines)
