"""`python -m benchmarks.overlap`: joined pairs whose halves run in turns, against one half after the other.

measure(Shape(pp=2, microbatches=6, hidden=128, layers=8, seq=256, batch=12, link=100.0, rounds=5))

Two ranks of ep share the experts of every stage, and their link is limited. Where this process may make network
namespaces (root, with `ip` and `tc`), the two live in one each, and the kernel limits the wire between them; elsewhere
each rank waits as long as its messages would take on such a wire, and the wire is shared by those under way at a time.

The simulator is given what was measured of one half after the other: for each pass its compute, its messages and what
it computes beside them. `schedule.pairs` plays a pair of them by the rule that the trainer runs by, and the clock runs
the schedule with what comes of it.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.bench.harness import Machine, RoundTimes, caveats, refuse, table, too_small
from fivefold.job.config import DataConfig, Job, TrainConfig
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Text
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec

# ---- wires ----------------------------------------------------------------------------------------------------------
# A limited wire between two ranks of ep, for each pipeline rank one: network namespaces and the kernel's token bucket.
#
#     with limited(2, 100.0) as wires:        # Mbit/s each way
#         ranks.run(4, ...)                   # rank r: enter(wires, r) before it opens a connection
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
        for one in ("all", interface):
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/{one}/rp_filter")
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
        data, train = DataConfig(seq=self.seq), TrainConfig(batch=self.batch, device="cpu")
        return Job(model=self.spec, layout=layout, data=data, train=train)

    def check(self) -> None:
        found = too_small(rounds=self.rounds, seq=self.seq, batch=self.batch, pp=self.pp)
        if not 0 < self.link <= 1e6:
            found.append(f"--link {self.link:g} Mbit/s is not a speed; it lies above 0, up to 1,000,000")
        if self.microbatches < 2 * self.pp:
            found.append(f"--microbatches {self.microbatches} with --pp {self.pp} has no pairs; nearest: {2 * self.pp}")
        refuse([*found, *self.spec.problems()])
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
            {"pairs": name, "seconds": median(one), "fastest": min(one), "simulated": self.simulated[name]}
            for name, one in self.times.items()
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
        found = processes.run(shape.pp * EP, "fivefold.bench.overlap_rank:run", *asked, timeout=timeout)
    result: OverlapResult = found[0]
    return result
