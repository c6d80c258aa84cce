"""A server of `fivefold ui` in a thread, asked by plain HTTP."""

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import uvicorn

from fivefold.web.app import LOOPBACK, listen
from fivefold.web.server import application

TOKEN = "a-token-of-this-test"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server(NamedTuple):
    port: int

    def get(
        self, path: str, *, token: str | None = TOKEN, host: str = "", method: str = "GET", **headers: str
    ) -> Answer:
        """What a request is answered; the path is sent as it is."""
        connection = self._sent(path, token=token, host=host, method=method, **headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    def _sent(self, path: str, *, token: str | None, host: str, method: str, **headers: str) -> HTTPConnection:
        connection = HTTPConnection(LOOPBACK, self.port, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        if host != "none":
            connection.putheader("Host", host or f"{LOOPBACK}:{self.port}")
        if token is not None:
            connection.putheader("Authorization", f"Bearer {token}")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        return connection

    def ask(self, path: str, words: dict[str, str] | None = None, **more: Any) -> Answer:
        return self.get(f"/api/{path}?{urlencode(words or {})}", **more)

    def leaving(self, path: str, words: dict[str, str]) -> HTTPConnection:
        """A question whose answer is not waited for: close it to go."""
        page = {"X_Page": secrets.token_hex(12)}
        return self._sent(f"/api/{path}?{urlencode(words)}", token=TOKEN, host="", method="GET", **page)


@contextmanager
def serving(runs: tuple[Path, ...] = ()) -> Iterator[Server]:
    with listen(0) as listening:
        port = listening.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(application(TOKEN, port, runs), log_level="error", ws="none", http="h11")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield Server(port)
        finally:
            server.should_exit = True
            thread.join(60)
