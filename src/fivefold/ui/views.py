"""The views of the page: each a module `api_NAME.py` here and `static/views/NAME.js` there.

answer("plan", "", Ask({"model": "llama3-8b"}))          # the view's payload, all that its page draws
answer("plan", "search", Ask({"model": "llama3-8b"}))    # a part that takes longer, and comes later

A payload is plain data: a server sends it, and a file that stands for itself has it inline. A view's module imports
neither the server nor torch.
"""

import importlib
from typing import Any, NamedTuple

from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean
from fivefold.ui.ask import Ask


class View(NamedTuple):
    name: str  # of api_NAME.py and static/views/NAME.js
    title: str  # of its tab
    says: str  # what it shows, in a few words
    parts: tuple[str, ...] = ()  # functions of its module beside `payload`
    slow: tuple[str, ...] = ()  # of the parts (or "payload"): computed in a process of their own, which can be stopped
    kept: tuple[str, ...] = ()  # of the slow: the same for the same words as long as the server lives


VIEWS = (
    View("plan", "Plan", "a layout's memory, time and traffic", parts=("search", "why"), slow=("search", "why")),
    View("mesh", "Mesh", "every rank, what it has and whom it talks to", parts=("rank", "ranks"), slow=("ranks",)),
    View("schedule", "Schedule", "who computes what when", parts=("every", "made"), slow=("every", "made")),
    View("run", "Run", "training runs, live", parts=("tail", "trace"), slow=("trace",)),
    View("truth", "Truth", "predicted against measured step times", parts=("rows",), slow=("rows",), kept=("rows",)),
)
NAMED = {view.name: view for view in VIEWS}


class Nothing(UserError):
    """There is no such view or part."""


def view_of(name: str, part: str = "") -> View:
    if name not in NAMED:
        raise Nothing(f"there is no view {name[:40]!r}; {did_you_mean(name[:40], list(NAMED))}")
    if part and part not in NAMED[name].parts:
        raise Nothing(f"{name} has no part {part[:40]!r}; it has {', '.join(NAMED[name].parts) or 'none'}")
    return NAMED[name]


def heavy(name: str, part: str, ask: Ask) -> bool:
    """Whether a payload takes longer than others of its view, as its module says: a process of its own computes it."""
    found = getattr(importlib.import_module(f"fivefold.ui.api_{name}"), "heavy", None)
    return not part and found is not None and found(ask)


def answer(name: str, part: str, ask: Ask) -> Any:
    """A view's payload, or a part of it."""
    view_of(name, part)
    return getattr(importlib.import_module(f"fivefold.ui.api_{name}"), part or "payload")(ask)
