"""Two halves of a joined pair, of which one runs at any time.

    runner = PairRunner()
    runner.run(forward, backward)       the forward first, here; the backward in a thread of its own
    runner.yield_turn()                 inside of a half, before it waits: the other one runs until it does the same
    with runner.watched(make): ...      inside of a half: around each stretch of it

A half that has ended hands over no more, so the other runs to its end. Who runs when is a function of where the two
hand over, and never of who is quicker: all ranks that run the same pair start their collectives in the same order. No
two threads ever run at once, so nothing needs a lock. The turn belongs to a half, not to a thread: on a GPU autograd
runs a backward pass in a thread of its own.

Why two threads are safe with NCCL, which wants the operations of a device issued in one order: it lets several threads
use a communicator as long as one does at a time, the lock that is handed over sees to that, and no half hands over in
the middle of a group of operations, which torch opens and closes within a call. Both halves, and autograd's thread,
work on the one stream of the run: the order in which they hand over is the order on the device, and memory that one
frees and the other takes comes from one pool of that stream, in that order. A half hands over before it waits, so the
stream is not held up by a message while the other half computes; and each half waits itself for what it has started.
One thread that takes the parts of both passes in turns would have to cut autograd's graph, recompute and compiled
blocks at each message; here a block is written as if it were alone.

What torch and Python keep for each thread goes along to the second half: dispatch modes, context variables, whether
gradients are recorded, the device and its stream.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from fivefold.launch import heartbeat

Work = Callable[[], None]
Make = Callable[[], AbstractContextManager[None]]


class Abandoned(BaseException):
    """Raised in a half whose other half has failed: nobody needs what it computes. It is no error of its own."""


class _Half:
    def __init__(self) -> None:
        self.turn = threading.Lock()  # held; who waits for this half's turn waits to acquire it
        self.turn.acquire()
        self.over = False
        self.make: Make | None = None
        self.watching = ExitStack()

    def resume(self) -> None:
        heartbeat.here()
        if self.make is not None:
            self.watching.enter_context(self.make())


class PairRunner:
    def __init__(self) -> None:
        self.halves: tuple[_Half, _Half] | None = None  # while a pair runs
        self.holder = 0
        self.failure: BaseException | None = None
        self.work: Work | None = None  # of the second half
        self.wake = threading.Semaphore(0)
        self.thread: threading.Thread | None = None

    def run(self, first: Work, second: Work) -> None:
        """Both, to their ends. What one of them raises is raised here; the other is left where it is, and unwound."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="backward half", daemon=True)
            self.thread.start()
        self.halves, self.holder, self.failure, self.work = (_Half(), _Half()), 0, None, _as_here(second)
        try:
            first()
        except Abandoned:
            pass
        except BaseException as error:
            self.failure = self.failure or error
            if self.holder != 0:  # it came from outside, a signal: the other half may wait for long
                raise
        mine, other = self.halves
        mine.over = True
        if not other.over:
            self._give(1)
            mine.turn.acquire()
        self.halves, failure = None, self.failure
        heartbeat.here()
        if failure is not None:
            raise failure

    def yield_turn(self) -> None:
        """Let the other half run, until it is this one's turn again. Outside of pairs this does nothing."""
        if self.halves is None:
            return
        mine, other = self.halves[self.holder], self.halves[1 - self.holder]
        if not other.over:
            number = self.holder
            mine.watching.close()
            self._give(1 - number)
            mine.turn.acquire()
            if self.failure is not None:
                raise Abandoned
            mine.resume()
            heartbeat.beat()

    @contextmanager
    def watched(self, make: Make) -> Iterator[None]:
        """`make` makes a context for each stretch in which the half that enters this runs."""
        assert self.halves is not None
        mine = self.halves[self.holder]
        mine.make = make
        with mine.watching:
            mine.resume()
            try:
                yield
            finally:
                mine.make = None

    def _give(self, number: int) -> None:
        assert self.halves is not None
        self.holder = number
        if number == 1 and self.work is not None:
            self.wake.release()  # it has not begun
        else:
            self.halves[number].turn.release()

    def _serve(self) -> None:
        """The second thread: the second half of one pair after the other."""
        while True:
            self.wake.acquire()
            assert self.halves is not None
            (first, mine), work, self.work = self.halves, self.work, None
            try:
                if self.failure is None and work is not None:
                    work()
            except Abandoned:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            mine.over = True
            self.holder = 0
            first.turn.release()
            del first, mine, work


def _as_here(work: Work) -> Work:
    """The same work for another thread, with what torch and Python know of this one."""
    modes, context, recorded = _get_current_dispatch_mode_stack(), contextvars.copy_context(), torch.is_grad_enabled()
    threads = torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_num_threads(threads)
        with ExitStack() as around:
            if stream is not None:
                around.enter_context(torch.cuda.stream(stream))  # and its device
            around.enter_context(torch.set_grad_enabled(recorded))
            for mode in modes:
                _push_mode(mode)
                around.callback(_pop_mode, getattr(mode, "_mode_key", None))
            context.run(work)

    return run
