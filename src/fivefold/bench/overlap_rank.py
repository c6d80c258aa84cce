"""One rank of `python -m benchmarks.overlap`."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bench.overlap import EP, IN_TURN, IN_TURNS, OverlapResult, OverlapShape, WireDelay, enter
from fivefold.bench.systems import CPU, machine, take_turns
from fivefold.data.batch import Batch
from fivefold.launch.processes import Rank
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.world import World, join
from fivefold.parallel.control import all_gather_values
from fivefold.parallel.experts import AsyncExchange, Send, Tensors
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.schedules.actions import BACKWARD, FORWARD, Action, Kind
from fivefold.schedules.costs import Costs, Segment, play
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import simulate
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

Pass = tuple[str, int, float, list[tuple[float, float, float]]]  # kind, stage, seconds, segments


@dataclass
class Recorder:
    """Seconds of every action of this rank, cut where its messages leave and come."""

    on: bool = False
    now: list[float] = field(default_factory=list)  # the action's start; each message's departure, wait and arrival
    passes: list[Pass] = field(default_factory=list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        self.now = [time.perf_counter()]
        yield
        if self.on:
            start, *marks = self.now
            end, segments, last = time.perf_counter(), [], start
            for left, waited, came in zip(marks[::3], marks[1::3], marks[2::3], strict=True):
                segments.append((left - last, came - left, waited - left))
                last = came
            self.passes.append((str(action.kind), action.stage, end - start, [*segments, (end - last, 0.0, 0.0)]))

    def mark(self) -> None:
        if self.on:
            self.now.append(time.perf_counter())


class Delay:
    """A wire that is made up: messages take as long as their bytes, two at a time twice as long each."""

    def __init__(self, bytes_per_second: float):
        self.pace, self.last = bytes_per_second, 0.0
        self.left: dict[AsyncExchange, float] = {}  # seconds of those under way, if alone

    def begin(self, exchange: AsyncExchange, payload: int) -> None:
        self._advance()
        self.left[exchange] = payload / self.pace

    def end(self, exchange: AsyncExchange) -> None:
        """Wait until it is there."""
        while True:
            self._advance()
            if (left := self.left[exchange]) <= 0.0:
                break
            time.sleep(min(one for one in (*self.left.values(), left) if one > 0) * len(self._flying()))
        del self.left[exchange]

    def _flying(self) -> list[AsyncExchange]:
        return [exchange for exchange, left in self.left.items() if left > 0]

    def _advance(self) -> None:
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        while passed > 0 and (flying := self._flying()):
            step = min(passed, min(self.left[exchange] for exchange in flying) * len(flying))
            for exchange in flying:
                self.left[exchange] -= step / len(flying)
                if self.left[exchange] < 1e-9:
                    self.left[exchange] = 0.0
            passed -= step


def listen(recorder: Recorder, delay: Delay | None) -> None:
    """To every message of experts that leaves, and that is waited for."""
    start, finish = AsyncExchange.start, AsyncExchange.finish

    def started(exchange: AsyncExchange, send: Send, axis: Axis, tensors: Tensors) -> tuple[()]:
        recorder.mark()
        start(exchange, send, axis, tensors)
        if delay is not None:
            delay.begin(
                exchange, max(_bytes(tensors), _bytes(exchange.in_flight)) * (EP - 1) // EP
            )  # a share stays here
        return ()

    def finished(exchange: AsyncExchange) -> Tensors:
        recorder.mark()
        received = finish(exchange)
        if delay is not None:
            delay.end(exchange)
        recorder.mark()
        return received

    AsyncExchange.start, AsyncExchange.finish = started, finished  # type: ignore[method-assign, assignment]


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StepPasses:
    """The forward and backward passes of a step, under one engine."""

    def __init__(self, shape: OverlapShape, schedule: str, recorder: Recorder):
        job = shape.job(schedule)
        self.recorder = recorder
        self.engine = Engine(job, Mesh.of(job.layout, CPU, spec=job.model), recorder.watch)
        self.batch: Batch = plain_batch(job.model.vocab, shape.batch, shape.seq)
        share = self.batch.share(EP, self.engine.mesh.batch.rank)
        self.microbatches = [self.engine._microbatch(part) for part in share.mine.split(job.layout.microbatches)]

    def gradients(self, in_turns: bool) -> dict[str, Tensor]:
        """This rank's, of a whole step."""
        self.engine.pipeline.in_turns = in_turns
        self.engine.forward_backward(self.batch)
        weights = self.engine.weights
        found = {name: master.grad.clone() for name, master in weights.masters.items() if master.grad is not None}
        weights.sync_params()
        return found

    def run(self, in_turns: bool) -> None:
        self.engine.pipeline.in_turns = in_turns
        self.engine.pipeline.run(self.microbatches, lambda total: total / self.batch.loss_tokens)

    def alone(self) -> None:
        """One half after the other, where no rank waits for another's stage: what the passes themselves take."""
        self.recorder.on = True
        with self.engine.pipeline.alone():
            self.run(in_turns=False)
        self.recorder.on = False
        self.engine.weights.sync_params()


def run(rank: Rank, shape: OverlapShape, schedule: str, wires: WireDelay) -> OverlapResult:
    torch.set_num_threads(1)
    if enter(wires, rank.number):
        meeting = Rendezvous(file=str(rank.home / "store"))
        join(World(rank.number, rank.world, rank.number, rank.world, joined=True, meeting=meeting), "gloo")
    else:
        rank.join("gloo")
    recorder = Recorder()
    listen(recorder, None if wires.places else Delay(wires.link * 1e6 / 8))
    passes = StepPasses(shape, schedule, recorder)
    one, other = passes.gradients(False), passes.gradients(True)
    same = all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    passes.engine.pipeline.last_of_stage = set()  # gradients are not summed over ranks: that is no part of a pass

    def after(name: str) -> None:
        passes.engine.weights.sync_params()
        if name == IN_TURN:
            dist.barrier()
            passes.alone()

    systems = {IN_TURN: lambda: passes.run(False), IN_TURNS: lambda: passes.run(True)}
    times = take_turns(systems, shape.rounds, after=after)
    everyone = all_gather_values(recorder.passes, list[Pass])
    simulated, hidden = predicted(passes.engine.schedule, [one for rank in everyone for one in rank])
    agreed = all(all_gather_values(same, bool))
    return OverlapResult(shape, times, simulated, hidden, agreed, str(wires), machine())


def predicted(schedule: Schedule, passes: list[Pass]) -> tuple[dict[str, float], float]:
    """What the clock says of the two ways, and the share of the messages' time that pairs hide."""
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    cut: dict[tuple[Kind, int], list[list[tuple[float, float, float]]]] = defaultdict(list)
    for word, stage, took, segments in passes:
        seconds[Kind(word), stage].append(took)
        cut[Kind(word), stage].append(segments)
    typical = {
        place: tuple(Segment(*(median(part) for part in zip(*same, strict=True))) for same in zip(*every, strict=True))
        for place, every in cut.items()
    }
    costs = Costs.measured(seconds, schedule.placement.stages)
    joined = [
        (action.stage, order[at + 1].stage)
        for order in schedule.ranks for at, action in enumerate(order) if action.joined
    ]  # fmt: skip
    pair, saved = dict(enumerate(map(sum, zip(costs.f, costs.b, strict=True)))), []
    for forward, backward in joined:
        played = play(typical[FORWARD, forward], typical[BACKWARD, backward])
        # What is hidden is taken from the measured whole: a median of sums is no sum of medians.
        pair[forward] = costs.f[forward] + costs.b[backward] - played.hidden
        messages = sum(part.message for part in (*typical[FORWARD, forward], *typical[BACKWARD, backward]))
        saved.append(played.hidden / messages if messages else 0.0)
    together = replace(costs, pair=tuple(pair[stage] for stage in range(schedule.placement.stages)))
    made = {IN_TURN: simulate(schedule, costs).makespan, IN_TURNS: simulate(schedule, together).makespan}
    return made, mean(saved) if saved else 0.0
