"""Pictures: well-formed, complete, the same every time; for files and for the terminal."""

import sys
import xml.etree.ElementTree as ElementTree
from bisect import bisect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.render.paint import save, to_png, to_svg
from fivefold.render.scene import Area, Rect, Scene, TextMark, text_width
from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.communication import with_zero
from fivefold.schedules.costs import Costs
from fivefold.schedules.draw import LANDSCAPE, picture
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Placement
from fivefold.schedules.simulate import simulate
from fivefold.schedules.terminal import _columns, legend, timeline
from fivefold.support.errors import UserError

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


@pytest.mark.parametrize("ep", [0.0, 0.4])
def test_a_pair_is_drawn_overlapped_where_it_is(ep: float) -> None:
    """Else its F and its B stand one after the other, as they run."""
    schedule = build("dualpipe-v", 4, 8)
    simulation = simulate(schedule, Costs.even(schedule.placement, ep=ep))
    shown = [one for rank in range(4) for one in simulation.drawn(rank)]
    beside = [one for one in shown if one.beside]
    pairs = sum(action.joined for order in schedule.ranks for action in order)
    assert len(beside) == (pairs if ep else 0)
    assert sum(1 + bool(one.beside) for one in shown) == sum(map(len, simulation.timeline))
    assert sum(one.end - one.start for one in shown) == pytest.approx(sum(rank.busy for rank in simulation.ranks))
    rects = [shape for shape in picture([simulation]).shapes if isinstance(shape, Rect) and shape.hint]
    assert len({rect.height for rect in rects}) == 1 + bool(ep)
    plain, colour = (timeline(simulation, 200, colour=colour).plain for colour in (False, True))
    assert ("&B" in plain, "▀" in colour) == (bool(ep), bool(ep))
    assert ("an F beside a B" in legend([simulation]).plain) == bool(ep)


def test_the_title_has_both_bubbles_and_the_peak() -> None:
    text = to_svg(picture([simulate(build("zb-v", 4, 8))]))
    assert "makespan 25.5" in text
    assert "bubble 5.9% of the makespan, 0.0% of the span" in text
    assert "peak 4 A" in text


def numbers(scene: Scene) -> list[tuple[TextMark, Rect]]:
    """Every number of a microbatch, with the action it is printed on."""
    rects = [shape for shape in scene.shapes if isinstance(shape, Rect) and shape.hint]
    texts = [shape for shape in scene.shapes if isinstance(shape, TextMark) and shape.anchor == "middle"]
    rows: dict[tuple[float, float], list[Rect]] = {}
    for rect in rects:
        rows.setdefault((rect.y, rect.height), []).append(rect)
    for row in rows.values():
        row.sort(key=lambda rect: rect.x)
    found = []
    for text in texts:
        for (y, height), row in rows.items():
            at = bisect(row, text.x, key=lambda rect: rect.x) - 1
            if y < text.y < y + height and at >= 0 and text.x < row[at].x + row[at].width:
                found.append((text, row[at]))
    return found


def assert_legible(scene: Scene) -> None:
    """On a page 1520 wide no number is below 8, and none sticks out of its action."""
    printed = numbers(scene)
    assert printed
    shown = min(1.0, 1520 / scene.width)
    for text, rect in printed:
        assert text.size * shown >= 8 * (1 - 1e-9)
        assert text_width(text.text, text.size) <= rect.width
        assert rect.y <= text.y - 0.36 * text.size
        assert text.y + 0.36 * text.size <= rect.y + rect.height


def test_eight_ranks_and_thirty_two_microbatches_are_legible() -> None:
    simulation = simulate(build("1f1b", 8, 32))
    scene = picture([simulation])
    assert_legible(scene)
    assert len(numbers(scene)) == sum(map(len, simulation.timeline))  # no number is left out
    assert "numbers only where they can be read" not in to_svg(scene)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe-v"])
def test_sixteen_ranks_and_sixty_four_microbatches_are_legible(name: str) -> None:
    """Actions of one width all have their number, in one line, or none has."""
    simulation = simulate(build(name, 16, 64))
    scene = picture([simulation])
    assert scene.width <= 3000
    printed = numbers(scene)
    if printed:
        assert_legible(scene)
    actions = [shape for shape in scene.shapes if isinstance(shape, Rect) and shape.hint]
    numbered = {(round(rect.width, 3), rect.height) for _, rect in printed}
    assert len(printed) == sum((round(rect.width, 3), rect.height) in numbered for rect in actions)
    assert all(text.text == rect.hint.split()[0].partition(".")[2] for text, rect in printed)
    assert "numbers only where they can be read" in to_svg(scene)


def test_comparisons_are_wider_than_high() -> None:
    for p, m, names in ((4, 8, ["1f1b", "zb-h1", "zb-v"]), (16, 64, ["1f1b", "zb-h1"]), (8, 16, [*CATALOGUE][:6])):
        scene = picture([simulate(build(name, p, m)) for name in names])
        assert scene.width >= LANDSCAPE * scene.height, (p, m)


def test_numbers_that_could_not_be_read_are_left_out_and_the_picture_says_so() -> None:
    simulation = simulate(build("interleaved", 8, 32, chunks=2))
    scene = picture([simulation])
    assert_legible(scene)
    labelled = {rect.hint[0] for _, rect in numbers(scene)}
    assert labelled == {"B"}  # backwards are twice as wide as forwards
    assert "numbers only where they can be read" in to_svg(scene)


def test_a_picture_of_very_many_actions_has_no_numbers_and_says_so() -> None:
    scene = picture([simulate(build("1f1b", 8, 32))], many=511)
    assert not numbers(scene)
    assert not any(isinstance(shape, Rect) and shape.hint for shape in scene.shapes)
    assert "too many actions to number them" in to_svg(scene)


def test_long_times_are_written_out() -> None:
    schedule = build("1f1b", 2, 2)
    text = to_svg(picture([simulate(schedule, Costs.even(schedule.placement, 3667.5, 3667.5, 3666.833333333))]))
    assert "makespan 33005.5 " in text
    assert "e+" not in text


def test_a_long_name_stays_clear_of_the_legend() -> None:
    schedule = replace(build("zb-v", 4, 8), name="a schedule whose name goes on " * 9 + "for ever")
    scene = picture([simulate(schedule)])
    head = [shape for shape in scene.shapes if isinstance(shape, TextMark)]
    name = next(text for text in head if text.bold)
    legend_begins = min(text.x for text in head if text.y == name.y and text.text != name.text and text.x > 300)
    assert name.text.endswith("…")
    assert name.x + 1.12 * text_width(name.text, name.size) < legend_begins
    assert schedule.name in to_svg(scene)  # in full, as the title of the file


def test_actions_do_not_overlap_and_stay_inside_and_memory_has_a_curve_per_rank() -> None:
    scene = picture([simulate(build("zb-h1", 4, 8))])
    assert sum(isinstance(shape, Area) for shape in scene.shapes) == 4
    rows: dict[float, list[Rect]] = {}
    for shape in scene.shapes:
        if isinstance(shape, Rect) and shape.hint:
            rows.setdefault(shape.y, []).append(shape)
    assert len(rows) == 4
    for rects in rows.values():
        for left, right in pairwise(rects):
            assert left.x + left.width <= right.x + 1e-6
        assert rects[-1].x + rects[-1].width <= scene.width


def test_several_schedules_share_one_time_scale() -> None:
    placement = Placement.single(4)
    costs = Costs.even(placement).slowed(placement, {1: 1.5})
    simulations = [simulate(build(name, 4, 8, costs=costs), costs) for name in ("1f1b", "zb-h1", "auto")]
    scene = picture(simulations)
    forwards = {shape.width for shape in scene.shapes if isinstance(shape, Rect) and shape.hint.startswith("F0.")}
    assert len({round(width, 6) for width in forwards}) == 1
    titles = [shape.text for shape in scene.shapes if isinstance(shape, TextMark) and shape.bold]
    assert [title for title in titles if title in CATALOGUE] == ["1f1b", "zb-h1", "auto"]


def test_the_optimizer_is_drawn() -> None:
    schedule = with_zero(build("1f1b", 2, 2), 1)
    costs = Costs(f=(1, 1), i=(1, 1), w=(1, 1), b=(2, 2), activation=(1, 1), step=2)
    assert "STEP1" in to_svg(picture([simulate(schedule, costs)]))


def test_the_same_schedule_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save(picture([simulate(build("zb-v", 4, 8))]), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_files_are_png(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    scene = picture([simulate(build("dualpipe-v", 4, 8))])
    assert to_png(scene).startswith(b"\x89PNG\r\n")
    save(picture([simulate(build("zb-v", 2, 4))]), tmp_path / "zb-v.png")
    assert (tmp_path / "zb-v.png").stat().st_size > 1000


def test_what_cannot_be_saved_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = picture([simulate(build("1f1b", 2, 2))])
    with pytest.raises(UserError, match=r"\.svg or a \.png"):
        save(scene, tmp_path / "picture.gif")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r'pip install "fivefold\[draw\]"'):
        to_png(scene)


def test_the_terminal_shows_ranks_bubbles_numbers_and_memory() -> None:
    text = timeline(simulate(build("1f1b", 2, 3)), columns=61, colour=False).plain
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
    text = timeline(simulate(build(name, 8, 32)), columns=columns)
    assert max(map(len, text.plain.splitlines())) <= columns
    assert text.spans


def test_the_legend_names_what_is_there() -> None:
    simulation = simulate(build("zb-h1", 2, 2))
    assert legend([simulation]).plain.split() == ["F", "forward", "I", "input", "gradient", "W", "weight", "gradient"]


def test_a_column_shows_what_fills_most_of_it_and_is_idle_if_nothing_does() -> None:
    # The middle of the second column is in the short action, which fills a fifth of it.
    letters = ((Kind.FORWARD, 0.0, 1.4), (Kind.INPUT_GRAD, 1.4, 1.6), (Kind.WEIGHT_GRAD, 1.6, 3.0))
    spans = [BusySpan(Action(kind, 0, 0), start, end) for kind, start, end in letters]
    assert _columns(spans, 3, 1.0) == [spans[0], spans[0], spans[2]]
    spans = [BusySpan(Action(Kind.FORWARD, 0, 0), 0.0, 1.4), BusySpan(Action(Kind.BACKWARD, 0, 0), 2.8, 4.0)]
    assert _columns(spans, 4, 1.0) == [spans[0], None, None, spans[1]]


def test_eighty_columns_without_colour_still_have_the_numbers() -> None:
    assert "F0F1F2F3" in timeline(simulate(build("1f1b", 4, 8)), columns=80, colour=False).plain
