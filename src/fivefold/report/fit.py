"""Tables fitted to a width: columns that may break are narrowed, and if that is not enough rows become records.

Pure text: `lines` returns rows of (text, style) pieces, which the terminal paints and tests read.
"""

import re
from collections.abc import Iterator

from fivefold.report.blocks import Cell, Column, Style, Table

GAP = 2  # spaces between columns
NARROWEST = 14  # to which a column that may break is narrowed
Line = list[tuple[str, Style]]


def lines(table: Table, width: int | None) -> Iterator[Line]:
    """The table without its title and caption. `width` None: as wide as it is, a line for each row."""
    columns, rows = table.columns, list(table.cells)
    widths = _widths(columns, rows, width)
    if widths is None:
        assert width is not None
        yield from _records(columns, rows, width)
        return
    heads = [_broken(column.head, size) for column, size in zip(columns, widths, strict=True)]
    if any(column.head for column in columns):
        height = max(map(len, heads))
        for at in range(height):
            texts = [head[at - height + len(head)] if at >= height - len(head) else "" for head in heads]
            yield [((" " * GAP).join(_aligned(columns, widths, texts)).rstrip(), "bold")]
    for number, row in enumerate(rows):
        if number == len(table.rows) and number:
            yield [("─" * (sum(widths) + GAP * (len(widths) - 1)), "dim")]
        yield from _row(columns, widths, row)


def _row(columns: list[Column], widths: list[int], row: list[Cell]) -> Iterator[Line]:
    broken = [
        _broken(cell.text, size) if column.breaks else [cell.text]
        for cell, size, column in zip(row, widths, columns, strict=True)
    ]
    for at in range(max(map(len, broken))):
        aligned = _aligned(columns, widths, [texts[at] if at < len(texts) else "" for texts in broken])
        pieces: Line = []
        for text, cell in zip(aligned, row, strict=True):
            pieces += (text, cell.style), (" " * GAP, "")
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        if pieces:
            pieces[-1] = (pieces[-1][0].rstrip(), pieces[-1][1])
        yield pieces


def _aligned(columns: list[Column], widths: list[int], texts: list[str]) -> list[str]:
    cells = zip(columns, widths, texts, strict=True)
    return [text.rjust(size) if column.right else text.ljust(size) for column, size, text in cells]


def _widths(columns: list[Column], rows: list[list[Cell]], width: int | None) -> list[int] | None:
    """Of each column; None where no choice of widths is narrow enough."""
    cells = [max((len(row[at].text) for row in rows), default=0) for at in range(len(columns))]
    whole = [max(len(column.head), cell) for column, cell in zip(columns, cells, strict=True)]
    gaps = GAP * (len(columns) - 1)
    if width is None or sum(whole) + gaps <= width:
        return whole
    slim = [max(_longest(column.head), cell) for column, cell in zip(columns, cells, strict=True)]
    if sum(slim) + gaps <= width:
        return slim
    least = [
        min(size, max(NARROWEST, *(_longest(row[at].text) for row in rows), _longest(column.head)))
        if column.breaks
        else size
        for at, (column, size) in enumerate(zip(columns, slim, strict=True))
    ]
    spare = width - gaps - sum(least)
    if spare < 0:
        return None
    for at, column in enumerate(columns):
        if column.breaks:
            given = min(spare, slim[at] - least[at])
            least[at], spare = least[at] + given, spare - given
    return least


def _records(columns: list[Column], rows: list[list[Cell]], width: int) -> Iterator[Line]:
    """A row each: its first words on a line of their own, the rest as `head value` pairs below."""
    for row in rows:
        names = [column.head and cell.text and not column.right for column, cell in zip(columns, row, strict=True)]
        title = next((at for at, is_name in enumerate(names) if is_name), 0)
        ahead = [cell for cell in row[:title] if cell.text]
        opening = " ".join(cell.text for cell in (*ahead, row[title]))
        for at, text in enumerate(_broken(opening, width)):
            yield [(text if not at else f"  {text}", row[title].style or "bold")]
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
            for at, text in enumerate(_broken(pair, width - 2)):
                if at:
                    yield line
                    line = [("  ", "")]
                line.append((text, cell.style))
        if len(line) > 1:
            yield line


def _pieces(text: str) -> list[str]:
    """Where a text may be broken: after a comma or a space."""
    return re.findall(r"[^, \n]*(?:[, \n]+|$)", text)[:-1] or [text]


def _longest(text: str) -> int:
    return max((len(piece.rstrip()) for piece in _pieces(text)), default=0)


def _broken(text: str, width: int) -> list[str]:
    """In lines of at most `width`, as far as its pieces allow."""
    found = [""]
    for piece in _pieces(text):
        if found[-1] and len(found[-1]) + len(piece.rstrip()) > width:
            found.append("")
        found[-1] += piece.replace("\n", " ")
    return [line.rstrip() for line in found]
