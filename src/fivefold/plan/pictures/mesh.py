"""Where the ranks of a layout are: a panel for each axis, every rank in its node, coloured by its place on the axis.

Few nodes are drawn with all of their ranks, many as a cell each, since one node is like another. The ranks that the
first one communicates with along the axis are outlined.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.layout.layout import Layout
from fivefold.report.chart import TOP, sheet
from fivefold.report.look import (
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
    hexed,
    mix,
    rgb,
    text_on,
)
from fivefold.report.scene import Frame, Rect, Scene, Text, cut

AXES = {"tp": ORANGE, "cp": PURPLE, "pp": BLUE, "dp": GREEN, "ep": RED, "replicate": SKY, "shard": SKY}
FIRST = 6  # ranks of a group that are listed
FEW = 16  # nodes that are drawn with their ranks
GAP, HEAD = 44.0, 58.0  # between panels, and of a panel's title
LARGEST, SMALLEST = 54.0, 4.0  # of a cell
LIGHTEST = 0.72  # how far the last coordinate's shade goes towards white


class Panel(NamedTuple):
    """An axis: how many ranks it has, the first rank's group, and in words where that is."""

    axis: str
    ranks: int
    group: Sequence[int]
    where: str


def mesh_scene(layout: Layout, nodes: Sequence[range], panels: Sequence[Panel], cluster: str) -> Scene:
    """`nodes` has the ranks of each node."""
    said = f"{layout} on {cluster}: {layout.world:,} ranks on {len(nodes):,} nodes"
    scene = sheet("Where the ranks are", said, 0.0, f"mesh of {layout}")
    columns = 1 if len(panels) == 1 else 2
    wide = (WIDTH - 2 * MARGIN - GAP * (columns - 1)) / columns
    y, last = TOP + 6, TOP + 6
    for at in range(0, len(panels), columns):
        row = panels[at : at + columns]
        heights = [
            _panel(scene, layout, nodes, panel, (MARGIN + place * (wide + GAP), y, wide))
            for place, panel in enumerate(row)
        ]
        last, y = y, y + max(heights) + 30
    if len(panels) % 2 and columns == 2:
        _groups(scene, panels, MARGIN + wide + GAP, last, wide)
    note = "shade: a rank's place on the axis, 0 darkest; outlined: the ranks that rank 0 communicates with on it"
    scene.shapes.append(Text(MARGIN, y + 2, note, LABEL, fill=GREY))
    scene.height = y + 30
    return scene


def listed(group: Sequence[int]) -> str:
    """Its first ranks, and the last; where that would leave out a single one, all."""
    if len(group) <= FIRST + 2:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:FIRST]))}, ... {group[-1]}"


def _groups(scene: Scene, panels: Sequence[Panel], x: float, y: float, wide: float) -> None:
    """Where a panel is free: the groups of rank 0 in words."""
    scene.shapes.append(Text(x, y + 9, "rank 0 communicates with", 20, bold=True))
    for at, panel in enumerate(panels):
        row = y + 44 + 27 * at
        scene.shapes += [
            Rect(x, row - 7, 14, 14, AXES[panel.axis]),
            Text(x + 24, row, panel.axis, LABEL, bold=True),
            Text(x + 110, row, cut(listed(panel.group), LABEL, wide - 110), LABEL),
        ]


def _panel(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """Returns its height."""
    x, y, _ = place
    colour = AXES[panel.axis]
    scene.shapes += [
        Rect(x, y + 1, 16, 16, colour),
        Text(x + 26, y + 9, f"{panel.axis} = {panel.ranks}", 20, bold=True),
        Text(x, y + 36, panel.where, LABEL, fill=GREY),
    ]
    if len(nodes) <= FEW:
        return HEAD + _every_rank(scene, layout, nodes, panel, place)
    inside = all(rank in nodes[0] for rank in panel.group)
    if inside:  # every node looks alike
        return HEAD + _every_rank(scene, layout, nodes[:1], panel, place)
    return HEAD + _every_node(scene, layout, nodes, panel, place)


def _every_rank(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """Nodes as boxes in a grid; a rank is a cell with its number and its place on the axis."""
    x0, y0, wide = place
    across = len(nodes) if len(nodes) < 3 else 2 if len(nodes) <= 4 else 4
    gpus = max(len(node) for node in nodes)
    per_row = gpus if gpus * across * 30 <= wide else -(-gpus // 2) if gpus <= 16 else 16
    cell = min(LARGEST, (wide / across - 14) / per_row)
    lines = -(-gpus // per_row)
    box = (wide / across if len(nodes) > 1 else per_row * cell + 14, lines * cell + 34)
    members = set(panel.group)
    for number, node in enumerate(nodes):
        left, top = x0 + number % across * box[0], y0 + HEAD + number // across * (box[1] + 6)
        scene.shapes.append(Text(left, top + 8, f"node {number}" if len(nodes) > 1 else "any node", SMALL, fill=GREY))
        scene.shapes.append(Frame(left, top + 18, per_row * cell + 6, lines * cell + 6, PALE, 1.5))
        for at, rank in enumerate(node):
            spot = (left + 3 + at % per_row * cell, top + 21 + at // per_row * cell)
            _rank(scene, layout, rank, panel, spot, cell, rank in members)
    return -(-len(nodes) // across) * (box[1] + 6)


def _rank(
    scene: Scene, layout: Layout, rank: int, panel: Panel, spot: tuple[float, float], cell: float, outlined: bool
) -> None:
    x, y = spot
    position = layout.position(panel.axis, rank)
    colour = _shade(panel, position)
    inner, ink = cell - 5, text_on(colour)
    scene.shapes.append(Rect(x + 2.5, y + 2.5, inner, inner, hexed(colour), f"rank {rank}: {layout.place(rank)}"))
    numbered = cell >= 28  # with the rank's own number above
    if cell >= 18:
        size, middle = min(18.0, 0.42 * cell), y + (0.6 if numbered else 0.5) * cell
        scene.shapes.append(Text(x + cell / 2, middle, str(position), size, "middle", ink, bold=True))
    if numbered:
        scene.shapes.append(Text(x + 5, y + 9, str(rank), min(9.5, 0.25 * cell), fill=ink))
    if outlined:
        scene.shapes.append(Frame(x + 1, y + 1, cell - 2, cell - 2, INK, 3.0))


def _every_node(
    scene: Scene, layout: Layout, nodes: Sequence[range], panel: Panel, place: tuple[float, float, float]
) -> float:
    """A node is a cell, coloured by its first rank; lines have as many as divide all nodes, if that fits."""
    x0, y0, wide = place
    high = 250.0
    columns = max(16, next(n for n in range(1, len(nodes) + 1) if (wide / n) * -(-len(nodes) // n) <= high))
    columns = next((n for n in range(columns, 2 * columns) if len(nodes) % n == 0), columns)
    cell = max(SMALLEST, min(26.0, wide / columns))
    members = set(panel.group)
    seam = 1.0 if cell > 6 else 0.4
    for number, node in enumerate(nodes):
        x, y = x0 + number % columns * cell, y0 + HEAD + number // columns * cell
        position = layout.position(panel.axis, node[0])
        hint = f"node {number}: ranks {node[0]}-{node[-1]}, {panel.axis} {position}"
        scene.shapes.append(Rect(x, y, cell - seam, cell - seam, hexed(_shade(panel, position)), hint))
        if not members.isdisjoint(node):
            scene.shapes.append(Frame(x, y, cell - seam, cell - seam, INK, 2.0 if cell > 8 else 1.4))
    rows = -(-len(nodes) // columns)
    note = f"a cell is a node of {len(nodes[0])}; {columns} nodes a line"
    scene.shapes.append(Text(x0, y0 + HEAD + rows * cell + 14, note, SMALL, fill=GREY))
    return rows * cell + 26


def _shade(panel: Panel, position: int) -> RGB:
    return mix(rgb(AXES[panel.axis]), (255, 255, 255), LIGHTEST * position / max(1, panel.ranks - 1))
