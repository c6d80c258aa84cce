"""`fivefold ui`: serve the page on this machine until it is stopped.

ui(port=0, runs=["runs/demo"], browser=False)
"""

import contextlib
import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from fivefold.support.errors import UserError, not_installed
from fivefold.support.parsing import path_of
from fivefold.support.ranges import check_range, within

LOOPBACK = "127.0.0.1"
SHUTDOWN_GRACE_S = 2  # for answers that are being computed
INSTALL_MESSAGE = 'this needs starlette and uvicorn: pip install "fivefold[ui]"'


def ui(
    port: int = 0,
    runs: Sequence[str | Path] = (),
    *,
    browser: bool = True,
    say: Callable[[str], object] = print,
) -> None:
    """Serve the page until interrupted. `port` 0 takes a free one; `runs` are the directories that may be read. With
    `browser`, the system's browser opens the page. `say` is called with its address: `ff.ui(port=8000, runs=["runs"])`.
    """
    check_range("port", port, within(0, 65535))
    folders = tuple(_directory(run) for run in runs)
    if not_installed("starlette") or not_installed("uvicorn"):
        raise UserError(INSTALL_MESSAGE, "install.ui")
    import uvicorn

    from fivefold.web.server import application

    token = secrets.token_urlsafe(32)
    with listen(port) as listening:
        port = listening.getsockname()[1]
        address = f"http://{LOOPBACK}:{port}/#token={token}"
        say(f"open {address}\nonly this machine can; stop with Ctrl-C")
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            application(token, port, folders), log_level="warning", access_log=False, server_header=False, ws="none",
            proxy_headers=False, http="h11", timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(worth_saying)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after it has closed everything
            uvicorn.Server(config).run(sockets=[listening])


def worth_saying(record: logging.LogRecord) -> bool:
    """Drop uvicorn's error about answers that are cut off at shutdown: nobody waits for them."""
    return "timeout graceful shutdown exceeded" not in str(record.msg)


def _directory(run: str | Path) -> Path:
    path = path_of(run)
    if not path.is_dir():
        raise UserError(f"--runs {run} is not a directory; give a run, or a directory with runs in it", "run.missing")
    return path.resolve()


def listen(port: int) -> socket.socket:
    """A socket that listens on the loopback interface only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} is not available: {error.strerror}; --port 0 takes a free one", "page.port"
        ) from None
    return listener
