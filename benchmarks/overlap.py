"""`python -m benchmarks.overlap`: joined pairs whose halves run in turns, against one half after the other.

measure(OverlapShape(pp=2, microbatches=6, hidden=128, layers=8, seq=256, batch=12, link=100.0, rounds=5))

Two ranks of ep share the experts of every stage, and their link is limited. Where this process may make network
namespaces (root, with `ip` and `tc`), the two live in one each, and the kernel limits the wire between them; elsewhere
each rank waits as long as its messages would take on such a wire, and the wire is shared by those under way at a time.

The simulator is given what was measured of one half after the other: for each pass its compute, its messages and what
it computes beside them. `schedules/costs.py` plays a pair of them by the rule that the trainer runs by, and the clock
runs the schedule with what comes of it.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from fivefold.bench.harness import Machine, RoundTimes, caveats, refuse, table, too_small
from fivefold.bench.rank_timing import CPU, machine, take_turns
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.data.batch import Batch
from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.launch import processes
from fivefold.launch.group import join
from fivefold.launch.processes import Rank
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.world import World
from fivefold.layout.layout import Layout
from fivefold.parallel.async_exchange import AsyncExchange, StartCollectives, Tensors
from fivefold.parallel.control import all_gather_values
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.render.blocks import Block, Result, Text, show
from fivefold.schedules.actions import BACKWARD, FORWARD, Action, Kind
from fivefold.schedules.costs import Costs, Segment, play_pair
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import simulate
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

# ---- wires ----------------------------------------------------------------------------------------------------------
# A limited wire between two ranks of ep, for each pipeline rank one: network namespaces and the kernel's token bucket.
#
#     with limited(2, 100.0) as wires:        # Mbit/s each way
#         processes.run(4, ...)               # rank r: enter(wires, r) before it opens a connection
#
# Ranks of one ep place share a namespace, so that stages reach each other over its loopback, and only what goes to the
# other ep place passes a wire. Where namespaces cannot be made, `wires.places` is empty and a rank makes up the delay.


_NETWORK = 0x40000000  # CLONE_NEWNET
_TICKS = 100  # a second


@dataclass(frozen=True)
class WireDelay:
    link: float  # Mbit/s
    places: tuple[tuple[str, str], ...] = ()  # of each rank, its namespace and interface

    def __str__(self) -> str:
        if self.places:
            return f"a wire of {self.link:g} Mbit/s each way between the two ranks of ep: two namespaces, tc tbf"
        return f"each rank waits as long as its messages take at {self.link:g} Mbit/s: an injected delay, no real wire"


@contextmanager
def limited(pp: int, link: float, injected: bool = False) -> Iterator[WireDelay]:
    """`injected`: no wire, though there could be one."""
    names = [f"fivefold-{os.getpid()}-{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            if injected or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
                raise PermissionError
            for name in names:
                _run("ip", "netns", "add", name)
                made.append(name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for place in range(pp):
                _wire(names, place, link)
        except (OSError, subprocess.CalledProcessError):
            yield WireDelay(link)
        else:
            # dp is the slowest axis, and ep here is all of it.
            yield WireDelay(link, tuple((name, f"ep{place}") for name in names for place in range(pp)))
    finally:
        for name in made:
            with suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _wire(names: list[str], place: int, link: float) -> None:
    first, second = names
    interface = f"ep{place}"
    _run("ip", "-n", first, "link", "add", interface, "type", "veth", "peer", "name", interface, "netns", second)
    for number, name in enumerate(names, start=1):
        _run("ip", "-n", name, "addr", "add", f"10.77.{place}.{number}/24", "dev", interface)
        _run("ip", "-n", name, "link", "set", interface, "up")
        # A rank may answer over another wire than it was asked on.
        for where in ("all", interface):
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/{where}/rp_filter")
        bucket = ("rate", f"{link * 1e6:.0f}bit", "burst", f"{_burst(link)}b", "latency", "2s")
        _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)


def _burst(link: float) -> int:
    """Bytes that pass at once: what the rate gives between two ticks of the slowest kernel's clock, or a few packets.
    It is short beside a message, which would otherwise pass for nothing."""
    return max(8192, round(link * 1e6 / 8 / _TICKS))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def enter(wires: WireDelay, rank: int) -> bool:
    """Move this thread, and those it starts, to the rank's place; whether it has one."""
    if not wires.places:
        return False
    name, interface = wires.places[rank]
    place = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(place, _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    finally:
        os.close(place)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return True


# ---- overlap --------------------------------------------------------------------------------------------------------


IN_TURN, IN_TURNS = "one after the other", "in turns"
EP = 2
_HEAD, _VOCABULARY = 32, 512


@dataclass(frozen=True)
class OverlapShape:
    pp: int
    microbatches: int
    hidden: int
    layers: int
    seq: int
    batch: int
    link: float  # Mbit/s each way between two ranks of ep
    rounds: int
    injected: bool = False  # the delay, where there could be a real wire

    @property
    def spec(self) -> ModelSpec:
        experts = Experts(count=8, top_k=2, ffn=self.hidden, shared=1)
        heads = max(1, self.hidden // _HEAD)
        return ModelSpec(
            name="this model", layers=self.layers, hidden=self.hidden, heads=heads, vocab=_VOCABULARY, experts=experts
        )

    def job(self, schedule: str = "dualpipe-v") -> Job:
        layout = Layout(dp=EP, pp=self.pp, ep=EP, schedule=schedule, microbatches=self.microbatches)
        data, train = TokenShards(seq=self.seq), TrainConfig(batch=self.batch, device="cpu")
        return Job(model=self.spec, layout=layout, data=data, train=train)

    def check(self) -> None:
        problems = too_small(rounds=self.rounds, seq=self.seq, batch=self.batch, pp=self.pp)
        if not 0 < self.link <= 1e6:
            problems.append(f"--link {self.link:g} Mbit/s is not a speed; it lies above 0, up to 1,000,000")
        if self.microbatches < (least := 2 * self.pp):
            problems.append(f"--microbatches {self.microbatches} with --pp {self.pp} has no pairs; nearest: {least}")
        refuse([*problems, *self.spec.problems()])
        layout = self.job("dualpipe-v" if self.pp > 1 else "1f1b").layout
        refuse(list(layout.problems(self.spec, batch=self.batch)))

    def write(self, path: Path) -> None:
        """For one pipeline rank: each forward pass joined with the backward pass of the microbatch before it."""
        pairs = [f"F0.{number + 1}&B0.{number}" for number in range(self.microbatches - 1)]
        order = " ".join(["F0.0", *pairs, f"B0.{self.microbatches - 1}"])
        path.write_text(f"schedule pairs\nstages 0\nmicrobatches {self.microbatches}\nrank 0\n  {order}\n")


COLUMNS = {"pairs": "pairs", ">seconds": "seconds:.3f", ">fastest": "fastest:.3f", ">simulated": "simulated:.3f"}


@dataclass(frozen=True)
class OverlapResult(Result):
    """Seconds of the forward and backward passes of a step; the sum of gradients over dp is not among them."""

    shape: OverlapShape
    times: RoundTimes
    simulated: dict[str, float]
    hidden: float  # of the seconds of a rank's messages in a step, the share that the simulated pairs hide
    same: bool  # whether gradients are equal to the bit
    wire: str  # how the link was limited
    machine: Machine

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.same

    @property
    def gain(self) -> float:
        """How much faster in turns; the median of each round's own."""
        return self.times.ratio(IN_TURN, IN_TURNS)

    @property
    def expected(self) -> float:
        return self.simulated[IN_TURN] / self.simulated[IN_TURNS]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"pairs": name, "seconds": median(times), "fastest": min(times), "simulated": self.simulated[name]}
            for name, times in self.times.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        gains = {"gain": self.gain, "expected": self.expected, "agree": self.same}
        return asdict(self) | {"rows": self.rows()} | gains

    def blocks(self) -> Iterator[Block]:
        shape, where = self.shape, self.machine
        world = shape.pp * EP
        yield Text(
            f"pp={shape.pp}, ep={EP}: {shape.layers} layers of {shape.hidden} with 8 experts and a shared one, "
            f"{shape.microbatches} microbatches of {shape.batch // shape.microbatches // EP} x {shape.seq} tokens, "
            f"float32\n{self.wire}\ntorch {where.torch}; {where.cores} cores, one thread a rank; {shape.rounds} rounds "
            "in turns, medians"
        )
        yield table(self.rows(), COLUMNS)
        yield Text(f"{self.gain:.2f} times as fast in turns; simulated {self.expected:.2f}")
        yield Text(f"the simulated pairs hide {self.hidden:.0%} of the messages' time")
        yield Text("gradients are equal to the bit", "good") if self.same else Text("gradients differ", "bad")
        yield from caveats(self.times.values(), shape.rounds, world, where.cores)


def measure(shape: OverlapShape, timeout: float = 3600.0) -> OverlapResult:
    shape.check()
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-") as home,
        limited(shape.pp, shape.link, shape.injected) as wires,
    ):
        schedule = "dualpipe-v"
        if shape.pp == 1:
            file = Path(home) / "pairs.txt"
            shape.write(file)
            schedule = str(file)
        asked = (shape, schedule, wires)
        result: OverlapResult = processes.run(shape.pp * EP, "benchmarks.overlap:run", *asked, timeout=timeout)[0]
    return result


# ---- ranks ----------------------------------------------------------------------------------------------------------


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
        self._advance()
        while self.left[exchange] > 0.0:
            time.sleep(min(seconds for seconds in self.left.values() if seconds > 0) * len(self._flying()))
            self._advance()
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
    leave, end = AsyncExchange.start, AsyncExchange.finish

    def left(exchange: AsyncExchange, how: StartCollectives, axis: Axis, tensors: Tensors) -> tuple[()]:
        recorder.mark()
        leave(exchange, how, axis, tensors)
        if delay is not None:
            delay.begin(
                exchange, max(_bytes(tensors), _bytes(exchange.in_flight)) * (EP - 1) // EP
            )  # a share stays here
        return ()

    def ended(exchange: AsyncExchange) -> Tensors:
        recorder.mark()
        come = end(exchange)
        if delay is not None:
            delay.end(exchange)
        recorder.mark()
        return come

    AsyncExchange.start, AsyncExchange.finish = left, ended  # type: ignore[method-assign, assignment]


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
        self.engine.pipeline.overlap_pairs = in_turns
        self.engine.forward_backward(self.batch)
        weights = self.engine.weights
        grads = {name: master.grad.clone() for name, master in weights.masters.items() if master.grad is not None}
        weights.sync_params()
        return grads

    def run(self, in_turns: bool) -> None:
        self.engine.pipeline.overlap_pairs = in_turns
        self.engine.pipeline.run(self.microbatches, lambda total: total / self.batch.loss_tokens)

    def alone(self) -> None:
        """One half after the other, where no rank waits for another's stage: what the passes themselves take."""
        self.recorder.on = True
        with self.engine.pipeline.without_messages():
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
    wanted, got = passes.gradients(in_turns=False), passes.gradients(in_turns=True)
    same = wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)
    passes.engine.pipeline.last_of_stage = set()  # gradients are not summed over ranks: that is no part of a pass

    def after(name: str) -> None:
        passes.engine.weights.sync_params()
        if name == IN_TURN:
            dist.barrier()
            passes.alone()

    systems = {IN_TURN: lambda: passes.run(in_turns=False), IN_TURNS: lambda: passes.run(in_turns=True)}
    times = take_turns(systems, shape.rounds, after=after)
    by_rank = all_gather_values(recorder.passes, list[Pass])
    simulated, hidden = predicted(passes.engine.schedule, list(chain.from_iterable(by_rank)))
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
        place: tuple(Segment(*map(median, zip(*same, strict=True))) for same in zip(*repeats, strict=True))
        for place, repeats in cut.items()
    }
    costs = Costs.measured(seconds, schedule.placement.stages)
    joined = [
        (action.stage, order[at + 1].stage)
        for order in schedule.ranks for at, action in enumerate(order) if action.joined
    ]  # fmt: skip
    pair, saved = dict(enumerate(map(sum, zip(costs.f, costs.b, strict=True)))), []
    for forward, backward in joined:
        played = play_pair(typical[FORWARD, forward], typical[BACKWARD, backward])
        # What is hidden is taken from the measured whole: a median of sums is no sum of medians.
        pair[forward] = costs.f[forward] + costs.b[backward] - played.hidden
        messages = sum(part.message for part in (*typical[FORWARD, forward], *typical[BACKWARD, backward]))
        saved.append(played.hidden / messages if messages else 0.0)
    together = replace(costs, pair=tuple(pair[stage] for stage in range(schedule.placement.stages)))
    made = {IN_TURN: simulate(schedule, costs).makespan, IN_TURNS: simulate(schedule, together).makespan}
    return made, mean(saved) if saved else 0.0


# ---- command --------------------------------------------------------------------------------------------------------


def overlap(
    pp: Annotated[int, typer.Option(help="Pipeline ranks, each with two ranks of ep.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of a rank's batch.")] = 6,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 12,
    link: Annotated[float, typer.Option(help="Mbit/s each way between the two ranks of ep.")] = 50.0,
    rounds: Annotated[int, typer.Option(help="Timed steps of each way, in turns; medians are shown.")] = 7,
    injected: Annotated[bool, typer.Option("--injected", help="Inject the delay, also where tc could limit.")] = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time joined pairs (F&B) of a tiny mixture of experts over a limited link.

    One half after the other is compared with both in turns, as the trainer runs
    them: one computes while the other's tokens travel. The schedule is dualpipe-v;
    with --pp 1, each forward pass joined with the backward pass before it. As root
    the ranks of ep live in two network namespaces, and tc limits their wire;
    otherwise the delay is injected, and the output says so. Gradients must be equal
    to the bit. Beside it stands what the simulator says.

    [dim]Examples:[/]

      python -m benchmarks.overlap

      python -m benchmarks.overlap --pp 1 --layers 4 --rounds 15

      python -m benchmarks.overlap --microbatches 12 --batch 24 --link 100 --json
    """
    show(
        measure(OverlapShape(pp, microbatches, hidden, layers, seq, batch, link, rounds, injected)),
        as_json=as_json,
        output=output,
    )


app = program(overlap)

if __name__ == "__main__":
    from benchmarks import overlap as this_module  # by the name under which ranks unpickle its classes

    main(this_module.app)
