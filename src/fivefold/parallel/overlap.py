"""Runs the two halves of an overlapped pair, a forward and a backward pass, in turns: one at any time.

    runner = PairRunner()
    runner.run(forward, backward)               the forward first, in this thread; the backward in a second one
    runner.yield_turn()                         in a half, before it waits: the other half runs until it yields or ends
    with runner.watched(make_context): ...      in a half: a context around each stretch of it

Once one half has ended, the other runs to its end. The order is a function of where the two yield, never of their
speed: all ranks that run the same pair start their collectives in the same order. No two threads ever run at once, so
nothing else needs a lock. The turn belongs to a half, not to a thread: on a GPU autograd runs a backward pass in a
thread of its own.

Why two threads are safe with NCCL, which wants the operations of a device issued in one order: several threads may use
a communicator as long as one does at a time, which the turn ensures; and no half yields inside a group of operations,
which torch opens and closes within a call. Both halves, and autograd's thread, work on the one stream of the run: the
order of their turns is the order on the device, and memory that one frees and the other allocates comes from that
stream's pool, in that order. A half yields before it waits, so no message blocks the stream while the other half
computes; and each half waits for its own messages. A single thread that alternates between the passes would have to
cut autograd's graph, recompute and compiled blocks at each message; here a block is written as if it were alone.

The thread-local state of torch and Python is copied to the second thread: dispatch modes, context variables, whether
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
    """Raised in a half whose other half has failed, to unwind it; not an error by itself."""


class _Half:
    def __init__(self) -> None:
        self.turn = threading.Lock()  # locked; to acquire it is to wait for this half's turn
        self.turn.acquire()
        self.ended = False
        self.make_context: MakeContext | None = None
        self.stretch = ExitStack()

    def resume(self) -> None:
        heartbeat.here()
        if self.make_context is not None:
            self.stretch.enter_context(self.make_context())


class PairRunner:
    def __init__(self) -> None:
        self.halves: tuple[_Half, _Half] | None = None  # while a pair runs
        self.current = 0  # index of the half whose turn it is
        self.failure: BaseException | None = None
        self.pending: Pass | None = None  # the second half, until it begins
        self.wake = threading.Semaphore(0)
        self.thread: threading.Thread | None = None

    def run(self, first: Pass, second: Pass) -> None:
        """Run both to their ends. An error of one is raised here, and the other is unwound."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="backward half", daemon=True)
            self.thread.start()
        self.halves, self.current, self.failure, self.pending = (_Half(), _Half()), 0, None, _with_thread_state(second)
        try:
            first()
        except Abandoned:
            pass
        except BaseException as error:
            self.failure = self.failure or error
            if self.current != 0:  # a signal's exception: the other half may wait for long
                raise
        this, other = self.halves
        this.ended = True
        if not other.ended:
            self._give_turn(1)
            this.turn.acquire()
        self.halves, failure = None, self.failure
        heartbeat.here()
        if failure is not None:
            raise failure

    def yield_turn(self) -> None:
        """Let the other half run until it yields or ends. Outside of pairs this does nothing."""
        if self.halves is None:
            return
        this, other = self.halves[self.current], self.halves[1 - self.current]
        if not other.ended:
            this.stretch.close()
            self._give_turn(1 - self.current)
            this.turn.acquire()
            if self.failure is not None:
                raise Abandoned
            this.resume()
            heartbeat.beat()

    @contextmanager
    def watched(self, make_context: MakeContext) -> Iterator[None]:
        """Enter a new context of `make_context` for each stretch of the calling half."""
        assert self.halves is not None
        this = self.halves[self.current]
        this.make_context = make_context
        with this.stretch:
            this.resume()
            try:
                yield
            finally:
                this.make_context = None

    def _give_turn(self, index: int) -> None:
        assert self.halves is not None
        self.current = index
        if index == 1 and self.pending is not None:
            self.wake.release()  # start it
        else:
            self.halves[index].turn.release()

    def _serve(self) -> None:
        """The second thread: runs the second half of every pair."""
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
            second.ended = True
            self.current = 0
            first.turn.release()
            del first, second, run


def _with_thread_state(run_pass: Pass) -> Pass:
    """The same pass for another thread, with the thread-local state of this one."""
    modes, context, recorded = _get_current_dispatch_mode_stack(), contextvars.copy_context(), torch.is_grad_enabled()
    threads = torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_num_threads(threads)
        with ExitStack() as state:
            if stream is not None:
                state.enter_context(torch.cuda.stream(stream))  # and its device
            state.enter_context(torch.set_grad_enabled(recorded))
            for mode in modes:
                _push_mode(mode)
                state.callback(_pop_mode, getattr(mode, "_mode_key", None))
            context.run(run_pass)

    return run
