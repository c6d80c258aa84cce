"""The two halves of an overlapped pair, a forward and a backward pass, of which one runs at any time.

    runner = PairRunner()
    runner.run(forward, backward)               the forward first, here; the backward in a thread of its own
    runner.yield_turn()                         inside of a half, before it waits: the other runs until it does the same
    with runner.watched(make_context): ...      inside of a half: around each stretch of it

A half that has ended yields no more, so the other runs to its end. Who runs when is a function of where the two
yield, and never of who is quicker: all ranks that run the same pair start their collectives in the same order. No
two threads ever run at once, so nothing needs a lock. The turn belongs to a half, not to a thread: on a GPU autograd
runs a backward pass in a thread of its own.

Why two threads are safe with NCCL, which wants the operations of a device issued in one order: it lets several threads
use a communicator as long as one does at a time, the lock that is handed over sees to that, and no half yields in
the middle of a group of operations, which torch opens and closes within a call. Both halves, and autograd's thread,
work on the one stream of the run: the order in which they yield is the order on the device, and memory that one
frees and the other takes comes from one pool of that stream, in that order. A half yields before it waits, so the
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

Pass = Callable[[], None]
MakeContext = Callable[[], AbstractContextManager[None]]


class Abandoned(BaseException):
    """Raised in a half whose other half has failed: nobody needs what it computes. It is no error of its own."""


class _Half:
    def __init__(self) -> None:
        self.turn = threading.Lock()  # held; who waits for this half's turn waits to acquire it
        self.turn.acquire()
        self.over = False
        self.make_context: MakeContext | None = None
        self.watching = ExitStack()

    def resume(self) -> None:
        heartbeat.here()
        if self.make_context is not None:
            self.watching.enter_context(self.make_context())


class PairRunner:
    def __init__(self) -> None:
        self.halves: tuple[_Half, _Half] | None = None  # while a pair runs
        self.holder = 0  # the half whose turn it is
        self.failure: BaseException | None = None
        self.pending: Pass | None = None  # the second half, until it begins
        self.wake = threading.Semaphore(0)
        self.thread: threading.Thread | None = None

    def run(self, first: Pass, second: Pass) -> None:
        """Both, to their ends. What one of them raises is raised here; the other is left where it is, and unwound."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="backward half", daemon=True)
            self.thread.start()
        self.halves, self.holder, self.failure, self.pending = (_Half(), _Half()), 0, None, _with_thread_state(second)
        try:
            first()
        except Abandoned:
            pass
        except BaseException as error:
            self.failure = self.failure or error
            if self.holder != 0:  # it came from outside, a signal: the other half may wait for long
                raise
        this, other = self.halves
        this.over = True
        if not other.over:
            self._give_turn(1)
            this.turn.acquire()
        self.halves, failure = None, self.failure
        heartbeat.here()
        if failure is not None:
            raise failure

    def yield_turn(self) -> None:
        """Let the other half run, until it is this one's turn again. Outside of pairs this does nothing."""
        if self.halves is None:
            return
        this, other = self.halves[self.holder], self.halves[1 - self.holder]
        if not other.over:
            this.watching.close()
            self._give_turn(1 - self.holder)
            this.turn.acquire()
            if self.failure is not None:
                raise Abandoned
            this.resume()
            heartbeat.beat()

    @contextmanager
    def watched(self, make_context: MakeContext) -> Iterator[None]:
        """A context for each stretch in which the half that enters this runs."""
        assert self.halves is not None
        this = self.halves[self.holder]
        this.make_context = make_context
        with this.watching:
            this.resume()
            try:
                yield
            finally:
                this.make_context = None

    def _give_turn(self, number: int) -> None:
        assert self.halves is not None
        self.holder = number
        if number == 1 and self.pending is not None:
            self.wake.release()  # it has not begun
        else:
            self.halves[number].turn.release()

    def _serve(self) -> None:
        """The second thread: the second half of one pair after the other."""
        while True:
            self.wake.acquire()
            assert self.halves is not None
            (first, second), run, self.pending = self.halves, self.pending, None
            try:
                if self.failure is None and run is not None:
                    run()
            except Abandoned:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            second.over = True
            self.holder = 0
            first.turn.release()
            del first, second, run


def _with_thread_state(run_pass: Pass) -> Pass:
    """The same pass for another thread, with what torch and Python keep for this one."""
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
            context.run(run_pass)

    return run
