"""The server's side of `worker.py`: at most a few processes, and a page's newer question replaces its older one.

workers = Workers(runs)
await workers.ask("page 1", WorkerQuestion("plan", "search", {...}))  # JSON; raises Replaced if a newer one came
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import Problem, UserError
from fivefold.web.worker import WorkerQuestion

MAX_WORKERS = 2  # at a time: each takes a core
ANSWER_TIMEOUT_S = 120.0
REUSE_TIMEOUT_S = 1.0  # about as long as a new process takes to import the planner
MAX_ANSWER_BYTES = 1 << 26


class Replaced(Exception):
    """A newer question took this one's place."""


class WorkerFailed(Exception):
    """A bug, with the worker's traceback."""


class Reply(msgspec.Struct):
    answer: msgspec.Raw = msgspec.Raw()  # empty if there is none
    problems: list[str] | None = None
    codes: list[str] = []
    trace: str = ""


class Workers:
    def __init__(self, runs: tuple[Path, ...] = ()):
        self.runs = runs
        self.idle: list[Process] = []
        self.asked: dict[str, asyncio.Task[bytes]] = {}  # by replaces_key
        self.free_slots = asyncio.Semaphore(MAX_WORKERS)
        self.background: set[asyncio.Task[None]] = set()

    async def ask(self, replaces_key: str, question: WorkerQuestion) -> bytes:
        """The answer as JSON. Of the questions with one key, a page's use of one part, only the newest is answered."""
        if (older := self.asked.get(replaces_key)) is not None:
            older.cancel()
        task = self.asked[replaces_key] = asyncio.create_task(self._answer(question))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.asked.get(replaces_key) is not task:
                raise Replaced from None
            task.cancel()  # the page disconnected
            raise
        finally:
            if self.asked.get(replaces_key) is task:
                del self.asked[replaces_key]

    async def _answer(self, question: WorkerQuestion) -> bytes:
        await self.free_slots.acquire()
        process = None
        try:
            process = self.idle.pop() if self.idle else await self._start()
            line = await asyncio.wait_for(_exchange(process, question), ANSWER_TIMEOUT_S)
        except asyncio.CancelledError:
            self._abandon(process)
            raise
        except BaseException as error:
            self._free(process, ended=True)
            if isinstance(error, TimeoutError):
                what = f"{question.view} {question.part}".strip()
                raise UserError(
                    f"{what} takes longer than {ANSWER_TIMEOUT_S:.0f} s; ask for less", "page.time"
                ) from None
            raise
        self._free(process)
        reply = msgspec.json.decode(line, type=Reply)
        if not bytes(reply.answer):
            raise UserError(map(Problem, reply.codes, reply.problems)) if reply.problems else WorkerFailed(reply.trace)
        return bytes(reply.answer)

    def _free(self, process: Process | None, *, ended: bool = False) -> None:
        """Free a slot for another question. The process becomes idle, or is killed if it has `ended`."""
        self.free_slots.release()
        if process is not None and ended:
            self._in_background(_end(process))
        elif process is not None:
            self.idle.append(process)

    def _abandon(self, process: Process | None) -> None:
        """Free the slot of a process whose answer is no longer wanted. If it answers soon it is kept, as a new process
        would take as long to start; else it is killed."""

        async def keep_or_kill() -> None:
            line = b""
            if process is not None and process.stdout is not None:
                with contextlib.suppress(TimeoutError):
                    line = await asyncio.wait_for(process.stdout.readline(), REUSE_TIMEOUT_S)
            self._free(process, ended=not line)

        self._in_background(keep_or_kill())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def warm(self) -> None:
        """Start a process before the first question."""
        self.idle.append(await self._start())

    async def _start(self) -> Process:
        command = (sys.executable, "-m", "fivefold.web.worker", *map(str, self.runs))
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=MAX_ANSWER_BYTES)

    async def close(self) -> None:
        for task in self.asked.values():
            task.cancel()
        await asyncio.gather(*self.asked.values(), return_exceptions=True)
        while self.background:  # a task may start another one
            await asyncio.gather(*self.background, return_exceptions=True)
        await asyncio.gather(*map(_end, self.idle))
        self.idle.clear()


async def _exchange(process: Process, question: WorkerQuestion) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(question) + b"\n")
    await process.stdin.drain()
    if not (line := await process.stdout.readline()):
        raise WorkerFailed("a worker ended without an answer")
    return line


async def _end(process: Process) -> None:
    """Kill a process and wait until its pipes are closed: an event loop that ends earlier leaves a transport open."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.communicate()
