"""Sections of blocks as Markdown that is read as plain text too: tables are aligned, prose is broken at 80 columns."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fivefold.report.blocks import Block, Table, Text
from fivefold.report.terminal import to_text

WIDTH = 80


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


def to_markdown(title: str, sections: Iterable[Section]) -> str:
    """A Text whose lines begin with `- ` is a list; its items go on below themselves."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Table):
        parts = [f"**{block.title}**" if block.title else "", _table(block), _prose(block.caption)]
        return "\n\n".join(filter(None, parts))
    if isinstance(block, Text):
        return "\n".join(map(_prose, block.text.splitlines()))
    return f"```\n{to_text([block])}\n```"


def _prose(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(table: Table) -> str:
    """Totals are rows of their own, in bold."""
    columns, rows = table.columns, [[_escaped(cell.text) for cell in cells] for cells in table.cells]
    for row in rows[len(table.rows) :]:
        row[:] = [f"**{text}**" if text else "" for text in row]
    heads = [_escaped(column.head) for column in columns]
    sizes = [max(3, *(len(row[at]) for row in (heads, *rows))) for at in range(len(columns))]
    rule = ["-" * (size - 1) + ":" if column.right else "-" * size for column, size in zip(columns, sizes, strict=True)]

    def line(row: list[str]) -> str:
        cells = zip(row, sizes, columns, strict=True)
        return f"| {' | '.join(text.rjust(n) if column.right else text.ljust(n) for text, n, column in cells)} |"

    return "\n".join([line(heads), line(rule), *map(line, rows)])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
