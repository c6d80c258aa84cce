"""Tables at any width: nothing is cut, nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.render.blocks import Cell, Result, Table, Text, console_of, mark, to_html, to_text

LAYOUT = "dp=2,tp=4,pp=4,cp=2,cp_kind=ulysses,zero=1,sp,microbatches=256"
TABLE = Table(
    ["", "~layout", ">microbatch", ">step", ">tokens/s per GPU", ">MFU", ">memory", ">exposed communication"],
    [["", LAYOUT, "1", "64.73 s", "1,012", "49.3%", "74.4 GB", "8.1%"], ["→", "dp=64,zero=3", "2", "65.53 s"]],
    title="Layouts",
    caption="memory: of the fullest rank",
    totals=[["", "total", "", "2 s"]],
)


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", [None, 200, 120, 100, 80, 60])
def test_every_word_is_there_at_every_width_and_no_line_is_longer(width: int | None) -> None:
    text = to_text([TABLE], width)
    assert squeezed(LAYOUT) in squeezed(text) if width is None or width < 80 else "cp_kind=ulysses" in text
    for word in ("64.73", "65.53", "1,012", "microbatch", "communication", "→", "total", "fullest", "Layouts"):
        assert word in text, (word, width)
    assert "…" not in text
    if width is not None:
        assert max(map(len, text.splitlines())) <= width


def test_a_piped_table_has_a_line_for_each_row() -> None:
    lines = to_text([TABLE]).splitlines()
    assert [line for line in lines if LAYOUT in line and "8.1%" in line]


def test_a_table_that_cannot_fit_becomes_records_that_begin_with_the_name() -> None:
    lines = to_text([TABLE], 60).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("→"))
    assert lines[at] == "→ dp=64,zero=3"
    assert lines[at + 1].split() == ["microbatch", "2", "step", "65.53", "s"]


@given(st.lists(st.lists(st.text("ab, =", max_size=30), min_size=3, max_size=3), max_size=4), st.integers(40, 150))
def test_lines_are_never_longer_than_the_width(rows: list[list[str]], width: int) -> None:
    table = Table(["~one", ">two", "three"], rows)
    longest = max((len(piece) for row in rows for cell in row for piece in cell.replace(",", " ").split()), default=0)
    if longest < width - 10:
        assert all(len(line) <= width for line in to_text([table], width).splitlines())


class Found(Result):
    def blocks(self):
        return [Text("a < b", "bold"), Table(["name", ">n"], [["x & y", Cell("1", "bad")], ["z", mark(True)]])]

    def to_dict(self):
        return {"n": 1}

    def svg(self):
        return "<svg/>"


def test_a_notebook_shows_the_same_tables_escaped_and_the_picture() -> None:
    page = to_html(Found())
    assert "a &lt; b" in page
    assert "x &amp; y" in page
    assert "color:red" in page
    assert page.endswith("<svg/>")


def test_printing_a_result_is_its_text() -> None:
    assert "a < b" in str(Found())
    assert "x & y" in str(Found())


def test_a_terminal_of_no_columns_is_one_of_unknown_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert console_of().width == 80
