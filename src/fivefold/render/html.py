"""Sections of blocks as documents: Markdown, and a page of HTML."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from fivefold.render.blocks import Block, Table, Text, table_html, to_text
from fivefold.render.paint import to_svg
from fivefold.render.scene import DARK, FONT, GREY, INK, PALE, PAPER, Scene
from fivefold.support.text import printable

# ---- markdown -------------------------------------------------------------------------------------------------------
# Sections of blocks as Markdown that is also readable as plain text: tables are aligned, prose breaks at 80 columns.


WIDTH = 80


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


def to_markdown(title: str, sections: Iterable[Section]) -> str:
    """A page of sections. Lines of a Text that begin with `- ` are items of a list, and are indented if they break."""
    parts = [f"# {_escaped(title)}"]
    for section in sections:
        parts.append(f"## {_escaped(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Table):
        parts = [f"**{_escaped(block.title)}**" if block.title else "", _table(block), _prose(block.caption)]
        return "\n\n".join(filter(None, parts))
    if isinstance(block, Text):
        return "\n".join(map(_prose, block.text.splitlines()))
    return f"```\n{to_text([block])}\n```"


def _prose(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    line = _escaped(line)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(table: Table) -> str:
    """A table in Markdown, whose totals are bold rows."""
    columns, rows = table.columns, [[_cell(cell.text) for cell in cells] for cells in table.cells]
    for row in rows[len(table.rows) :]:
        row[:] = [f"**{text}**" if text else "" for text in row]
    heads = [_cell(column.head) for column in columns]
    sizes = [max(3, *(len(row[index]) for row in (heads, *rows))) for index in range(len(columns))]
    rule = ["-" * (size - 1) + ":" if column.right else "-" * size for column, size in zip(columns, sizes, strict=True)]

    def line(row: list[str]) -> str:
        cells = zip(row, sizes, columns, strict=True)
        return f"| {' | '.join(text.rjust(n) if column.right else text.ljust(n) for text, n, column in cells)} |"

    return "\n".join([line(heads), line(rule), *map(line, rows)])


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """The text on one line and without HTML: names come from users, or from files of others."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;")


# ---- page -----------------------------------------------------------------------------------------------------------
# Sections of blocks as one HTML file, without scripts or anything from the network, for light, dark and print.


STYLE = f"""
body {{ font: 16px/1.5 {FONT}; color: {INK}; background: {PAPER}; }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .75rem; border-bottom: 1px solid {PALE}; }}
code {{ font-family: ui-monospace, monospace; overflow-wrap: anywhere; }}
figure {{ margin: 1rem 0; }} svg {{ width: 100%; height: auto; }} .dark {{ display: none; }}
.scroll {{ overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: {DARK[INK]}; background: {DARK[PAPER]}; }} th, td {{ border-color: {DARK[PALE]}; }}
  a {{ color: {DARK[GREY]}; }} .light {{ display: none; }} .dark {{ display: block; }}
}}
@media print {{ .dark {{ display: none; }} .light {{ display: block; }} }}
"""


def to_page(title: str, sections: Iterable[Section], pictures: Mapping[str, Scene]) -> str:
    """A page of sections; `pictures` has, by title of a section, the picture at its end."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts += [_html_block(block) for block in section.blocks]
        if scene := pictures.get(section.title):
            both = (("light", False), ("dark", True))
            parts += [f'<figure class="{name}">{to_svg(scene, dark=dark)}</figure>' for name, dark in both]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _html_block(block: Block) -> str:
    if isinstance(block, Table):
        return f'<div class="scroll">{table_html(block)}</div>'
    if not isinstance(block, Text):
        return f"<pre>{escape(to_text([block]))}</pre>"
    lines = block.text.splitlines()
    if all(line.startswith("- ") for line in lines):
        return f"<ul>{''.join(f'<li>{_marked(line[2:])}</li>' for line in lines)}</ul>"
    return f"<p>{'<br>'.join(map(_marked, lines))}</p>"


def _marked(line: str) -> str:
    """A line as HTML: escaped, with text in backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(line))
