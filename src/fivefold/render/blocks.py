"""The blocks that a result is made of, and `Result`, which every command returns."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text as RichText

from fivefold.render.paint import save, to_svg
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.parsing import path_of
from fivefold.support.progress import is_shown

if TYPE_CHECKING:
    from rich.text import Text as RichText

    from fivefold.render.scene import Scene

Style = Literal["", "bold", "dim", "good", "bad"]


class Cell(NamedTuple):
    """A cell of a table, with emphasis. A plain string is a cell without any."""

    text: str
    style: Style = ""


def mark(passed: bool) -> Cell:
    """The cell that ends the row of a check."""
    return Cell("ok", "good") if passed else Cell("FAILS", "bad")


Row = Sequence[Any]  # strings and Cells, whose common type mypy would take for Sequence[str]


class Column(NamedTuple):
    head: str
    right: bool  # aligned to the right, as numbers are
    breaks: bool  # its cells may break into lines, after a comma or a space


@dataclass(frozen=True)
class Text:
    """A sentence, or several lines."""

    text: str
    style: Style = ""
    typed: bool = False  # commands to type, whose lines must not be broken


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
    """The result of a command. Subclasses define what is printed (`blocks`), what scripts read (`to_dict`) and, if
    there is a picture, what is drawn (`scene`)."""

    ok: bool = True  # whether the command succeeded; if not, its exit code is 1

    def blocks(self) -> Iterable[Block]:
        raise NotImplementedError

    def to_dict(self) -> Any:
        """The same figures as plain data, for JSON."""
        raise NotImplementedError

    def scene(self) -> "Scene | None":
        """The picture as data, which becomes SVG and PNG, light and dark."""
        return None

    def drawn(self, name: str) -> "Scene | None":
        """The picture that a file of this name should hold: some results have several."""
        return self.scene()

    def svg(self, *, dark: bool = False) -> "Svg | None":
        scene = self.scene()
        return None if scene is None else Svg(to_svg(scene, dark=dark))

    def __str__(self) -> str:
        return to_text(self.blocks())

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return to_html(self)

    def _repr_mimebundle_(self, **wanted: Any) -> dict[str, str]:
        """What a notebook keeps, and IPython prints. The text would else be Python's repr: 200 kB of a plan."""
        return {"text/plain": to_text(self.blocks(), width_of(console_of())), "text/html": self._repr_html_()}


class Svg(str):
    """A picture as text, which a notebook shows as the picture. GitHub shows it too; SVG within HTML it leaves out."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<a picture, {len(self) / 1000:.0f} kB of SVG>"

    def _repr_svg_(self) -> str:
        return str(self)


# ---- fit ------------------------------------------------------------------------------------------------------------
# Fits tables to a width: columns that may break are narrowed; if that is not enough, rows become records.
#
# Pure text: `table_lines` returns rows of (text, style) pieces, which the terminal paints and tests read.


COLUMN_GAP = 2  # spaces between columns
MIN_BREAKING_WIDTH = 14  # of a column whose cells may break
Line = list[tuple[str, Style]]


def table_lines(table: Table, width: int | None) -> Iterator[Line]:
    """The lines of a table without its title and caption, at most `width` wide. None: any width, one line per row."""
    columns, rows = table.columns, list(table.cells)
    widths = _widths(columns, rows, width)
    if widths is None:
        assert width is not None
        yield from _records(columns, rows, width)
        return
    heads = [_broken(column.head, size) for column, size in zip(columns, widths, strict=True)]
    if any(column.head for column in columns):
        height = max(map(len, heads))
        padded = [[""] * (height - len(head)) + head for head in heads]  # all heads end on the last line
        for number in range(height):
            texts = [head[number] for head in padded]
            yield [((" " * COLUMN_GAP).join(_aligned(columns, widths, texts)).rstrip(), "bold")]
    for number, row in enumerate(rows):
        if number == len(table.rows) and number:
            yield [("─" * (sum(widths) + COLUMN_GAP * (len(widths) - 1)), "dim")]
        yield from _row(columns, widths, row)


def _row(columns: list[Column], widths: list[int], row: list[Cell]) -> Iterator[Line]:
    """The lines of a row, several if a cell breaks."""
    broken = [
        _broken(cell.text, size) if column.breaks else [cell.text]
        for cell, size, column in zip(row, widths, columns, strict=True)
    ]
    for number in range(max(map(len, broken))):
        aligned = _aligned(columns, widths, [texts[number] if number < len(texts) else "" for texts in broken])
        pieces: Line = []
        for text, cell in zip(aligned, row, strict=True):
            pieces += (text, cell.style), (" " * COLUMN_GAP, "")
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        if pieces:
            last, style = pieces[-1]
            pieces[-1] = (last.rstrip(), style)
        yield pieces


def _aligned(columns: list[Column], widths: list[int], texts: list[str]) -> list[str]:
    cells = zip(columns, widths, texts, strict=True)
    return [text.rjust(size) if column.right else text.ljust(size) for column, size, text in cells]


def _widths(columns: list[Column], rows: list[list[Cell]], width: int | None) -> list[int] | None:
    """The width of each column; None if the table cannot be made narrow enough.

    It tries whole heads, then broken heads, then broken cells in the columns that may break.
    """
    cells = [max((len(row[index].text) for row in rows), default=0) for index in range(len(columns))]
    widths = [max(len(column.head), cell) for column, cell in zip(columns, cells, strict=True)]
    gaps = COLUMN_GAP * (len(columns) - 1)
    if width is None or sum(widths) + gaps <= width:
        return widths
    with_broken_heads = [max(_longest(column.head), cell) for column, cell in zip(columns, cells, strict=True)]
    if sum(with_broken_heads) + gaps <= width:
        return with_broken_heads
    widths = list(with_broken_heads)
    for index, column in enumerate(columns):
        if column.breaks:
            least = max(MIN_BREAKING_WIDTH, *(_longest(row[index].text) for row in rows), _longest(column.head))
            widths[index] = min(widths[index], least)
    spare = width - gaps - sum(widths)
    if spare < 0:
        return None
    for index, column in enumerate(columns):
        if column.breaks:  # the first ones get the spare width
            more = min(spare, with_broken_heads[index] - widths[index])
            widths[index], spare = widths[index] + more, spare - more
    return widths


def _records(columns: list[Column], rows: list[list[Cell]], width: int) -> Iterator[Line]:
    """Each row as a record: its cells up to the first name on a line of their own, the rest as `head value` below."""
    for row in rows:
        is_name = [column.head and cell.text and not column.right for column, cell in zip(columns, row, strict=True)]
        title = next((index for index, name in enumerate(is_name) if name), 0)
        before = [cell for cell in row[:title] if cell.text]
        opening = " ".join(cell.text for cell in (*before, row[title]))
        for number, text in enumerate(_broken(opening, width)):
            yield [(f"  {text}" if number else text, row[title].style or "bold")]
        line: Line = [("  ", "")]
        for column, cell in list(zip(columns, row, strict=True))[title + 1 :]:
            if not cell.text:
                continue
            pair = f"{column.head} {cell.text}".strip()
            if len(line) > 1:
                line.append(("   ", ""))
            if sum(len(text) for text, _ in line) + len(pair) > width and len(line) > 1:
                yield line[:-1]
                line = [("  ", "")]
            for number, text in enumerate(_broken(pair, width - 2)):
                if number:
                    yield line
                    line = [("  ", "")]
                line.append((text, cell.style))
        if len(line) > 1:
            yield line


def _pieces(text: str) -> list[str]:
    """The pieces between which a text may be broken: after a comma or a space."""
    return re.findall(r"[^, \n]*(?:[, \n]+|$)", text)[:-1] or [text]


def _longest(text: str) -> int:
    """The length of the longest piece, below which a column cannot be narrowed."""
    return max((len(piece.rstrip()) for piece in _pieces(text)), default=0)


def _broken(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, as far as its pieces allow."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece.replace("\n", " ")
    return [line.rstrip() for line in lines]


# ---- terminal -------------------------------------------------------------------------------------------------------
# Blocks on a terminal, and as plain text.


STYLES = {"": "", "bold": "bold", "dim": "dim", "good": "green", "bad": "bold red"}


_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # and surrogates, which cannot be encoded


def _inert(text: str) -> str:
    """The text with control characters as escapes: names come from files, and a terminal would act on them."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def console_of(*, stderr: bool = False) -> Console:
    """The console for everything that the program prints: it neither colours numbers nor cuts lines. Standard error has
    remarks, which --quiet suppresses."""
    columns = os.environ.get("COLUMNS", "")
    unknown = columns.isdigit() and int(columns) < 1  # some shells set 0 where there is no terminal
    width = 80 if unknown else None
    quiet = stderr and not is_shown()
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, quiet=quiet, force_jupyter=False)


def width_of(console: Console) -> int | None:
    """The columns of a console; None for a file or a pipe, whose lines may have any length."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def render(blocks: Iterable[Block], console: Console, width: int | None) -> None:
    """Print blocks on a console."""
    for block in blocks:
        if isinstance(block, Text):
            soft_wrap = width is None or block.typed
            console.print(RichText(_inert(block.text), STYLES[block.style]), soft_wrap=soft_wrap, width=width)
        elif isinstance(block, Drawing):
            console.print(block.draw(width or 120, console.color_system is not None), no_wrap=True, crop=True)
        else:
            _table(block, console, width)


def _table(table: Table, console: Console, width: int | None) -> None:
    if table.title:
        console.print(RichText(_inert(f"\n{table.title}"), "bold underline"), soft_wrap=width is None, width=width)
    for line in table_lines(table, width):
        text = RichText.assemble(*((_inert(text), STYLES[style]) for text, style in line))
        console.print(text, no_wrap=True, overflow="ignore", crop=False)
    if table.caption:
        console.print(RichText(_inert(table.caption), "dim"), soft_wrap=width is None, width=width)


def to_text(blocks: Iterable[Block], width: int | None = None) -> str:
    """Blocks as plain text, for `print` and files."""
    out = StringIO()
    # In a notebook's kernel rich would show the lines in the cell, and leave the file empty.
    console = Console(file=out, highlight=False, width=width or 10_000, color_system=None, force_jupyter=False)
    render(blocks, console, width)
    return out.getvalue()


# ---- html -----------------------------------------------------------------------------------------------------------
# A result as HTML, for notebooks: its tables, its sentences and its picture.


_CSS = {"bold": "font-weight:bold", "dim": "opacity:.6", "good": "color:green", "bad": "color:red;font-weight:bold"}


def to_html(result: Result) -> str:
    parts = []
    for block in result.blocks():
        if isinstance(block, Table):
            parts.append(table_html(block))
        elif isinstance(block, Text):
            parts.append(_styled("p", Cell(block.text, block.style)))
        elif result.svg() is None:  # a drawing in characters is shown only where there is no picture
            parts.append(f"<pre>{escape(to_text([block]))}</pre>")
    return "\n".join([*parts, *filter(None, [result.svg()])])


def _styled(tag: str, cell: Cell, style: str = "") -> str:
    css = ";".join(filter(None, (style, _CSS.get(cell.style, ""))))
    text = escape(cell.text).replace("\n", "<br>")
    return f'<{tag} style="{css}">{text}</{tag}>' if css else f"<{tag}>{text}</{tag}>"


def table_html(table: Table) -> str:
    sides = ["text-align:right" if column.right else "text-align:left" for column in table.columns]
    heads = "".join(_styled("th", Cell(column.head), side) for column, side in zip(table.columns, sides, strict=True))
    rows = "".join(
        f"<tr>{''.join(_styled('td', cell, side) for cell, side in zip(cells, sides, strict=True))}</tr>"
        for cells in table.cells
    )
    title = _styled("p", Cell(table.title, "bold")) if table.title else ""
    caption = _styled("p", Cell(table.caption, "dim")) if table.caption else ""
    return f"{title}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{caption}"


# ---- show -----------------------------------------------------------------------------------------------------------
# How a command ends: its result on the terminal or as JSON, in a file if requested, and an exit code.


TEXT_SUFFIXES = (".json", ".txt")  # the formats in which any result can be written


def show(result: Result, *, as_json: bool = False, output: Path | None = None, remarks: Iterable[str] = ()) -> None:
    """Print a result, and write it to `output`. A result that is not ok ends the command with exit code 1.

    The file's suffix decides what is written: the figures (.json), the printed text (.txt), or a picture. `remarks` are
    printed at the end."""
    if output is not None:
        _write(result, output)
        remarks = (*remarks, f"written to {output}")
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        console = console_of()
        render(result.blocks(), console, width_of(console))
        render(map(Text, remarks), console, None)
    if not result.ok:
        raise typer.Exit(1)


def _write(result: Result, output: Path) -> None:
    match output.suffix.lower():
        case ".json":
            write(output, json.dumps(result.to_dict(), indent=1) + "\n")
        case ".txt":
            write(output, to_text(result.blocks()))
        case _:
            scene = result.drawn(output.stem)
            if scene is None:
                raise UserError(f"there is nothing to draw in {output}", "picture.empty")
            save(scene, output)


def check_writable(path: Path | None, *suffixes: str) -> None:
    """Refuse a file that cannot be written, before the work that it is for."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(f"{path} should end in {' or '.join(suffixes)}", "output.kind")
    path_of(path)  # refuses impossible names
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}", "file.write")
    new = not path.exists()
    try:
        path.open("a").close()  # permissions do not tell, for example under /proc
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "file.write") from None
