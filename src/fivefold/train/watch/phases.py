"""How long a rank is at work in each phase of a step, without its waits for others.

On CPUs the phases are timed in every step, by the host, and of several steps the quickest counts: a core has other work
in between. On a GPU the host is ahead of the device, and waits for others are kernels in the same stream, so no phase
can be told from them; a few matmuls say whether the device itself has become slow, in any layout.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from fivefold.launch import faults, waits
from fivefold.parallel.pipeline import Watch
from fivefold.schedule.actions import Action, Kind

_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
}
PHASES = ("data", "forward", "backward", "optimizer", "other work", "matmul")
_WIDTH, _COUNT = 2048, 8  # of matmuls: 137 GFLOP, a fifth of a millisecond of a datacenter GPU
_TRIALS = 200


class Phases:
    def __init__(self, device: torch.device, also: Watch | None = None):
        """`also` surrounds every action of the pipeline, too."""
        self.also, self.host = also, device.type == "cpu"
        self.step = 0
        self.now = dict.fromkeys(PHASES, 0.0)  # seconds of this step
        self.kept: list[dict[str, float]] = []  # of the steps since the last look
        self.steps: list[float] = []  # their seconds
        self.calls = 0
        self.each = self._each()
        self.device = device
        self.probe: Probe | None = None  # made at the first look

    def _each(self) -> float:
        """Seconds that one timed phase costs."""
        start = time.perf_counter()
        for _ in range(_TRIALS):
            with self.of("other work"):
                pass
        self.calls, self.now["other work"] = 0, 0.0
        return (time.perf_counter() - start) / _TRIALS

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Around an action of the pipeline."""
        with ExitStack() as also:
            if self.also is not None:
                also.enter_context(self.also(action))
            if phase := _OF.get(action.kind):
                also.enter_context(self.of(phase))
            yield

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        start, stood = time.perf_counter(), waits.seconds()
        if phase in faults.PLACES:
            faults.strike(phase, step=self.step)
        yield
        self.now[phase] += time.perf_counter() - start - (waits.seconds() - stood)
        self.calls += 1

    @contextmanager
    def whole(self, step: int) -> Iterator[None]:
        """Around a step, from its batch on."""
        self.step, start, stood = step, time.perf_counter(), waits.seconds()
        yield
        passed = time.perf_counter() - start
        known = sum(self.now[name] for name in ("forward", "backward", "optimizer"))
        self.now["other work"] = passed - (waits.seconds() - stood) - known
        self.kept.append(self.now)
        self.steps.append(passed)
        self.now = dict.fromkeys(PHASES, 0.0)

    def told(self) -> list[float]:
        """Of the steps since the last time: seconds of every phase, and of a step."""
        if not self.kept:
            return [0.0] * (len(PHASES) + 1)
        seen = PHASES if self.host else ("data",)
        found = {name: min(one[name] for one in self.kept) if name in seen else 0.0 for name in PHASES}
        if not self.host:
            self.probe = self.probe or Probe(self.device)
            found["matmul"] = self.probe.seconds()
        whole = min(self.steps)
        self.kept, self.steps = [], []
        return [*found.values(), whole]

    def cost(self) -> float:
        """Seconds that timing took since the last time."""
        calls, self.calls = self.calls, 0
        return calls * self.each


class Probe:
    """Matmuls of one size on a GPU, timed by the device. The host does not wait for them."""

    def __init__(self, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)  # not zeros, which draw less power
        self.a, self.b = (torch.randn(_WIDTH, _WIDTH, device=device, generator=generator).bfloat16() for _ in range(2))
        self.out = self.a @ self.b
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.begun = False

    def seconds(self) -> float:
        """Of the matmuls that were begun the last time; more are begun."""
        found = 0.0
        if self.begun:
            self.end.synchronize()
            found = self.begin.elapsed_time(self.end) / 1000
        self.begin.record()
        for _ in range(_COUNT):
            torch.mm(self.a, self.b, out=self.out)
        self.end.record()
        self.begun = True
        return found
