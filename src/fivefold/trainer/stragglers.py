"""Which rank has become slow, in which phase, and by how much: rank 0 judges, every `watch.slow_every` steps.

A rank is held against the others of its pipeline stage, which do the same work; where there are none, against itself
before. It is named when it has been slow in two looks, and when it no longer is, and not in between.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import torch

from fivefold.job.config import Job
from fivefold.launch import faults, waits
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Watch
from fivefold.schedules.actions import Action, Kind

_SHARE = 0.05  # of a step: a phase that takes less more than others do is not worth a word
_KNOWN = 3  # looks at a rank that it is held against, where it has no peers
_MOST = 20  # of them


class SlowRanks:
    """`stages`: of every rank, which others do the same work; `places`: where it stands in the layout."""

    def __init__(self, factor: float, stages: Sequence[int], places: Sequence[str], phases: Sequence[str]):
        self.factor, self.stages, self.places, self.phases = factor, stages, places, phases
        self.suspect: dict[
            tuple[int, str], int
        ] = {}  # rank and phase -> the step of the first look at which it was slow
        self.slow: dict[tuple[int, str], int] = {}  # the same, of those that have been named
        self.before: dict[tuple[int, str], list[float]] = {}

    def look(self, step: int, table: Sequence[Sequence[float]]) -> list[str]:
        """What has changed. A row a rank: seconds of each phase, and of a step."""
        return [sentence for rank in range(len(table)) for sentence in self._rank(step, rank, table)]

    def _rank(self, step: int, rank: int, table: Sequence[Sequence[float]]) -> Iterator[str]:
        peers = [peer for peer, stage in enumerate(self.stages) if stage == self.stages[rank] and peer != rank]
        step_seconds = median(row[-1] for row in table)
        for number, phase in enumerate(self.phases):
            own, key = table[rank][number], (rank, phase)
            known = [table[peer][number] for peer in peers] or self.before.setdefault(key, [])
            usual = median(known) if len(known) >= (1 if peers else _KNOWN) else 0.0
            share = _SHARE * (usual if phase == "matmul" else step_seconds)
            times = own / usual if usual > 0 else 1.0
            late = times > self.factor and own - usual > share
            first = self.suspect.pop(key, None)
            if late and key not in self.slow and first is None:
                self.suspect[key] = step
            elif late and key not in self.slow and first is not None:
                self.slow[key] = first
                than = f"the median of {_others(peers)}" if peers else "what it took before"
                yield (
                    f"step {step}: {self._name(rank)} is slow in {phase}, {times:.1f}x {than} ({own * 1e3:.3g} ms "
                    f"against {usual * 1e3:.3g})"
                )
            elif key in self.slow and times < (1 + self.factor) / 2:
                since = self.slow.pop(key)
                yield f"step {step}: {self._name(rank)} is no longer slow in {phase}, as it was from step {since} on"
            if not peers and not late and key not in self.slow and own > 0:
                self.before[key] = [*self.before[key], own][-_MOST:]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.places[rank]})" if self.places[rank] else f"rank {rank}"


def _others(peers: list[int]) -> str:
    if len(peers) > 4:
        return f"the {len(peers)} other ranks of its stage"
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"


# ---- phases ---------------------------------------------------------------------------------------------------------
# How long a rank is at work in each phase of a step, without its waits for others.
#
# On CPUs the phases are timed in every step, by the host, and of several steps the quickest counts: a core has other
# work in between. On a GPU the host is ahead of the device, and waits for others are kernels in the same stream, so no
# phase can be told from them; a few matmuls say whether the device itself has become slow, in any layout.


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
        start, waited = time.perf_counter(), waits.seconds()
        if phase in faults.PLACES:
            faults.strike(phase, step=self.step)
        yield
        self.now[phase] += time.perf_counter() - start - (waits.seconds() - waited)
        self.calls += 1

    @contextmanager
    def whole(self, step: int) -> Iterator[None]:
        """Around a step, from its batch on."""
        self.step, start, waited = step, time.perf_counter(), waits.seconds()
        yield
        passed = time.perf_counter() - start
        known = sum(self.now[name] for name in ("forward", "backward", "optimizer"))
        self.now["other work"] = passed - (waits.seconds() - waited) - known
        self.kept.append(self.now)
        self.steps.append(passed)
        self.now = dict.fromkeys(PHASES, 0.0)

    def drain(self) -> list[float]:
        """Of the steps since the last time: seconds of every phase, and of a step."""
        if not self.kept:
            return [0.0] * (len(PHASES) + 1)
        seen = PHASES if self.host else ("data",)
        seconds = {name: min(step[name] for step in self.kept) if name in seen else 0.0 for name in PHASES}
        if not self.host:
            self.probe = self.probe or Probe(self.device)
            seconds["matmul"] = self.probe.seconds()
        step_seconds = min(self.steps)
        self.kept, self.steps = [], []
        return [*seconds.values(), step_seconds]

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
        elapsed = 0.0
        if self.begun:
            self.end.synchronize()
            elapsed = self.begin.elapsed_time(self.end) / 1000
        self.begin.record()
        for _ in range(_COUNT):
            torch.mm(self.a, self.b, out=self.out)
        self.end.record()
        self.begun = True
        return elapsed


# ---- slow watch -----------------------------------------------------------------------------------------------------
# The watcher of slow ranks in a trainer: what the ranks tell each other, and when.
#
# The times travel with the all-reduce of the gradient norm, in steps that are looked at: each rank fills its row of a
# table of zeros, and the sum is the table. No rank waits for another because of it.


class SlowWatch:
    def __init__(self, job: Job, mesh: Mesh, phases: Phases):
        self.mesh, self.phases = mesh, phases
        self.every = job.watch.slow_every if job.watch.slow and mesh.world.size > 1 else 0
        ranks, layout = range(mesh.world.size if mesh.world.rank == 0 else 0), job.layout
        stages = [layout.position("pp", rank) for rank in ranks]
        self.judge = SlowRanks(job.watch.slow, stages, [layout.place(rank) for rank in ranks], PHASES)

    def table(self, step: int) -> torch.Tensor | None:
        """This rank's row of the steps before, in steps that are looked at."""
        if not self.every or step % self.every:
            if len(self.phases.kept) > 1 << 10:  # nobody asks
                self.phases.drain()
            return None
        table = torch.zeros(self.mesh.world.size, len(PHASES) + 1, dtype=torch.float64)
        table[self.mesh.world.rank] = torch.tensor(self.phases.drain(), dtype=torch.float64)
        return table.to(self.mesh.device)

    def look(self, step: int, table: torch.Tensor | None, say: Callable[[str], None]) -> None:
        """Rank 0 says what has changed."""
        if table is not None and self.mesh.world.rank == 0:
            for sentence in self.judge.look(step, table.tolist()):
                say(sentence)
