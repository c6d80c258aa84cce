"""Who may ask the page's server, what it answers, and what it never does."""

import asyncio
import inspect
import json
import logging
import socket
import threading
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from fivefold.support.errors import UserError
from fivefold.web import app as ui_module
from fivefold.web import server as serving_module
from fivefold.web import workers as workers_module
from fivefold.web.app import LOOPBACK, listen, ui, worth_saying
from fivefold.web.plan import search
from fivefold.web.question import Ask
from fivefold.web.server import FILES, STATIC, TooSlow, in_thread
from fivefold.web.views import VIEWS, answer
from fivefold.web.worker import WorkerQuestion
from fivefold.web.workers import MAX_WORKERS, Replaced, WorkerFailed, Workers
from tests.web.serving import TOKEN, Server, serving

CUT = "Cancel %s running task(s), timeout graceful shutdown exceeded"
TINY = {"model": "tiny", "cluster": "2xCPU", "batch": "8", "seq": "64"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def test_the_page_and_its_files_are_served(server: Server) -> None:
    page = server.get("/", token=None)
    assert page.status == 200
    assert b'src="app.js"' in page.body
    assert page.headers["content-type"].startswith("text/html")
    for name in FILES:
        found = server.get(f"/{name}", token=None)
        assert (found.status, found.body) == (200, (STATIC / name).read_bytes()), name
    assert set(FILES) == {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}


def test_every_view_has_its_two_modules(server: Server) -> None:
    listed = server.get("/api").json["views"]
    assert [view["name"] for view in listed] == [view.name for view in VIEWS]
    for view in VIEWS:
        assert f"views/{view.name}.js" in FILES
        assert set(view.in_worker) <= {*view.parts, "payload"}


def test_headers_forbid_what_the_page_does_not_need(server: Server) -> None:
    for path in ("/", "/api", "/nothing", "/api/nothing"):
        headers = server.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{}", "127.0.0.1", "localhost:1", "127.0.0.1:{}.evil", "none"]
)
@pytest.mark.parametrize("path", ["/", "/api", "/api/plan"])
def test_a_forged_host_is_refused(server: Server, host: str, path: str) -> None:
    assert server.get(path, host=host.format(server.port)).status in (400, 403)  # 400: HTTP itself wants one


def test_localhost_is_a_name_of_this_machine(server: Server) -> None:
    assert server.get("/api", host=f"localhost:{server.port}").status == 200


@pytest.mark.parametrize("token", [None, "", "foreign", TOKEN[:-1], TOKEN + "x", "ü"])
@pytest.mark.parametrize("path", ["/api", "/api/plan", "/api/plan/search", "/api/nothing"])
def test_a_missing_or_foreign_token_is_refused(server: Server, token: str | None, path: str) -> None:
    found = server.get(path, token=token if token is None else token.encode().decode("latin-1"))
    assert found.status == 401
    assert set(found.json) == {"error"}


def test_the_token_counts_nowhere_but_in_its_header(server: Server) -> None:
    assert server.get(f"/api?token={TOKEN}", token=None).status == 401
    assert server.get("/api", token=None, Cookie=f"token={TOKEN}").status == 401


def test_pages_of_other_origins_are_refused(server: Server) -> None:
    assert server.get("/api", Origin="http://evil.example").status == 403
    assert server.get("/api", Origin=f"http://{LOOPBACK}:{server.port + 1}").status == 403
    assert server.get("/api", Origin=f"http://{LOOPBACK}:{server.port}").status == 200
    assert server.get("/api", Origin="null").status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert server.get("/api/plan", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/lib/../../server.py", "/%2e%2e/server.py", "/lib/%2e%2e%2f%2e%2e%2fserver.py", "//etc/passwd",
     "/..%5cserver.py", "/lib", "/lib/", "/index.html%00", "/api/../server.py", "/file:///etc/passwd"],
)  # fmt: skip
def test_no_address_leads_out_of_the_page(server: Server, path: str) -> None:
    found = server.get(path)
    assert found.status == 404
    assert b"starlette" not in found.body


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "/etc/passwd"}, "unknown model"),
        ({"model": "../job.toml"}, "unknown model"),
        ({"cluster": "8x/etc/x.toml"}, "is a file"),
        ({"cluster": "2x8xmine.TOML"}, "is a file"),
        ({"cluster": "x8xH100"}, "no number of nodes before its first x; nearest: 1x8xH100"),
        ({"layout": "dp=2,schedule=/etc/passwd"}, "unknown schedule"),
        ({"layout": "dp=2, schedule = x.json"}, "unknown schedule"),
        ({"layout": "dp=2", "move": "schedule=x.json"}, "unknown schedule"),
        ({"batch": "9" * 5000}, "not a whole number"),
        ({"batch": "-1"}, "not a whole number"),
        ({"seq": "0"}, "at least 1"),
        ({"precision": "int3"}, "unknown precision"),
        ({"software": "x"}, "unknown software"),
        ({"layout": "dp=two"}, "not a whole number"),
        ({"move": "nothing=3"}, "not a layout setting"),
        ({"mdoel": "tiny"}, "did you mean 'model'?"),
        ({"layout": f"tp={10**22}"}, "is more than 10000000"),
        ({"layout": "dp=10000000,tp=10000000"}, "ranks, but at most 1000000000 are allowed"),
        ({"layout": "dp=2,split=" + "1," * 1000 + "1"}, "characters, but the page reads at most 2000"),
        ({"layout": "dp=0"}, "layout.dp=0 must be at least 1"),
        ({"layout": "dp=2", "move": "microbatches=0"}, "layout.microbatches=0 must be at least 1"),
        ({"layout": "dp=2", "move": f"pp={10**22}"}, "is more than 10000000"),
        ({"batch": "1000000000"}, "batch=1000000000 is more than"),
        ({"batch": "1000000", "seq": "65536"}, "tokens in a step"),
        ({"cluster": "1000000xCPU"}, "at most 131072"),
    ],
)
def test_a_bad_question_is_a_sentence(server: Server, words: dict[str, str], said: str) -> None:
    found = server.ask("plan", TINY | words)
    assert found.status == 400
    assert said in found.json["error"]
    assert "Traceback" not in found.body.decode()


@pytest.mark.parametrize("layout", ["dp=0", f"tp={10**22}"])
def test_the_mesh_has_the_same_ranges(server: Server, layout: str) -> None:
    assert server.ask("mesh", TINY | {"layout": layout}).status == 400


def test_what_never_ends_is_left_and_does_not_hold_the_server() -> None:
    ends = threading.Event()

    async def asked() -> None:
        with pytest.raises(TooSlow, match="takes longer than"):
            await in_thread(ends.wait, timeout=0.05)
        assert await in_thread(int, "3") == 3
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread(int, "three")

    asyncio.run(asked())
    left = [thread for thread in threading.enumerate() if thread.name.endswith("(work)")]
    assert left  # the one that waits, and perhaps one that is about to end
    assert all(thread.daemon for thread in left)
    ends.set()


def test_a_word_given_twice_is_refused(server: Server) -> None:
    assert "twice" in server.get("/api/plan?model=tiny&model=small").json["error"]


def test_unknown_views_and_parts_are_404(server: Server) -> None:
    assert server.ask("plam").json["error"] == "there is no view 'plam'; did you mean 'plan'?"
    assert server.ask("plam").status == server.ask("plan/_case").status == server.ask("plan/payload").status == 404


def test_a_bug_has_its_trace_in_the_terminal_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(serving_module, "answer", broken)
    found = server.ask("plan", TINY)
    assert found.status == 500
    assert b"secret" not in found.body
    assert "a secret of the inside" in capfd.readouterr().err


def test_what_takes_longer_is_answered_by_a_process_of_its_own(server: Server) -> None:
    found = server.ask("plan/search", TINY)
    assert found.status == 200
    assert found.json == json.loads(json.dumps(search(Ask(TINY))))
    wrong = server.ask("plan/search", TINY | {"batch": "0"})
    assert (wrong.status, wrong.json["error"]) == (400, "batch=0 must be at least 1")


def test_a_large_payload_is_answered_by_a_process_as_well(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"schedule": "1f1b", "pp": "17", "microbatches": "1"}
    expected = json.loads(json.dumps(answer("schedule", "", Ask(words))))
    monkeypatch.setattr(serving_module, "answer", lambda *_: pytest.fail("computed in the server"))
    assert server.ask("schedule", words).json == expected


def test_a_newer_question_of_a_page_replaces_its_older_one() -> None:
    """Of the same page and part alone; the processes are gone at the end."""
    long = WorkerQuestion("plan", "search", {"model": "llama3-405b", "cluster": "2048x8xH100", "batch": "2048"})

    async def asked() -> None:
        workers = Workers()
        first = asyncio.create_task(workers.ask("a page", long))
        await asyncio.sleep(0)
        other, newer = await asyncio.gather(
            *(workers.ask(lane, WorkerQuestion("plan", "", TINY)) for lane in ("other", "a page"))
        )
        assert other == newer
        with pytest.raises(Replaced):
            await first
        processes = [*workers.idle]
        await workers.close()
        assert processes
        assert all(process.returncode is not None for process in processes)

    asyncio.run(asked())


def test_the_work_of_pages_that_have_gone_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are processes, each with a question that never ends; then another page asks."""
    exchange, never, begun = workers_module._exchange, {"model": "llama3-405b"}, threading.Semaphore(0)

    async def endless(process: Process, question: WorkerQuestion) -> bytes:
        if question.query != never:
            return await exchange(process, question)
        begun.release()
        return await asyncio.Future()

    monkeypatch.setattr(workers_module, "_exchange", endless)
    with serving() as server:
        for view in ("plan/search", "plan/why"):
            pages = [server.leaving(view, never) for _ in range(MAX_WORKERS + 1)]
            assert all(begun.acquire(timeout=60) for _ in range(MAX_WORKERS))
            for page in pages:
                page.close()
            assert server.ask("plan/search", TINY).status == 200


def test_a_worker_that_dies_is_a_bug_and_the_next_question_is_answered() -> None:
    async def asked() -> None:
        workers = Workers()
        await workers.warm()
        workers.idle[0].kill()
        with pytest.raises((WorkerFailed, ConnectionError)):
            await workers.ask("a page", WorkerQuestion("plan", "", TINY))
        assert json.loads(await workers.ask("a page", WorkerQuestion("plan", "", TINY)))["question"]["model"] == "tiny"
        await workers.close()

    asyncio.run(asked())


def test_only_the_loopback_interface_is_bound() -> None:
    with listen(0) as listening:
        assert listening.family == socket.AF_INET
        assert listening.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UserError, match="--port 0 takes a free one"):
            listen(listening.getsockname()[1])


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_module, "not_installed", lambda name: name == "uvicorn")
    with pytest.raises(UserError, match=r'pip install "fivefold\[ui\]"'):
        ui()


def test_the_address_and_its_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        ui(runs=[tmp_path / "nothing"])
    with pytest.raises(UserError, match="port=70000"):
        ui(port=70_000)


def test_answers_that_nobody_waits_for_any_more_are_no_error_in_the_terminal() -> None:
    said = [logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, text, (3,), None) for text in (CUT, "a bug: %s")]
    assert [record.getMessage() for record in said if worth_saying(record)] == ["a bug: 3"]
    assert CUT in inspect.getsource(uvicorn.server)
