"""A lab's step in a rank, timed, and when it computes and when it waits for others."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fivefold.foreign.adapter import AdapterFile, import_adapter
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
    given = import_adapter(check)
    model, batch = given.build(dict(layout)), given.batch(0)
    seconds, spans = [], list[Span]()
    for _ in range(_WARM + rounds):
        dist.barrier()
        spans.clear()
        start = time.perf_counter()
        with _watched(spans, start):
            given.step(model, batch)
        seconds.append(time.perf_counter() - start)
    return TimedSteps(seconds[_WARM:], spans)


class _Work:
    """A handle whose waits are noted."""

    def __init__(self, work: Any, note: Callable[[Callable[[], Any]], Any]):
        self._work, self._note = work, note

    def wait(self, *args: Any) -> Any:
        return self._note(lambda: self._work.wait(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def _watched(spans: list[Span], begin: float) -> Iterator[None]:
    """Within it, what is called of torch.distributed, and each wait, is noted."""

    def note(call: Callable[[], Any]) -> Any:
        start = time.perf_counter() - begin
        try:
            return call()
        finally:
            spans.append(Span(start, time.perf_counter() - begin))

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            found = note(lambda: function(*args, **kwargs))
            if isinstance(found, list):
                return [_Work(work, note) for work in found]
            return found if found is None else _Work(found, note)

        return called

    usual = {name: getattr(dist, name) for name in _CALLS}
    try:
        for name, function in usual.items():
            setattr(dist, name, noted(function))
        yield
    finally:
        for name, function in usual.items():
            setattr(dist, name, function)
