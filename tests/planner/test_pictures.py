"""Pictures of plans: every component, axis and rank is there, and as long as its number."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.planner.explain import traffic
from fivefold.planner.mesh_picture import group_text, mesh
from fivefold.planner.pictures import components, memory, overview, sent
from fivefold.planner.plan import plan
from fivefold.planner.result import PlanResult
from fivefold.render.scene import Frame, Rect, Scene, TextMark
from fivefold.support.errors import UserError

LAYOUT = "dp=2,tp=2,pp=2,zero=1,sp,microbatches=8,recompute=selective"


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return plan("llama3.2-1b", "8xH100", batch=32, seq=4096, layout=LAYOUT)


def words(scene: Scene) -> list[str]:
    return [shape.text for shape in scene.shapes if isinstance(shape, TextMark)]


def test_bars_are_as_long_as_their_components(found: PlanResult) -> None:
    scene = memory(found.explained, found.neighbours)
    parts = [one for one in components(found.explained.footprint) if one[2] > 0]
    bars = [shape for shape in scene.shapes if isinstance(shape, Rect) and shape.hint][: len(parts)]
    scale = (bars[0].width + 1) / parts[0][2]
    for bar, (name, colour, size) in zip(bars, parts, strict=True):
        assert bar.hint.startswith(name)
        assert bar.fill == colour
        assert bar.width == pytest.approx(max(2.0, size * scale - 1))  # a seam, and what can be seen
    assert sum(size for *_, size in parts) * 1e9 == pytest.approx(found.explained.footprint.total)


def test_the_memory_picture_has_limits_ranks_and_neighbours(found: PlanResult) -> None:
    said = words(memory(found.explained, found.neighbours))
    assert f"device {found.explained.device_memory / 1e9:.0f} GB" in said
    assert f"a plan's limit {found.explained.limit / 1e9:.0f} GB" in said
    assert {"this layout", "pipeline rank 0", "pipeline rank 1"} <= set(said)
    assert len({one.change for one in found.neighbours if "cannot run" not in one.sentence} & set(said)) == 14
    times = {f"{one.slower:+.1%} time" for one in found.neighbours if one.slower is not None}
    assert any(text.endswith(tuple(times)) for text in said)


def test_the_traffic_picture_has_every_axis_and_its_bytes(found: PlanResult) -> None:
    said = words(sent(found.explained))
    rows = [row for row in traffic(found.explained) if row.payload > 4096]
    assert [text for text in said if "  " in text] == [f"{row.axis}  {row.kind}" for row in rows]
    assert all(row.seconds and row.seconds > 0 for row in rows if row.axis in ("tp", "pp", "dp"))
    assert any("NVLink" in text for text in said)
    assert not any("InfiniBand" in text for text in said)  # one node


def test_time_and_memory_are_in_the_overview(found: PlanResult) -> None:
    said = " ".join(words(overview(found.explained)))
    assert "seconds of a step" in said
    assert "matmuls" in said
    assert f"GB of the fullest rank: {found.explained.footprint.total / 1e9:.1f}" in said


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("memory.svg", "Memory of a GPU, by component"),
        ("a-traffic.dark.svg", "What a rank sends in a step"),
        ("mesh.svg", "Where the ranks are"),
        ("plan.svg", "llama3.2-1b on 8xH100"),
    ],
)
def test_the_name_of_the_file_says_what_is_drawn(name: str, title: str, tmp_path: Path) -> None:
    asked = f"plan llama3.2-1b --batch 32 --seq 4096 --layout {LAYOUT} -o {tmp_path / name}"
    result = CliRunner().invoke(app, asked.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert f"written to {tmp_path / name}" in result.output
    text = (tmp_path / name).read_text()
    assert f">{title}<" in text
    assert ("#14181f" in text) == (".dark." in name)
    ElementTree.fromstring(text)


# ---- the mesh --------------------------------------------------------------------------------------------------------


def test_every_rank_is_in_the_mesh_with_its_place() -> None:
    found = mesh("dp=2,tp=4,pp=2", "2x8xH100")
    scene = found.scene()
    assert scene is not None
    hints = [shape.hint for shape in scene.shapes if isinstance(shape, Rect) and shape.hint]
    assert hints == 3 * [f"rank {rank}: {found.layout.place(rank)}" for rank in range(16)]  # a panel for tp, pp, dp
    outlined = [shape for shape in scene.shapes if isinstance(shape, Frame) and shape.thick > 2]
    assert len(outlined) == 4 + 2 + 2
    where = {one.axis: one.where for one in found.panels}
    assert "within a node" in where["tp"]
    assert "each over 2 nodes" in where["dp"]
    assert found.to_dict()["ranks"][13] == {"rank": 13, "node": 1, "dp": 1, "pp": 1, "cp": 0, "tp": 1}


def test_many_nodes_are_a_cell_each() -> None:
    scene = mesh("dp=128,tp=8,pp=16", "2048x8xH100").scene()
    assert scene is not None
    cells = [shape for shape in scene.shapes if isinstance(shape, Rect) and shape.hint]
    assert len(cells) == 8 + 2048 + 2048  # tp: the ranks of any node
    assert scene.width > scene.height
    assert max(cell.x + cell.width for cell in cells) <= scene.width
    frames = [shape for shape in scene.shapes if isinstance(shape, Frame) and shape.width < 20]
    assert len(frames) == 16 + 128  # the nodes of rank 0's groups of pp and dp


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("draw mesh", "needs a layout, as in"),
        ("draw mesh --layout dp=3 --cluster 2x8xH100", "dp=3 is 3 ranks, and 2x8xH100 has 16; nearest: dp=16"),
        ("draw mesh --layout dp=8 --pp 4", "without options that time a schedule"),
        ("draw 1f1b --pp 2 -m 2 --layout dp=8", "--layout and --cluster are for `draw mesh`"),
        ("draw mesh --layout dp=8 -o mesh.pdf", "mesh.pdf should end in .svg or .png"),
        ("plan tiny --cluster 2xCPU -o plan.pdf", "plan.pdf should end in .toml or"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(asked: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, asked.split(), catch_exceptions=False)
    assert sentence in str(caught.value)


def test_no_single_rank_is_left_out_of_a_list() -> None:
    assert group_text(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert group_text(range(9)) == "0, 1, 2, 3, 4, 5, ... 8"
