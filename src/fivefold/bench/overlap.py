"""`fivefold bench overlap`: joined pairs whose halves run in turns, against one half after the other.

measure(Shape(pp=2, microbatches=6, hidden=128, layers=8, seq=256, batch=12, link=100.0, rounds=5))

Two ranks of ep share the experts of every stage, and their link is limited. Where this process may make network
namespaces (root, with `ip` and `tc`), the two live in one each, and the kernel limits the wire between them; elsewhere
each rank waits as long as its messages would take on such a wire, and the wire is shared by those under way at a time.

The simulator is given what was measured of one half after the other: for each pass its compute, its messages and what
it computes beside them. `schedule.pairs` plays a pair of them by the rule that the trainer runs by, and the clock runs
the schedule with what comes of it.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.bench.harness import Machine, Times, caveats, refuse, table, too_small
from fivefold.bench.wires import Wires, limited
from fivefold.job.config import DataConfig, Job, TrainConfig
from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.report import Block, Result, Text
from fivefold.spec.experts import Experts
from fivefold.spec.model import ModelSpec

IN_TURN, IN_TURNS = "one after the other", "in turns"
EP = 2
_HEAD, _VOCABULARY = 32, 512


@dataclass(frozen=True)
class Shape:
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

    shape: Shape
    times: Times
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


def measure(shape: Shape, timeout: float = 3600.0) -> OverlapResult:
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
        found = ranks.run(shape.pp * EP, "fivefold.bench.overlap_rank:run", *asked, timeout=timeout)
    result: OverlapResult = found[0]
    return result


__all__ = ["OverlapResult", "Shape", "Wires", "measure"]
