"""Stragglers: which rank is slow, in which phase, and by how much. Rank 0 checks every `watch.slow_every` steps.

A rank is compared with the others of its pipeline stage, which do the same work; where there are none, with its own
earlier times. A message names it when two checks in a row find it slow, and when it no longer is, and not in between.
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

_MIN_EXCESS = 0.05  # of a step: a rank whose phase takes less than this more than usual is not reported
_MIN_HISTORY, _MAX_HISTORY = 3, 20  # checks of a rank without peers that its times are compared with


class SlowRanks:
    """Finds slow ranks. `stages`: the pipeline stage of each rank; `places`: its position in the layout, as text."""

    def __init__(self, factor: float, stages: Sequence[int], places: Sequence[str], phases: Sequence[str]):
        self.factor, self.stages, self.places, self.phases = factor, stages, places, phases
        # By (rank, phase): the step of the first check at which it was slow; suspects have not been named yet.
        self.suspect: dict[tuple[int, str], int] = {}
        self.slow: dict[tuple[int, str], int] = {}
        self.history: dict[tuple[int, str], list[float]] = {}  # seconds, of ranks without peers

    def look(self, step: int, table: Sequence[Sequence[float]]) -> list[str]:
        """Messages about ranks that have become slow or no longer are.

        `table` has a row for each rank: the seconds of each phase, and of a step.
        """
        return [message for rank in range(len(table)) for message in self._messages(step, rank, table)]

    def _messages(self, step: int, rank: int, table: Sequence[Sequence[float]]) -> Iterator[str]:
        peers = [peer for peer, stage in enumerate(self.stages) if stage == self.stages[rank] and peer != rank]
        step_seconds = median(row[-1] for row in table)
        for number, phase in enumerate(self.phases):
            own, key = table[rank][number], (rank, phase)
            references = [table[peer][number] for peer in peers] or self.history.setdefault(key, [])
            usual = median(references) if len(references) >= (1 if peers else _MIN_HISTORY) else 0.0
            min_excess = _MIN_EXCESS * (usual if phase == "matmul" else step_seconds)
            ratio = own / usual if usual > 0 else 1.0
            is_slow = ratio > self.factor and own - usual > min_excess
            first_step = self.suspect.pop(key, None)
            if is_slow and key not in self.slow and first_step is None:
                self.suspect[key] = step
            elif is_slow and key not in self.slow and first_step is not None:
                self.slow[key] = first_step
                compared_with = f"the median of {_peer_text(peers)}" if peers else "what it took before"
                yield (
                    f"step {step}: {self._name(rank)} is slow in {phase}, {ratio:.1f}x {compared_with} "
                    f"({own * 1e3:.3g} ms against {usual * 1e3:.3g})"
                )
            elif key in self.slow and ratio < (1 + self.factor) / 2:
                since = self.slow.pop(key)
                yield f"step {step}: {self._name(rank)} is no longer slow in {phase}, as it was from step {since} on"
            if not peers and not is_slow and key not in self.slow and own > 0:
                self.history[key] = [*self.history[key], own][-_MAX_HISTORY:]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.places[rank]})" if self.places[rank] else f"rank {rank}"


def _peer_text(peers: list[int]) -> str:
    if len(peers) > 4:
        return f"the {len(peers)} other ranks of its stage"
    return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"


# ---- phases ---------------------------------------------------------------------------------------------------------
# The seconds that a rank works in each phase of a step, without its waits for other ranks.
#
# On CPUs the phases are timed in every step, by the host, and of several steps the quickest counts: a core has other
# work in between. On a GPU the host is ahead of the device, and waits for other ranks are kernels in the same stream,
# so phases cannot be timed without them; a few matmuls show whether the device itself has become slow, in any layout.


_PHASE_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
}
PHASES = ("data", "forward", "backward", "optimizer", "other work", "matmul")
_WIDTH, _COUNT = 2048, 8  # of matmuls: 137 GFLOP, a fifth of a millisecond of a datacenter GPU
_TRIALS = 200  # timed phases that measure what timing itself takes


class Phases:
    def __init__(self, device: torch.device, also: Watch | None = None):
        """`also`: a second watch of every action of the pipeline."""
        self.also, self.on_cpu = also, device.type == "cpu"
        self.step = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of this step
        self.steps: list[dict[str, float]] = []  # the seconds of each phase, for each step since the last `drain`
        self.step_seconds: list[float] = []  # of the same steps
        self.calls = 0  # timed phases since the last `cost`
        self.seconds_per_call = self._measure_cost()
        self.device = device
        self.probe: Probe | None = None  # made at the first `drain`

    def _measure_cost(self) -> float:
        """The seconds that timing one phase takes."""
        start = time.perf_counter()
        for _ in range(_TRIALS):
            with self.of("other work"):
                pass
        self.calls, self.seconds["other work"] = 0, 0.0
        return (time.perf_counter() - start) / _TRIALS

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Times an action of the pipeline."""
        with ExitStack() as contexts:
            if self.also is not None:
                contexts.enter_context(self.also(action))
            if phase := _PHASE_OF.get(action.kind):
                contexts.enter_context(self.of(phase))
            yield

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Times a phase, without the waits in it."""
        start, waited = time.perf_counter(), waits.seconds()
        if phase in faults.FAULT_PLACES:
            faults.strike(phase, step=self.step)
        yield
        self.seconds[phase] += time.perf_counter() - start - (waits.seconds() - waited)
        self.calls += 1

    @contextmanager
    def whole(self, step: int) -> Iterator[None]:
        """Times a step, from the point where its batch is there."""
        self.step, start, waited = step, time.perf_counter(), waits.seconds()
        yield
        step_seconds = time.perf_counter() - start
        timed = sum(self.seconds[name] for name in ("forward", "backward", "optimizer"))
        self.seconds["other work"] = step_seconds - (waits.seconds() - waited) - timed
        self.steps.append(self.seconds)
        self.step_seconds.append(step_seconds)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def drain(self) -> list[float]:
        """The shortest seconds of every phase, and of a step, in the steps since the last call."""
        if not self.steps:
            return [0.0] * (len(PHASES) + 1)
        timed = PHASES if self.on_cpu else ("data",)
        seconds = {name: min(step[name] for step in self.steps) if name in timed else 0.0 for name in PHASES}
        if not self.on_cpu:
            self.probe = self.probe or Probe(self.device)
            seconds["matmul"] = self.probe.seconds()
        shortest_step = min(self.step_seconds)
        self.steps, self.step_seconds = [], []
        return [*seconds.values(), shortest_step]

    def cost(self) -> float:
        """The seconds that timing took since the last call."""
        calls, self.calls = self.calls, 0
        return calls * self.seconds_per_call


class Probe:
    """Matmuls of one size on a GPU, timed by the device. The host does not wait for them."""

    def __init__(self, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)  # not zeros, which draw less power
        self.a, self.b = (torch.randn(_WIDTH, _WIDTH, device=device, generator=generator).bfloat16() for _ in range(2))
        self.out = self.a @ self.b
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.launched = False

    def seconds(self) -> float:
        """The seconds of the matmuls that the last call launched, 0 at first; launches others."""
        elapsed = 0.0
        if self.launched:
            self.end.synchronize()
            elapsed = self.begin.elapsed_time(self.end) / 1000
        self.begin.record()
        for _ in range(_COUNT):
            torch.mm(self.a, self.b, out=self.out)
        self.end.record()
        self.launched = True
        return elapsed


# ---- slow watch -----------------------------------------------------------------------------------------------------
# The straggler check of a trainer: when the ranks exchange their times.
#
# The times are summed in the all-reduce of the gradient norm: each rank fills its row of a table of zeros, and the sum
# is the table. No rank waits for another because of it.


class SlowWatch:
    def __init__(self, job: Job, mesh: Mesh, phases: Phases):
        self.mesh, self.phases = mesh, phases
        self.every = job.watch.slow_every if job.watch.slow and mesh.world.size > 1 else 0
        ranks, layout = range(mesh.world.size if mesh.world.rank == 0 else 0), job.layout
        stages = [layout.position("pp", rank) for rank in ranks]
        self.slow_ranks = SlowRanks(job.watch.slow, stages, [layout.place(rank) for rank in ranks], PHASES)

    def table(self, step: int) -> torch.Tensor | None:
        """The table with this rank's row of the steps before, in steps with a check; else None."""
        if not self.every or step % self.every:
            if len(self.phases.steps) > 1 << 10:  # bounds the memory where there are few checks, or none
                self.phases.drain()
            return None
        table = torch.zeros(self.mesh.world.size, len(PHASES) + 1, dtype=torch.float64)
        table[self.mesh.world.rank] = torch.tensor(self.phases.drain(), dtype=torch.float64)
        return table.to(self.mesh.device)

    def look(self, step: int, table: torch.Tensor | None, say: Callable[[str], None]) -> None:
        """Prints on rank 0 which ranks have become slow, or no longer are."""
        if table is not None and self.mesh.world.rank == 0:
            for message in self.slow_ranks.look(step, table.tolist()):
                say(message)
