"""Who may ask: this machine's own browser, with the token of the address that the terminal printed.

Every request must name this server as its Host, which a page of another name that resolves to this machine (DNS
rebinding) cannot. What is computed or read from disk needs the token in a header, which pages of other origins cannot
send without being asked first, and nobody answers that. The token travels behind the # of the address: a browser sends
that part to no server. A cookie would be sent to every other port of this machine, too.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
        found = {name: [value for key, value in scope["headers"] if key == name] for name in (b"host", b"origin")}
        if len(found[b"host"]) != 1 or found[b"host"][0] not in self.hosts:
            return 403, "this server answers to its own address only"
        if any(origin not in {b"http://" + host for host in self.hosts} for origin in found[b"origin"]):
            return 403, "pages of other origins may not ask here"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server only shows; it takes GET and HEAD"
        if scope["path"].startswith("/api"):
            given = [value for key, value in scope["headers"] if key == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self.bearer):
                return 401, "the token is missing or another one; open the address that `fivefold ui` printed"
        return None


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = b'{"error":"' + sentence.encode() + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
