"""A function in a thread that nobody has to wait for: a server that is told to stop does.

await in_thread(answer, "plan", "", ask)
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

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
