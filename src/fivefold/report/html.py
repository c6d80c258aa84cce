"""A result as HTML, for notebooks: its tables, its sentences and its picture."""

from html import escape

from fivefold.report.blocks import Cell, Result, Table, Text
from fivefold.report.terminal import to_text

STYLES = {"bold": "font-weight:bold", "dim": "opacity:.6", "good": "color:green", "bad": "color:red;font-weight:bold"}


def to_html(result: Result) -> str:
    parts = []
    for block in result.blocks():
        if isinstance(block, Table):
            parts.append(table_html(block))
        elif isinstance(block, Text):
            parts.append(_styled("p", Cell(block.text, block.style)))
        elif result.svg() is None:  # a drawing in characters stands for a picture where there is none
            parts.append(f"<pre>{escape(to_text([block]))}</pre>")
    return "\n".join([*parts, *filter(None, [result.svg()])])


def _styled(tag: str, cell: Cell, style: str = "") -> str:
    wanted = ";".join(filter(None, (style, STYLES.get(cell.style, ""))))
    text = escape(cell.text).replace("\n", "<br>")
    return f'<{tag} style="{wanted}">{text}</{tag}>' if wanted else f"<{tag}>{text}</{tag}>"


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
