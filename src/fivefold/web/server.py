"""The server: the page's files, and `/api/VIEW[/PART]?words`, which call the functions of `views`.

Bad questions are 400 with their sentences; a bug is 500, without a trace for the page and with one in the terminal.
"""

import asyncio
import contextlib
import hmac
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
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
from fivefold.web.app import VIEWS, Nothing, answer, heavy, view_of
from fivefold.web.question import Ask, for_page
from fivefold.web.worker import WorkerQuestion
from fivefold.web.workers import Broken, Replaced, Workers

# ---- guard ----------------------------------------------------------------------------------------------------------
# Who may ask: this machine's own browser, with the token of the address that the terminal printed.
#
# Every request must name this server as its Host, which a page of another name that resolves to this machine (DNS
# rebinding) cannot. What is computed or read from disk needs the token in a header, which pages of other origins
# cannot send without being asked first, and nobody answers that. The token travels behind the # of the address: a
# browser sends that part to no server. A cookie would be sent to every other port of this machine, too.


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
_RAW = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application around another: refuses, or passes on and adds headers to the answer."""

    def __init__(self, app: App, token: str, port: int):
        self.app = app
        self.bearer = f"Bearer {token}".encode()
        self.hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_RAW]
            await send(message)

        if scope["type"] == "http":
            if refusal := self.refusal(scope):
                await _refuse(sealed, *refusal)
            else:
                await self.app(scope, receive, sealed)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """A status and a sentence; None where the request may pass."""
        headers = {name: [value for key, value in scope["headers"] if key == name] for name in (b"host", b"origin")}
        if len(headers[b"host"]) != 1 or headers[b"host"][0] not in self.hosts:
            return 403, "this server answers to its own address only"
        if any(origin not in {b"http://" + host for host in self.hosts} for origin in headers[b"origin"]):
            return 403, "pages of other origins may not ask here"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server only shows; it takes GET and HEAD"
        if scope["path"].startswith("/api"):
            given = [value for key, value in scope["headers"] if key == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self.bearer):
                return 401, "the token is missing or wrong; open the address that `fivefold ui` printed"
        return None


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = b'{"error":"' + sentence.encode() + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---- threads --------------------------------------------------------------------------------------------------------
# A function in a thread that nobody has to wait for: a server that is told to stop does.
#
# await in_thread(answer, "plan", "", ask)


LIMIT = 60.0  # seconds of an answer
MOST = 16  # at a time


class Busy(Exception):
    """All threads have work, or this one's takes too long."""


_room = threading.BoundedSemaphore(MOST)


async def in_thread(function: Callable[..., Any], *given: Any, limit: float = LIMIT) -> Any:
    """What the function returns or raises. A thread cannot be ended: one that takes too long is left to itself."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    if not _room.acquire(blocking=False):
        raise Busy(f"{MOST} answers are being computed; ask again")

    def tell(result: Any, error: BaseException | None) -> None:
        if answered.done():
            return
        if error is None:
            answered.set_result(result)
        else:
            answered.set_exception(error)

    def work() -> None:
        result, problem = None, None
        try:
            result = function(*given)
        except Exception as error:
            problem = error
        finally:
            _room.release()
        with contextlib.suppress(RuntimeError):  # the server has gone
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=work, daemon=True).start()  # a pool's threads would be waited for at the end
    try:
        return await asyncio.wait_for(answered, limit)
    except TimeoutError:
        raise Busy(f"this takes longer than {limit:.0f} s; ask for less") from None


# ---- server ---------------------------------------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
PAGE = "x-page"  # the header in which a page names itself: its newer question replaces its own older one


class Gone(Exception):
    """Nobody is there any more to take the answer."""


def application(token: str, port: int, runs: tuple[Path, ...] = ()) -> App:
    """The whole server as an ASGI application."""
    workers = Workers(runs)
    kept: dict[bytes, bytes] = {}  # by questions that had an answer, of which there are few

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await workers.warm()
        yield
        await workers.close()

    async def api(request: Request) -> Response:
        view, part = request.path_params["view"], request.path_params.get("part", "")
        try:
            words = _words(request)
            quick = None if _slow(view, part) else await in_thread(_quickly, view, part, Ask(words, runs))
            if quick is None:
                lane = f"{request.headers.get(PAGE, '')[:64]} {view} {part}"
                question = WorkerQuestion(view, part, words)
                quick = kept.get(key := msgspec.json.encode(question))
                if quick is None:
                    quick = await _while_there(request, workers.ask(lane, question))
                    kept.update({key: quick} if part in view_of(view).kept else {})
            return _json(quick)
        except UserError as error:
            return _error(404 if isinstance(error, Nothing) else 400, error.problems)
        except Busy as error:
            return _error(503, [str(error)])
        except asyncio.CancelledError:  # its time to end has come, and a trace would tell nobody anything
            return _error(503, ["the server stops"])
        except Gone:
            return _error(503, ["the page has gone"])
        except Replaced:
            return _error(409, ["a newer question took this one's place"])
        except Exception as error:
            print(error if isinstance(error, Broken) else traceback.format_exc(), file=sys.stderr, flush=True)
            return _error(500, ["internal error; see the terminal that runs `fivefold ui`"])

    routes = [
        Route("/api", _listing),
        Route("/api/{view}", api),
        Route("/api/{view}/{part}", api),
        Route("/{path:path}", _file),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port)


async def _while_there(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """The answer; where the page is closed, reloaded or gives up before it comes, its work is stopped."""
    answering, gone = asyncio.create_task(answer), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Gone
        return answering.result()
    finally:
        answering.cancel()
        gone.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _slow(view: str, part: str) -> bool:
    return (part or "payload") in view_of(view, part).slow


def _quickly(view: str, part: str, ask: Ask) -> bytes | None:
    """The answer as JSON; None where it takes longer, and a process of its own is to give it."""
    return None if heavy(view, part, ask) else msgspec.json.encode(answer(view, part, ask))


async def _listing(request: Request) -> Response:
    """What the page needs before it shows a view."""
    views = [{"name": view.name, "title": view.title, "says": view.description} for view in VIEWS]
    return _json(msgspec.json.encode({"version": __version__, "views": views}))


# By address: only what lay in the package when this was imported can be asked for, so no address leads elsewhere.
FILES = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in KINDS}


async def _file(request: Request) -> Response:
    path = FILES.get(request.path_params["path"] or "index.html")
    if path is None:
        return _error(404, ["there is no such file"])
    return Response(path.read_bytes(), media_type=KINDS[path.suffix])


def _words(request: Request) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    words = dict(pairs)
    if len(words) != len(pairs):
        raise UserError("a word of the address is given twice")
    return words


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error(status: int, problems: list[str]) -> Response:
    problems = [for_page(problem) for problem in problems]
    body: dict[str, Any] = {"error": problems[0], "problems": problems}
    return Response(msgspec.json.encode(body), status, media_type="application/json")
