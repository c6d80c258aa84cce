"""A lab's step in a rank, timed: when it computes, when it waits for others, and what travels while it computes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from fivefold.foreign.adapter import AdapterFile, import_adapter
from fivefold.labs import student
from fivefold.labs.scaling import Span, TimedSteps
from fivefold.launch.processes import Rank

_CALLS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier"),
)
_WARM = 2  # steps that are not timed


def measure(rank: Rank, check: AdapterFile, layout: dict[str, Any], rounds: int) -> TimedSteps:
    rank.join("gloo")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # on any number of ranks
    torch.manual_seed(0)
    clock = _Clock()
    together = dist.barrier
    clock.watch()  # before the answer is imported, which may take functions out of torch.distributed
    student.TIMERS.append(clock.timed)
    given = import_adapter(check)
    model, batch = given.build(dict(layout)), given.batch(0)
    update = getattr(given, "update", lambda model: None)
    seconds = []
    for _ in range(_WARM + rounds):
        together()
        clock.begin()
        given.step(model, batch)
        update(model)
        seconds.append(clock.seconds)
        model.zero_grad()
    return TimedSteps(seconds[_WARM:], clock.waits, clock.travels)


class _Clock:
    """What is called of torch.distributed in the recorded parts of a step, and how long these take."""

    def __init__(self) -> None:
        self.runs = False
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.seconds, self.waits, self.travels = 0.0, list[Span](), list[Span]()
        self._since = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A part of the step; parts are put one after the other, without what the check does between them."""
        self._since, self.runs = time.perf_counter() - self.seconds, True
        try:
            yield
        finally:
            self.seconds, self.runs = self._now(), False

    def _now(self) -> float:
        return time.perf_counter() - self._since

    def note(self, call: Callable[[], Any]) -> Any:
        """Call, and note the time as one in which the rank does nothing else."""
        if not self.runs:
            return call()
        start = self._now()
        try:
            return call()
        finally:
            self.waits.append(Span(start, self._now()))

    def watch(self) -> None:
        """From now on calls are noted, and waits for what they return."""
        for name in _CALLS:
            setattr(dist, name, self._noted(getattr(dist, name)))

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            found = self.note(lambda: function(*args, **kwargs))
            if isinstance(found, list):
                return [_Work(work, self) for work in found]
            return found if found is None or not hasattr(found, "wait") else _Work(found, self)

        return called


class _Work:
    """A handle whose waits are noted, and when its message was through."""

    def __init__(self, work: Any, clock: _Clock):
        self._work, self._clock = work, clock
        self._start, self._travels = clock._now(), clock.travels if clock.runs else []
        self._open = True
        with suppress(RuntimeError):  # sends have no future: they end when they are waited for
            work.get_future().add_done_callback(lambda _: self._through())

    def _through(self) -> None:
        if self._open:
            self._open = False
            self._travels.append(Span(self._start, self._clock._now()))

    def wait(self, *args: Any) -> Any:
        found = self._clock.note(lambda: self._work.wait(*args))
        self._through()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
