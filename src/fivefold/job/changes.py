"""KEY=VALUE of a command line, laid over a job's table.

apply(table, "optimizer.lr=3e-4", problems)
"""

from typing import Any

from fivefold.layout.layout import Layout
from fivefold.support.documents import parse_toml
from fivefold.support.errors import UserError

Table = dict[str, Any]


def apply(table: Table, change: str, problems: list[str]) -> None:
    """Lay one `section.key=value` of the command line over the table."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        problems.append(f"{change!r} is not of the form section.key=value")
        return
    if any("\ud800" <= letter <= "\udfff" for letter in change):  # how Python keeps bytes that are no text
        problems.append(f"{change!r} is not of a text in UTF-8; give it other characters")
        return
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(table.get(section), str):  # a layout or model by its short name, then changed field by field
            table[section] = _spread(section, table[section], problems)
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            problems.append(f"{key}: {section} is a value, not a table")
            return
    table[last] = _value(text)


def _value(text: str) -> Any:
    """A TOML value, or plain text where it is none: `1e-4`, `true`, `[1, 2]`, and bare words."""
    try:
        table = parse_toml(f"value = {text}")
        return table["value"] if len(table) == 1 else text  # lines below the first would be read by nobody
    except (ValueError, RecursionError):
        return text


def _spread(section: str, text: str, problems: list[str]) -> Table:
    """The table that a short string stands for."""
    if section == "layout":
        try:
            return Layout.parse(text).given()
        except UserError as error:
            problems += error.problems
            return {}
    return {"preset": text} if section == "model" else {}
