"""A notebook as Markdown: its text, its code, and what the cells have printed and drawn."""

import base64
import json
from typing import Any

FENCE = "`" * 8


def notebook(text: str) -> str:
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    return [f"{FENCE}python\n{source}\n{FENCE}", *filter(None, map(_output, cell["outputs"]))]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if drawn := "".join(data.get("image/svg+xml", "")):
        address = base64.b64encode(drawn.encode()).decode()
        return f'<img alt="what the cell above draws" src="data:image/svg+xml;base64,{address}">'
    printed = "".join(output.get("text", data.get("text/plain", "")))
    return f"{FENCE}text\n{printed.rstrip()}\n{FENCE}" if printed.strip() else ""
