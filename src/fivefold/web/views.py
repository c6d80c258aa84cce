"""The views of the page: each a module `NAME.py` here and `static/views/NAME.js` there.

answer("plan", "", Ask({"model": "llama3-8b"}))          # the view's payload, all that its page draws
answer("plan", "search", Ask({"model": "llama3-8b"}))    # a part that takes longer, and comes later

A payload is plain data: the server sends it, and an HTML report has it inline. A view's module imports neither the
server nor torch.
"""

import importlib
from typing import Any, NamedTuple

from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean
from fivefold.web.question import Ask


class View(NamedTuple):
    name: str  # of NAME.py and static/views/NAME.js
    title: str  # of its tab
    description: str  # what it shows, in a few words
    parts: tuple[str, ...] = ()  # functions of its module in addition to `payload`
    slow: tuple[
        str, ...
    ] = ()  # the parts (or "payload") that are computed in a process of their own and can be stopped
    kept: tuple[str, ...] = ()  # the slow parts whose answer to a question is cached as long as the server lives


VIEWS = (
    View("plan", "Plan", "a layout's memory, time and traffic", parts=("search", "why"), slow=("search", "why")),
    View("mesh", "Mesh", "every rank, what it has and whom it talks to", parts=("rank", "ranks"), slow=("ranks",)),
    View("schedule", "Schedule", "who computes what when", parts=("every", "made"), slow=("every", "made")),
    View("run", "Run", "training runs, live", parts=("tail", "trace"), slow=("trace",)),
    View(
        "accuracy", "Accuracy", "predicted against measured step times", parts=("rows",), slow=("rows",), kept=("rows",)
    ),
)
NAMED = {view.name: view for view in VIEWS}


class Nothing(UserError):
    """There is no such view or part."""


def view_of(name: str, part: str = "") -> View:
    if name not in NAMED:
        raise Nothing(f"there is no view {name[:40]!r}; {did_you_mean(name[:40], list(NAMED))}", "page.view")
    if part and part not in NAMED[name].parts:
        raise Nothing(f"{name} has no part {part[:40]!r}; it has {', '.join(NAMED[name].parts) or 'none'}", "page.view")
    return NAMED[name]


def heavy(name: str, part: str, ask: Ask) -> bool:
    """Whether `heavy` of the view's module says that this payload takes long: then a process of its own computes it."""
    is_heavy = getattr(importlib.import_module(f"fivefold.web.{name}"), "heavy", None)
    return not part and is_heavy is not None and is_heavy(ask)


def answer(name: str, part: str, ask: Ask) -> Any:
    """A view's payload, or a part of it."""
    view_of(name, part)
    return getattr(importlib.import_module(f"fivefold.web.{name}"), part or "payload")(ask)
