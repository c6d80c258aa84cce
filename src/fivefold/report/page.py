"""Sections of blocks as one HTML file: no scripts, nothing from elsewhere, light and dark, made for print too."""

import re
from collections.abc import Iterable, Mapping
from html import escape

from fivefold.report.blocks import Block, Table, Text
from fivefold.report.html import table_html
from fivefold.report.look import DARK, FONT, GREY, INK, PALE, PAPER
from fivefold.report.markdown import Section
from fivefold.report.paint import to_svg
from fivefold.report.scene import Scene
from fivefold.report.terminal import to_text

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
    """`pictures` stand at the end of the section that they are named after."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts += [_block(block) for block in section.blocks]
        if scene := pictures.get(section.title):
            both = (("light", False), ("dark", True))
            parts += [f'<figure class="{name}">{to_svg(scene, dark)}</figure>' for name, dark in both]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return f'<div class="scroll">{table_html(block)}</div>'
    if not isinstance(block, Text):
        return f"<pre>{escape(to_text([block]))}</pre>"
    lines = block.text.splitlines()
    if all(line.startswith("- ") for line in lines):
        return f"<ul>{''.join(f'<li>{_marked(line[2:])}</li>' for line in lines)}</ul>"
    return f"<p>{'<br>'.join(map(_marked, lines))}</p>"


def _marked(line: str) -> str:
    """Escaped, with `code` in its own face."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(line))
