"""The blocks that a result is made of, and `Result`, which every command returns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.text import Text as RichText

    from fivefold.report.scene import Scene

Style = Literal["", "bold", "dim", "good", "bad"]


class Cell(NamedTuple):
    """A cell of a table, with emphasis. A plain string is a cell without any."""

    text: str
    style: Style = ""


def mark(holds: bool) -> Cell:
    """The end of a row that judges something."""
    return Cell("ok", "good") if holds else Cell("FAILS", "bad")


Row = Sequence[Any]  # strings and Cells, whose common type mypy would take for Sequence[str]


class Column(NamedTuple):
    head: str
    right: bool  # aligned: numbers are, words are not
    breaks: bool  # may go on in a second line, after a comma or a space


@dataclass(frozen=True)
class Text:
    """A sentence, or several lines."""

    text: str
    style: Style = ""
    typed: bool = False  # commands, which another line break would change


@dataclass(frozen=True)
class Table:
    """Rows of cells. In `heads`, `>step` is aligned to the right and the cells of `~layout` may break into lines.

    A table that does not fit the terminal breaks those cells; if that is not enough, each row becomes a record.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    caption: str = ""
    totals: Sequence[Row] = field(default=())  # below a rule

    @property
    def columns(self) -> list[Column]:
        return [Column(head.lstrip(">~"), ">" in head[:2], "~" in head[:2]) for head in self.heads]

    @property
    def cells(self) -> Iterator[list[Cell]]:
        """All rows, the totals last, each with a cell for every column."""
        for row in (*self.rows, *self.totals):
            cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
            yield cells + [Cell("")] * (len(self.heads) - len(cells))


@dataclass(frozen=True)
class Drawing:
    """A picture made of characters: `draw(width, colour)` returns it as rich's text."""

    draw: Callable[[int, bool], "RichText"]


Block = Text | Table | Drawing


class Result:
    """What a command has found. Subclasses say what people see (`blocks`), what scripts read (`to_dict`) and, where a
    picture helps, what is drawn (`scene`)."""

    ok: bool = True  # whether the command succeeded; a result that is not ends it with exit code 1

    def blocks(self) -> Iterable[Block]:
        raise NotImplementedError

    def to_dict(self) -> Any:
        """The same figures as plain data, for JSON."""
        raise NotImplementedError

    def scene(self) -> "Scene | None":
        """The picture as data, which becomes SVG and PNG, light and dark."""
        return None

    def svg(self, dark: bool = False) -> str | None:
        from fivefold.report.paint import to_svg

        scene = self.scene()
        return None if scene is None else to_svg(scene, dark)

    def __str__(self) -> str:
        from fivefold.report.terminal import to_text

        return to_text(self.blocks())

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from fivefold.report.html import to_html

        return to_html(self)
