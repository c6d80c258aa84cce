"""Pictures: well-formed, complete, the same every time; for files and for the terminal."""

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.schedule import CATALOGUE, Costs, Placement, build, simulate, with_zero
from fivefold.schedule.draw import legend, picture, save_picture, to_png, to_svg, to_terminal
from fivefold.schedule.draw.scene import Area, Rect, Text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_action_is_in_the_svg_with_its_microbatch(name: str) -> None:
    simulation = simulate(build(name, 4, 8))
    svg = ElementTree.fromstring(to_svg(picture([simulation])))
    hints = [title.text or "" for rect in svg.iter(f"{SVG}rect") for title in rect.iter(f"{SVG}title")]
    actions = {str(span.action) for spans in simulation.timeline for span in spans}
    assert {hint.split()[0] for hint in hints} == actions
    numbers = [text.text for text in svg.iter(f"{SVG}text") if (text.text or "").isdigit()]
    assert len(numbers) >= len(actions)


def test_the_title_has_both_bubbles_and_the_peak() -> None:
    text = to_svg(picture([simulate(build("zb-v", 4, 8))]))
    assert "makespan 25.5" in text
    assert "bubble 5.9% of the makespan, 0.0% of the span" in text
    assert "peak 4 A" in text


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_eight_ranks_and_thirty_two_microbatches_are_legible(name: str) -> None:
    simulation = simulate(build(name, 8, 32))
    scene = picture([simulation])
    assert scene.width <= 3000
    digits = [shape for shape in scene.shapes if isinstance(shape, Text) and shape.text.isdigit()]
    assert min(digit.size for digit in digits) >= 7
    assert len(digits) >= sum(len(spans) for spans in simulation.timeline)  # no number is left out


def test_actions_do_not_overlap_and_stay_inside() -> None:
    scene = picture([simulate(build("zb-h1", 4, 8))])
    rows: dict[float, list[Rect]] = {}
    for shape in scene.shapes:
        if isinstance(shape, Rect) and shape.hint:
            rows.setdefault(shape.y, []).append(shape)
    assert len(rows) == 4
    for rects in rows.values():
        for left, right in pairwise(rects):
            assert left.x + left.width <= right.x + 1e-6
        assert rects[-1].x + rects[-1].width <= scene.width


def test_memory_has_a_curve_per_rank() -> None:
    scene = picture([simulate(build("zb-h1", 4, 8))])
    assert sum(isinstance(shape, Area) for shape in scene.shapes) == 4


def test_several_schedules_share_one_time_scale() -> None:
    placement = Placement.single(4)
    costs = Costs.even(placement).slowed(placement, {1: 1.5})
    simulations = [simulate(build(name, 4, 8, costs=costs), costs) for name in ("1f1b", "zb-h1", "auto")]
    scene = picture(simulations)
    forwards = {shape.width for shape in scene.shapes if isinstance(shape, Rect) and shape.hint.startswith("F0.")}
    assert len({round(width, 6) for width in forwards}) == 1
    titles = [shape.text for shape in scene.shapes if isinstance(shape, Text) and shape.bold]
    assert [title for title in titles if title in CATALOGUE] == ["1f1b", "zb-h1", "auto"]


def test_the_optimizer_is_drawn() -> None:
    schedule = with_zero(build("1f1b", 2, 2), 1)
    costs = Costs(f=(1, 1), i=(1, 1), w=(1, 1), b=(2, 2), activation=(1, 1), step=2)
    assert "STEP1" in to_svg(picture([simulate(schedule, costs)]))


def test_the_same_schedule_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_picture([simulate(build("zb-v", 4, 8))], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_files_are_png(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    scene = picture([simulate(build("dualpipe-v", 4, 8))])
    assert to_png(scene).startswith(b"\x89PNG\r\n")
    save_picture([simulate(build("zb-v", 2, 4))], tmp_path / "zb-v.png")
    assert (tmp_path / "zb-v.png").stat().st_size > 1000


def test_png_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r'pip install "fivefold\[draw\]"'):
        to_png(picture([simulate(build("1f1b", 2, 2))]))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.svg or a \.png"):
        save_picture([simulate(build("1f1b", 2, 2))], tmp_path / "picture.gif")


def test_the_terminal_shows_ranks_bubbles_numbers_and_memory() -> None:
    text = to_terminal(simulate(build("1f1b", 2, 3)), columns=61, colour=False).plain
    assert text.splitlines() == [
        "rank 0 F0--F1--········B0------F2--B1------····B2------",
        "rank 1 ····F0--B0------F1--B1------F2--B2------········",
        "memory",
        "rank 0 ▄▄▄▄████████████████████████████████▄▄▄▄▄▄▄▄▄▄▄▄ 2",
        "rank 1     ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄         1",
    ]


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_the_terminal_view_fits_its_width(name: str, columns: int) -> None:
    text = to_terminal(simulate(build(name, 8, 32)), columns=columns)
    assert max(map(len, text.plain.splitlines())) <= columns
    assert text.spans


def test_the_legend_names_what_is_there() -> None:
    simulation = simulate(build("zb-h1", 2, 2))
    assert legend([simulation]).plain.split() == ["F", "forward", "I", "input", "gradient", "W", "weight", "gradient"]
