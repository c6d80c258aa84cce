"""One look: colours that everybody can tell apart, on light and on dark paper, and letters that keep their dots."""

import io
from itertools import combinations
from pathlib import Path

import pytest

from fivefold.render.paint import to_png, to_svg
from fivefold.render.scene import (
    COLOURS,
    DARK,
    GREY,
    INK,
    PAPER,
    REST,
    Curve,
    Hatch,
    Line,
    Mark,
    Rect,
    Scene,
    TextMark,
    is_dark,
    light,
    rgb,
    text_on,
)
from fivefold.schedules.palette import KIND_COLOURS

# Machado, Oliveira and Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency",
# severity 1.0, for linear RGB.
SIGHTS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(colour: tuple[int, int, int], sight: str) -> tuple[float, float, float]:
    """CIELAB of a colour as somebody sees it."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    seen = [min(1, max(0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in SIGHTS[sight]]
    to_xyz = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.072175), (0.0193339, 0.119192, 0.9503041))
    white = (0.95047, 1.0, 1.08883)
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) / w for row, w in zip(to_xyz, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: tuple[int, int, int], other: tuple[int, int, int], sight: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight), strict=True)) ** 0.5


@pytest.mark.parametrize("sight", SIGHTS)
def test_everybody_can_tell_the_colours_apart(sight: str) -> None:
    for one, other in combinations([*COLOURS, REST], 2):
        assert apart(rgb(one), rgb(other), sight) >= 12, (one, other)
    for hue, another in combinations(KIND_COLOURS.values(), 2):
        assert apart(hue, another, sight) >= 12, (hue, another)


def contrast(one: str, other: str) -> float:
    high, low = sorted((light(rgb(one)), light(rgb(other))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read() -> None:
    assert all(contrast(text_on(rgb(colour)), colour) >= 4.5 for colour in (*COLOURS, REST))
    for ink in (INK, GREY):
        assert contrast(ink, PAPER) >= 4.5
        assert contrast(DARK[ink], DARK[PAPER]) >= 4.5


def test_a_dark_picture_has_no_light_paper_and_the_same_data() -> None:
    shapes = [Rect(0, 0, 9, 9, COLOURS[0]), Line(0, 0, 9, 9), Hatch(0, 0, 5, 5), TextMark(5, 5, "words", 12)]
    light_one, dark = (to_svg(Scene(20, 10, "a", shapes), dark=dark) for dark in (False, True))
    assert PAPER in light_one
    assert not [colour for colour in DARK if colour in dark]
    assert DARK[PAPER] in dark
    assert COLOURS[0] in light_one
    assert COLOURS[0] in dark


def test_the_name_of_a_file_says_whether_it_is_dark() -> None:
    assert is_dark(Path("a/memory.dark.svg"))
    assert is_dark(Path("memory.Dark.png"))
    assert not is_dark(Path("dark.svg"))
    assert not is_dark(Path("memory.svg"))


@pytest.mark.parametrize("size", [11, 17, 26])
@pytest.mark.parametrize("bold", [False, True])
def test_an_i_has_its_dot(size: float, bold: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    scene = Scene(40, 40, "", [TextMark(20, 20, "i", size, "middle", "#000000", bold)])
    with image.open(io.BytesIO(to_png(scene))) as painted:
        grey = painted.convert("L")
        rows = [min(grey.crop((0, y, grey.width, y + 1)).tobytes()) < 128 for y in range(grey.height)]
    stretches = sum(now and not before for before, now in zip([False, *rows], rows, strict=False))
    assert stretches == 2  # the dot and the stem


def test_every_shape_is_painted_in_both_formats() -> None:
    image = pytest.importorskip("PIL.Image")
    marks = [Mark(10 + 20 * shape, 10, 6, COLOURS[shape], shape, 0.9) for shape in range(4)]
    turned = TextMark(90, 30, "upwards", 9, "middle", turned=True)
    dashes = Line(0, 40, 80, 40, COLOURS[4], 3, dashed=True)
    scene = Scene(100, 60, "", [*marks, turned, dashes, Curve(((0, 50), (40, 50), (40, 55)), COLOURS[5], 3)])
    text = to_svg(scene)
    assert text.count("<circle") == 1
    assert 'stroke-dasharray="7 5"' in text
    assert "rotate(-90 " in text
    with image.open(io.BytesIO(to_png(scene))) as painted:
        assert painted.size == (200, 120)
        near = painted.convert("RGB")
        for mark in marks:  # nine tenths of it, on white
            expected = [round(0.9 * part + 25.5) for part in rgb(mark.fill)]
            assert near.getpixel((round(2 * mark.x), 20)) == pytest.approx(expected, abs=2)
        row = [near.getpixel((x, 80)) == rgb(COLOURS[4]) for x in range(150)]
        assert any(row)
        assert not all(row)
