"""The server: the page's files, and `/api/VIEW[/PART]?QUERY`, which calls the functions of the views (`views.answer`).

A bad question is answered with status 400 and its problems; a bug with 500, and a traceback in the terminal alone.
"""

import asyncio
import contextlib
import hmac
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fivefold.support.errors import UserError
from fivefold.version import __version__
from fivefold.web.question import Ask, without_option_dashes
from fivefold.web.views import VIEWS, UnknownView, always_in_worker, answer, is_large, view_of
from fivefold.web.worker import WorkerQuestion
from fivefold.web.workers import Replaced, WorkerFailed, Workers

# ---- guard ----------------------------------------------------------------------------------------------------------
# Only a browser on this machine that holds the token of the printed address gets an answer.
#
# Every request must name this server as its Host, which a page of another name that resolves to this machine (DNS
# rebinding) cannot. What is computed or read from disk needs the token in a header. Pages of other origins cannot send
# such a header without a CORS preflight, which this server refuses. The token is in the URL fragment, behind the #,
# which a browser sends to no server. It is not in a cookie, which would be sent to every other port of this machine.


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_ENCODED_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """ASGI middleware: refuses a request, or passes it on and adds headers to the answer."""

    def __init__(self, app: App, token: str, port: int):
        self.app = app
        self.bearer = f"Bearer {token}".encode()
        self.hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_ENCODED_HEADERS]
            await send(message)

        if scope["type"] == "http":
            if refusal := self.refusal(scope):
                await _refuse(send_with_headers, *refusal)
            else:
                await self.app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """A status and a sentence; None if the request may pass."""
        headers = {name: [value for key, value in scope["headers"] if key == name] for name in (b"host", b"origin")}
        if len(headers[b"host"]) != 1 or headers[b"host"][0] not in self.hosts:
            return 403, "wrong Host header: this server answers to its own address only"
        if any(origin not in {b"http://" + host for host in self.hosts} for origin in headers[b"origin"]):
            return 403, "cross-origin requests are refused"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server is read-only: it takes GET and HEAD"
        if scope["path"].startswith("/api"):
            credentials = [value for key, value in scope["headers"] if key == b"authorization"]
            if len(credentials) != 1 or not hmac.compare_digest(credentials[0], self.bearer):
                return 401, "the token is missing or wrong; open the address that `fivefold ui` printed"
        return None


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = msgspec.json.encode({"error": sentence})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---- threads --------------------------------------------------------------------------------------------------------
# Runs a function in a daemon thread, so that shutdown does not wait for it.
#
# await in_thread(answer, "plan", "", ask)


ANSWER_TIMEOUT_S = 60.0
MAX_THREADS = 16


class Busy(Exception):
    """All threads are at work."""


class TooSlow(Exception):
    """The answer takes longer than the timeout."""


_thread_slots = threading.BoundedSemaphore(MAX_THREADS)


async def in_thread(function: Callable[..., Any], *args: Any, timeout: float = ANSWER_TIMEOUT_S) -> Any:
    """Returns what the function returns, or raises what it raises. A thread cannot be stopped: one that takes too long
    is left running."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    if not _thread_slots.acquire(blocking=False):
        raise Busy(f"{MAX_THREADS} answers are being computed; ask again")

    def set_future(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, raised = None, None
        try:
            result = function(*args)
        except Exception as error:
            raised = error
        finally:
            _thread_slots.release()
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(set_future, result, raised)

    threading.Thread(target=work, daemon=True).start()  # Python waits at exit for the threads of a pool
    try:
        return await asyncio.wait_for(future, timeout)
    except TimeoutError:
        raise TooSlow(f"this takes longer than {timeout:.0f} s; ask for less") from None


# ---- server ---------------------------------------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
PAGE_ID_HEADER = "x-page"  # in which a page names itself: its newer question replaces its own older one


class Gone(Exception):
    """The page that asked has closed its connection."""


def application(token: str, port: int, runs: tuple[Path, ...] = ()) -> App:
    """The whole server as an ASGI application."""
    workers = Workers(runs)
    cache: dict[bytes, bytes] = {}  # question -> answer, of the few parts in `View.cached`

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await workers.warm()
        yield
        await workers.close()

    async def api(request: Request) -> Response:
        try:
            return _json(await _answer_to(request, runs, workers, cache))
        except (Exception, asyncio.CancelledError) as error:
            return _error_response(error)

    routes = [
        Route("/api", _listing),
        Route("/api/{view}", api),
        Route("/api/{view}/{part}", api),
        Route("/{path:path}", _file),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port)


async def _answer_to(request: Request, runs: tuple[Path, ...], workers: Workers, cache: dict[bytes, bytes]) -> bytes:
    """The answer as JSON: computed in a thread, in a worker if it takes long, or cached."""
    view, part, query = request.path_params["view"], request.path_params.get("part", ""), _query(request)
    if not always_in_worker(view, part):
        body: bytes | None = await in_thread(_answer_if_small, view, part, Ask(query, runs))
        if body is not None:
            return body
    question = WorkerQuestion(view, part, query)
    key = msgspec.json.encode(question)
    if key in cache:
        return cache[key]
    replaces_key = f"{request.headers.get(PAGE_ID_HEADER, '')[:64]} {view} {part}"
    body = await _while_connected(request, workers.ask(replaces_key, question))
    if part in view_of(view).cached:
        cache[key] = body
    return body


def _answer_if_small(view: str, part: str, ask: Ask) -> bytes | None:
    """The answer as JSON; None if it takes so long that a worker should compute it."""
    return None if is_large(view, part, ask) else msgspec.json.encode(answer(view, part, ask))


async def _while_connected(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Returns the answer. If the page is closed, reloaded or gives up first, the work is stopped and Gone is raised."""
    answering, disconnect = asyncio.create_task(answer), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Gone
        return answering.result()
    finally:
        answering.cancel()
        disconnect.cancel()
        await asyncio.gather(answering, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _listing(request: Request) -> Response:
    """The version and the views, which the page asks for first."""
    views = [{"name": view.name, "title": view.title, "says": view.description} for view in VIEWS]
    return _json(msgspec.json.encode({"version": __version__, "views": views}))


# Address -> file: only the package's own files can be asked for, so that no address leads elsewhere.
FILES = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in MEDIA_TYPES}


async def _file(request: Request) -> Response:
    path = FILES.get(request.path_params["path"] or "index.html")
    if path is None:
        return _error(404, ["there is no such file"])
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])


def _query(request: Request) -> dict[str, str]:
    """The query parameters; one that is given twice is refused."""
    pairs = request.query_params.multi_items()
    query = dict(pairs)
    if len(query) != len(pairs):
        raise UserError("a parameter of the address is given twice", "page.word")
    return query


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error(status: int, problems: list[str], codes: Sequence[str] = ()) -> Response:
    problems = [without_option_dashes(problem) for problem in problems]
    body: dict[str, Any] = {"error": problems[0], "problems": problems, "codes": codes}
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error_response(error: BaseException) -> Response:
    match error:
        case UserError():
            return _error(404 if isinstance(error, UnknownView) else 400, error.problems, error.codes)
        case Busy() | TooSlow():
            return _error(503, [str(error)])
        case asyncio.CancelledError():
            return _error(503, ["the server is shutting down"])
        case Gone():
            return _error(503, ["the page disconnected"])
        case Replaced():
            return _error(409, ["replaced by a newer question"])
    trace = str(error) if isinstance(error, WorkerFailed) else "".join(traceback.format_exception(error))
    print(trace, file=sys.stderr, flush=True)
    return _error(500, ["internal error; see the terminal that runs `fivefold ui`"])
