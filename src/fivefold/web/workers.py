"""The server's side of `worker.py`: at most a few processes, and a newer question of a page replaces its older one.

workers = Workers(runs)
await workers.ask("page 1", WorkerQuestion("plan", "search", {...}))  # bytes of JSON; Replaced where a newer one came
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import UserError
from fivefold.web.worker import WorkerQuestion

MOST = 2  # processes at a time: each takes a core
LIMIT = 120.0  # seconds of an answer
SOON = 1.0  # seconds, about what a new process takes to import the planner
LONGEST = 1 << 26  # bytes of one


class Replaced(Exception):
    """A newer question took this one's place."""


class Broken(Exception):
    """A bug: what the worker said of it."""


class Reply(msgspec.Struct):
    answer: msgspec.Raw = msgspec.Raw()  # empty: there is none
    problems: list[str] | None = None
    trace: str = ""


class Workers:
    def __init__(self, runs: tuple[Path, ...] = ()):
        self.runs = runs
        self.idle: list[Process] = []
        self.asked: dict[str, asyncio.Task[bytes]] = {}  # by lane
        self.room = asyncio.Semaphore(MOST)
        self.leaving: set[asyncio.Task[None]] = set()

    async def ask(self, lane: str, question: WorkerQuestion) -> bytes:
        """The answer as JSON. A lane is a page's use of one part: it has one question at a time, the newest."""
        if (older := self.asked.get(lane)) is not None:
            older.cancel()
        task = self.asked[lane] = asyncio.create_task(self._answer(question))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.asked.get(lane) is not task:
                raise Replaced from None
            task.cancel()  # the page has gone
            raise
        finally:
            if self.asked.get(lane) is task:
                del self.asked[lane]

    async def _answer(self, question: WorkerQuestion) -> bytes:
        await self.room.acquire()
        process = None
        try:
            process = self.idle.pop() if self.idle else await self._start()
            line = await asyncio.wait_for(_exchange(process, question), LIMIT)
        except asyncio.CancelledError:
            self._leave(process)
            raise
        except BaseException as error:
            self._free(process, ended=True)
            if isinstance(error, TimeoutError):
                what = f"{question.view} {question.part}".strip()
                raise UserError(f"{what} takes longer than {LIMIT:.0f} s; ask for less") from None
            raise
        self._free(process)
        reply = msgspec.json.decode(line, type=Reply)
        if not bytes(reply.answer):
            raise UserError(reply.problems) if reply.problems else Broken(reply.trace)
        return bytes(reply.answer)

    def _free(self, process: Process | None, ended: bool = False) -> None:
        """Make room for another question: with an idle process, or without one that is ended."""
        self.room.release()
        if process is not None and ended:
            self._later(_end(process))
        elif process is not None:
            self.idle.append(process)

    def _leave(self, process: Process | None) -> None:
        """Nobody wants the answer any more. A process that has it soon is cheaper than a new one; others are ended."""

        async def last_words() -> None:
            line = b""
            if process is not None and process.stdout is not None:
                with contextlib.suppress(TimeoutError):
                    line = await asyncio.wait_for(process.stdout.readline(), SOON)
            self._free(process, ended=not line)

        self._later(last_words())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)

    async def warm(self) -> None:
        """Have a process before the first question."""
        self.idle.append(await self._start())

    async def _start(self) -> Process:
        command = (sys.executable, "-m", "fivefold.web.worker", *map(str, self.runs))
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LONGEST)

    async def close(self) -> None:
        for task in self.asked.values():
            task.cancel()
        await asyncio.gather(*self.asked.values(), return_exceptions=True)
        while self.leaving:  # which may leave something themselves
            await asyncio.gather(*self.leaving, return_exceptions=True)
        await asyncio.gather(*map(_end, self.idle))
        self.idle.clear()


async def _exchange(process: Process, question: WorkerQuestion) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(question) + b"\n")
    await process.stdin.drain()
    if not (line := await process.stdout.readline()):
        raise Broken("a worker ended without an answer")
    return line


async def _end(process: Process) -> None:
    """Kill it, and wait until its pipes are closed as well: a loop that ends before has a transport left."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.communicate()
