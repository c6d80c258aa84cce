"""The server: the page's files, and `/api/VIEW[/PART]?words`, which call the functions of `views`.

Bad questions are 400 with their sentences; a bug is 500, without a trace for the page and with one in the terminal.
"""

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fivefold import __version__
from fivefold.support.errors import UserError
from fivefold.ui.ask import Ask, for_page
from fivefold.ui.guard import App, Guard
from fivefold.ui.threads import Busy, in_thread
from fivefold.ui.views import VIEWS, Nothing, answer, heavy, view_of
from fivefold.ui.worker import Question
from fivefold.ui.workers import Broken, Replaced, Workers

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
            found = None if _slow(view, part) else await in_thread(_quickly, view, part, Ask(words, runs))
            if found is None:
                lane = f"{request.headers.get(PAGE, '')[:64]} {view} {part}"
                question = Question(view, part, words)
                found = kept.get(key := msgspec.json.encode(question))
                if found is None:
                    found = await _while_there(request, workers.ask(lane, question))
                    kept.update({key: found} if part in view_of(view).kept else {})
            return _json(found)
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
            return _error(500, ["this went wrong inside; the terminal that runs `fivefold ui` says what"])

    routes = [
        Route("/api", _listing),
        Route("/api/{view}", api),
        Route("/api/{view}/{part}", api),
        Route("/{path:path}", _file),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port)


async def _while_there(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """The answer; where the page is closed, reloaded or gives up before it comes, its work is stopped."""
    asked, gone = asyncio.create_task(answer), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise Gone
        return asked.result()
    finally:
        asked.cancel()
        gone.cancel()
        await asyncio.gather(asked, gone, return_exceptions=True)


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
    views = [{"name": view.name, "title": view.title, "says": view.says} for view in VIEWS]
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
