"""A run's page as others get it: without the places and the names of the machines that it was made on.

sent(held("run", Ask({}, (Path("runs/demo"),))))
"""

import re
from typing import Any

_PATH = re.compile(r"""(?<![\w.:~/])~?/(?:[^\s/:;,'"()]+/)+([^\s/:;,'"()]*)""")  # absolute, of at least two parts
_HOST = re.compile(r"\brank \d+ on (\S+)")  # of run_events.py


def sent(view: dict[str, Any]) -> dict[str, Any]:
    """The same view: of a path its last part is left, and of a host nothing. What a log says beyond that stays."""
    page = view["payload"]
    told = [one["text"] for run in page["shown"] for one in run["events"]]
    hosts = {found for text in told for found in _HOST.findall(text)}
    shown = [
        run | {"events": [one | {"text": _unnamed(one["text"], hosts)} for one in run["events"]]}
        for run in page["shown"]
    ]
    return view | {"payload": placeless(page | {"shown": shown, "notes": []})}


def placeless(value: Any) -> Any:
    """Every text of it, in which a path is its last part."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: found[1] or "...", value)
    if isinstance(value, dict):
        return {name: placeless(one) for name, one in value.items()}
    return [placeless(one) for one in value] if isinstance(value, list | tuple) else value


def _unnamed(text: str, hosts: set[str]) -> str:
    text = re.sub(r", rank 0 on \S+$", "", text)
    for host in hosts:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "its host", text)
    return text
