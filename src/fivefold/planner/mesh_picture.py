"""`fivefold draw mesh`: which rank of a layout stands where, and over which links each axis communicates.

    mesh("dp=2,tp=4,pp=2", "2x8xH100").to_dict()["axes"]

The picture has a panel for each axis, with every rank in its node, coloured by its place on the axis. Few nodes are
drawn with all of their ranks, many as a cell each, since one node is like another. The ranks that the first one
communicates with along the axis are outlined.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.chart import TOP, sheet
from fivefold.render.scene import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LABEL,
    MARGIN,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    RGB,
    SKY,
    SMALL,
    WIDTH,
    Frame,
    Rect,
    Scene,
    TextMark,
    cut,
    hexed,
    mix,
    rgb,
    text_on,
)
from fivefold.support.errors import UserError
from fivefold.support.ranges import outside

AXIS_COLOURS = {"tp": ORANGE, "cp": PURPLE, "pp": BLUE, "dp": GREEN, "ep": RED, "replicate": SKY, "shard": SKY}
MAX_LISTED_RANKS = 6  # ranks of a group that are listed
MAX_NODES_IN_DETAIL = 16  # nodes that are drawn with their ranks
PANEL_GAP, PANEL_TITLE_HEIGHT = 44.0, 58.0  # between panels, and of a panel's title
MAX_CELL, MIN_CELL = 54.0, 4.0  # of a cell
LIGHTEST_SHADE = 0.72  # how far the last coordinate's shade goes towards white


class Panel(NamedTuple):
    """An axis: how many ranks it has, the first rank's group, and where that is, in words."""

    axis: str
    ranks: int
    group: Sequence[int]
    where: str


def mesh_scene(layout: Layout, nodes: Sequence[range], panels: Sequence[Panel], cluster: str) -> Scene:
    """`nodes` has the ranks of each node."""
    description = f"{layout} on {cluster}: {layout.world:,} ranks on {len(nodes):,} nodes"
    scene = sheet("Where the ranks are", description, 0.0, f"mesh of {layout}")
    columns = 1 if len(panels) == 1 else 2
    wide = (WIDTH - 2 * MARGIN - PANEL_GAP * (columns - 1)) / columns
    y, last = TOP + 6, TOP + 6
    for at in range(0, len(panels), columns):
        row = panels[at : at + columns]
        heights = [
            _panel(scene, layout, nodes, panel, (MARGIN + place * (wide + PANEL_GAP), y, wide))
            for place, panel in enumerate(row)
        ]
        last, y = y, y + max(heights) + 30
    if len(panels) % 2 and columns == 2:
        _groups(scene, panels, MARGIN + wide + PANEL_GAP, last, wide)
    note = "shade: a rank's place on the axis, 0 darkest; outlined: the ranks that rank 0 communicates with on it"
    scene.shapes.append(TextMark(MARGIN, y + 2, note, LABEL, fill=GREY))
    scene.height = y + 30
    return scene


def group_text(group: Sequence[int]) -> str:
    """A group's first ranks and its last; all of them if only one would be left out."""
    if len(group) <= MAX_LISTED_RANKS + 2:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:MAX_LISTED_RANKS]))}, ... {group[-1]}"


def _groups(scene: Scene, panels: Sequence[Panel], x: float, y: float, wide: float) -> None:
    """Lists the groups of rank 0 in words, in the place of a missing panel."""
    scene.shapes.append(TextMark(x, y + 9, "rank 0 communicates with", 20, bold=True))
    for at, panel in enumerate(panels):
        row = y + 44 + 27 * at
        scene.shapes += [
            Rect(x, row - 7, 14, 14, AXIS_COLOURS[panel.axis]),
            TextMark(x + 24, row, panel.axis, LABEL, bold=True),
            TextMark(x + 110, row, cut(group_text(panel.group), LABEL, wide - 110), LABEL),
        ]


def _panel(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """Returns its height."""
    x, y, _ = place
    colour = AXIS_COLOURS[panel.axis]
    scene.shapes += [
        Rect(x, y + 1, 16, 16, colour),
        TextMark(x + 26, y + 9, f"{panel.axis} = {panel.ranks}", 20, bold=True),
        TextMark(x, y + 36, panel.where, LABEL, fill=GREY),
    ]
    if len(nodes) <= MAX_NODES_IN_DETAIL:
        return PANEL_TITLE_HEIGHT + _every_rank(scene, layout, nodes, panel, place)
    inside = all(rank in nodes[0] for rank in panel.group)
    if inside:  # every node looks alike
        return PANEL_TITLE_HEIGHT + _every_rank(scene, layout, nodes[:1], panel, place)
    return PANEL_TITLE_HEIGHT + _every_node(scene, layout, nodes, panel, place)


def _every_rank(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """Draws nodes as boxes in a grid, and each rank as a cell with its number and its place on the axis."""
    x0, y0, wide = place
    across = len(nodes) if len(nodes) < 3 else 2 if len(nodes) <= 4 else 4
    gpus = max(len(node) for node in nodes)
    per_row = gpus if gpus * across * 30 <= wide else -(-gpus // 2) if gpus <= 16 else 16
    cell = min(MAX_CELL, (wide / across - 14) / per_row)
    lines = -(-gpus // per_row)
    box = (wide / across if len(nodes) > 1 else per_row * cell + 14, lines * cell + 34)
    members = set(panel.group)
    for number, node in enumerate(nodes):
        left, top = x0 + number % across * box[0], y0 + PANEL_TITLE_HEIGHT + number // across * (box[1] + 6)
        scene.shapes.append(
            TextMark(left, top + 8, f"node {number}" if len(nodes) > 1 else "any node", SMALL, fill=GREY)
        )
        scene.shapes.append(Frame(left, top + 18, per_row * cell + 6, lines * cell + 6, PALE, 1.5))
        for at, rank in enumerate(node):
            spot = (left + 3 + at % per_row * cell, top + 21 + at // per_row * cell)
            _rank(scene, layout, rank, panel, spot, cell, outlined=rank in members)
    return -(-len(nodes) // across) * (box[1] + 6)


def _rank(
    scene: Scene, layout: Layout, rank: int, panel: Panel, spot: tuple[float, float], cell: float, *, outlined: bool
) -> None:
    x, y = spot
    position = layout.position(panel.axis, rank)
    colour = _shade(panel, position)
    inner, ink = cell - 5, text_on(colour)
    scene.shapes.append(Rect(x + 2.5, y + 2.5, inner, inner, hexed(colour), f"rank {rank}: {layout.place(rank)}"))
    numbered = cell >= 28  # with the rank's own number above
    if cell >= 18:
        size, middle = min(18.0, 0.42 * cell), y + (0.6 if numbered else 0.5) * cell
        scene.shapes.append(TextMark(x + cell / 2, middle, str(position), size, "middle", ink, bold=True))
    if numbered:
        scene.shapes.append(TextMark(x + 5, y + 9, str(rank), min(9.5, 0.25 * cell), fill=ink))
    if outlined:
        scene.shapes.append(Frame(x + 1, y + 1, cell - 2, cell - 2, INK, 3.0))


def _every_node(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """Draws each node as a cell, coloured by its first rank; lines have equally many cells if that fits."""
    x0, y0, wide = place
    high = 250.0
    columns = max(16, next(n for n in range(1, len(nodes) + 1) if (wide / n) * -(-len(nodes) // n) <= high))
    columns = next((n for n in range(columns, 2 * columns) if len(nodes) % n == 0), columns)
    cell = max(MIN_CELL, min(26.0, wide / columns))
    members = set(panel.group)
    seam = 1.0 if cell > 6 else 0.4
    for number, node in enumerate(nodes):
        x, y = x0 + number % columns * cell, y0 + PANEL_TITLE_HEIGHT + number // columns * cell
        position = layout.position(panel.axis, node[0])
        hint = f"node {number}: ranks {node[0]}-{node[-1]}, {panel.axis} {position}"
        scene.shapes.append(Rect(x, y, cell - seam, cell - seam, hexed(_shade(panel, position)), hint))
        if not members.isdisjoint(node):
            scene.shapes.append(Frame(x, y, cell - seam, cell - seam, INK, 2.0 if cell > 8 else 1.4))
    rows = -(-len(nodes) // columns)
    note = f"a cell is a node of {len(nodes[0])}; {columns} nodes a line"
    scene.shapes.append(TextMark(x0, y0 + PANEL_TITLE_HEIGHT + rows * cell + 14, note, SMALL, fill=GREY))
    return rows * cell + 26


def _shade(panel: Panel, position: int) -> RGB:
    return mix(rgb(AXIS_COLOURS[panel.axis]), (255, 255, 255), LIGHTEST_SHADE * position / max(1, panel.ranks - 1))


MAX_RANKS = 65_536
SHOWN_AXES = ("tp", "cp", "pp", "dp", "ep", "replicate")  # the fastest first


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
        panels = []
        for axis in SHOWN_AXES:
            if (ranks := self.layout.size(axis)) > 1:
                group = self.layout.group(axis, 0)
                panels.append(Panel(axis, ranks, group, self._where(axis, group)))
        return panels

    def _where(self, axis: str, group: Sequence[int]) -> str:
        device = self.cluster.groups[0].accelerator
        nodes = sum(not set(node).isdisjoint(group) for node in self.nodes)
        count = self.layout.world // len(group)
        groups = f"{count:,} group{'s' if count > 1 else ''} of {len(group):,}"
        if nodes == 1:
            return f"{groups}, within a node: {device.inside.name}, {device.inside.bandwidth / 1e9:.3g} GB/s"
        return f"{groups}, each over {nodes:,} nodes: {device.across.name}, {device.across.bandwidth / 1e9:.3g} GB/s"

    @cached_property
    def axes(self) -> list[dict[str, Any]]:
        """The axes of more than one rank, for JSON."""
        reaches = Topology(
            Device.of(self.cluster.groups[0].accelerator), self.cluster.groups[0].gpus, self.layout
        ).reaches
        return [
            {
                "axis": panel.axis,
                "ranks": panel.ranks,
                "in_a_node": reaches[panel.axis].together,
                "of_rank_0": list(panel.group),
            }
            for panel in self.panels
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
        rows = [(panel.axis, f"{panel.ranks:,}", panel.where, group_text(panel.group)) for panel in self.panels]
        if rows:
            yield Table(["axis", ">ranks", "~where", "~of rank 0"], rows)
        else:
            yield Text("one rank: there is nothing to divide")


def mesh(layout: str | Layout, cluster: str | Path | Cluster | None = None) -> MeshResult:
    """Where each rank of a `layout` stands. Without a `cluster`: nodes of eight H100s, or one node if fewer are enough.

    >>> ff.mesh("dp=2,tp=8,pp=4", "8x8xH100").layout.place(9)
    'dp 0, pp 1, tp 1'
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if wrong := outside(layout, "layout"):
        raise UserError(list(wrong.values()))
    if layout.world > MAX_RANKS:
        raise UserError(
            f"{layout} has {layout.world} ranks, and a mesh of more than {MAX_RANKS:,} is not drawn", "picture.size"
        )
    if layout.dp % layout.replicate:
        raise UserError(f"replicate={layout.replicate} does not divide dp={layout.dp}", "layout.replicate.dp")
    gpus = next(size for size in range(min(8, layout.world), 0, -1) if layout.world % size == 0)
    machines = Cluster.read(cluster or f"{layout.world // gpus}x{gpus}xH100")
    if machines.world != layout.world:
        product = " x ".join(f"{axis}={size}" for axis, size in layout.degrees.items() if size > 1) or "1"
        raise UserError(
            f"{product} is {layout.world} ranks, and {machines} has {machines.world}; nearest: "
            f"dp={max(1, machines.world * layout.dp // layout.world)}, or a cluster of {layout.world}",
            "layout.ranks.given",
        )
    if layout.size("stage") % (layout.ep * layout.replicate):
        copies = f" x replicate={layout.replicate}" if layout.replicate > 1 else ""
        raise UserError(
            f"ep={layout.ep}{copies} does not divide the {layout.size('stage')} ranks of a stage", "layout.ep.ranks"
        )
    return MeshResult(layout, machines)
