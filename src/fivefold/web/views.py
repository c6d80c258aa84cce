"""The views of the page: each a module `NAME.py` here and `static/views/NAME.js` there.

answer("plan", "", Ask({"model": "llama3-8b"}))          # the view's payload, all that its page draws
answer("plan", "search", Ask({"model": "llama3-8b"}))    # a part that takes longer and comes later

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
    in_worker: tuple[str, ...] = ()  # parts (or "payload") computed in a process of their own, which can be stopped
    cached: tuple[str, ...] = ()  # parts of `in_worker` whose answers are cached as long as the server lives


VIEWS = (
    View("plan", "Plan", "a layout's memory, time and traffic", parts=("search", "why"), in_worker=("search", "why")),
    View("mesh", "Mesh", "every rank, what it has and whom it talks to", parts=("rank", "ranks"), in_worker=("ranks",)),
    View("schedule", "Schedule", "who computes what when", parts=("every", "made"), in_worker=("every", "made")),
    View("run", "Run", "training runs, live", parts=("tail", "trace"), in_worker=("trace",)),
    View(
        "accuracy",
        "Accuracy",
        "predicted against measured step times",
        parts=("rows",),
        in_worker=("rows",),
        cached=("rows",),
    ),
)
BY_NAME = {view.name: view for view in VIEWS}


class UnknownView(UserError):
    """There is no such view or part."""


def view_of(name: str, part: str = "") -> View:
    if name not in BY_NAME:
        raise UnknownView(f"there is no view {name[:40]!r}; {did_you_mean(name[:40], list(BY_NAME))}", "page.view")
    if part and part not in BY_NAME[name].parts:
        raise UnknownView(
            f"{name} has no part {part[:40]!r}; it has {', '.join(BY_NAME[name].parts) or 'none'}", "page.view"
        )
    return BY_NAME[name]


def always_in_worker(name: str, part: str) -> bool:
    """Whether a process of its own computes a part, or the payload, whatever is asked."""
    return (part or "payload") in view_of(name, part).in_worker


def is_large(name: str, part: str, ask: Ask) -> bool:
    """Whether `is_large` of the view's module says that this payload takes long: then a worker computes it."""
    module_is_large = getattr(importlib.import_module(f"fivefold.web.{name}"), "is_large", None)
    return not part and module_is_large is not None and module_is_large(ask)


def answer(name: str, part: str, ask: Ask) -> Any:
    """A view's payload, or a part of it."""
    view_of(name, part)
    return getattr(importlib.import_module(f"fivefold.web.{name}"), part or "payload")(ask)
