"""`fivefold ui`: serve the page on this machine until it is stopped.

ui(port=0, runs=["runs/demo"], browser=False)
"""

import contextlib
import importlib
import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.support.errors import UserError, absent
from fivefold.support.parsing import path_of
from fivefold.support.ranges import checked, within
from fivefold.support.text import did_you_mean
from fivefold.web.question import Ask

LOOPBACK = "127.0.0.1"
GRACE = 2  # seconds that answers have when the server is told to stop
NEEDS = 'this needs starlette and uvicorn: pip install "fivefold[ui]"'


def ui(
    port: int = 0,
    runs: Sequence[str | Path] = (),
    browser: bool = True,
    say: Callable[[str], object] = print,
) -> None:
    """Serve the page until interrupted. `port` 0 takes a free one; `runs` are the directories that may be read. With
    `browser`, the system's browser opens the page. `say` is called with its address.

    >>> ff.ui(port=8000, runs=["runs"])  # doctest: +SKIP
    """
    checked("port", port, within(0, 65535))
    folders = tuple(_directory(run) for run in runs)
    if absent("starlette") or absent("uvicorn"):
        raise UserError(NEEDS)
    import uvicorn

    from fivefold.web.server import application

    token = secrets.token_urlsafe(32)
    with bound(port) as listening:
        port = listening.getsockname()[1]
        address = f"http://{LOOPBACK}:{port}/#token={token}"
        say(f"open {address}\nonly this machine can; stop with Ctrl-C")
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            application(token, port, folders), log_level="warning", access_log=False, server_header=False, ws="none",
            proxy_headers=False, http="h11", timeout_graceful_shutdown=GRACE,
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(worth_saying)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after it has closed everything
            uvicorn.Server(config).run(sockets=[listening])


def worth_saying(record: logging.LogRecord) -> bool:
    """A filter that drops uvicorn's error about answers that are cut off at shutdown: nobody waits for them."""
    return "timeout graceful shutdown exceeded" not in str(record.msg)


def _directory(run: str | Path) -> Path:
    path = path_of(run)
    if not path.is_dir():
        raise UserError(f"--runs {run} is not a directory; give a run's, or one that has runs in it")
    return path.resolve()


def bound(port: int) -> socket.socket:
    """A socket that listens on the loopback interface alone."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} is not available: {error.strerror}; --port 0 takes a free one") from None
    return listener


# ---- views ----------------------------------------------------------------------------------------------------------
# The views of the page: each a module `NAME.py` here and `static/views/NAME.js` there.
#
# answer("plan", "", Ask({"model": "llama3-8b"}))          # the view's payload, all that its page draws
# answer("plan", "search", Ask({"model": "llama3-8b"}))    # a part that takes longer, and comes later
#
# A payload is plain data: the server sends it, and an HTML report has it inline. A view's module imports neither the
# server nor torch.


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
        raise Nothing(f"there is no view {name[:40]!r}; {did_you_mean(name[:40], list(NAMED))}")
    if part and part not in NAMED[name].parts:
        raise Nothing(f"{name} has no part {part[:40]!r}; it has {', '.join(NAMED[name].parts) or 'none'}")
    return NAMED[name]


def heavy(name: str, part: str, ask: Ask) -> bool:
    """Whether `heavy` of the view's module says that this payload takes long: then a process of its own computes it."""
    is_heavy = getattr(importlib.import_module(f"fivefold.web.{name}"), "heavy", None)
    return not part and is_heavy is not None and is_heavy(ask)


def answer(name: str, part: str, ask: Ask) -> Any:
    """A view's payload, or a part of it."""
    view_of(name, part)
    return getattr(importlib.import_module(f"fivefold.web.{name}"), part or "payload")(ask)
