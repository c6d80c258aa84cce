"""The lab: one attention block, tensor-parallel over real ranks, against one process. Same weights, same input.

measure(Shape(tp=2, hidden=512, heads=8, kv_heads=8, seq=256, batch=4, dtype="float32", rounds=15))
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

ASKED = 1e-3  # the tolerance of the exercise; what is reached is printed beside it
DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """What is measured."""

    tp: int
    hidden: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    dtype: str
    rounds: int

    @property
    def spec(self) -> ModelSpec:
        """A decoder of one layer around the block; its MLP and vocabulary are not run."""
        return ModelSpec(
            name="this block",
            layers=1,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=max(1, self.heads),
            vocab=2,
        )

    def check(self) -> None:
        """Every problem at once, before any process starts."""
        found = [
            f"--{field} {value} must be at least 1"
            for field in ("tp", "seq", "batch", "rounds")
            if (value := getattr(self, field)) < 1
        ]
        if self.dtype not in DTYPES:
            found.append(f"unknown --dtype {self.dtype!r}; {did_you_mean(self.dtype, list(DTYPES))}")
        found += self.spec.problems()
        if not found:
            found = Layout(tp=self.tp).problems(self.spec)[:1]  # about heads: the block has no feed-forward part
        if found:
            raise UserError(found)


@dataclass(frozen=True)
class Result:
    errors: dict[str, float]  # max|a-b| / max|b| of the output, the input's gradient and every weight's
    close: bool  # torch.allclose at ASKED, all of them
    alone: float  # seconds of a forward and backward pass, medians
    together: float
    cores: int

    @property
    def speed_up(self) -> float:
        return self.alone / self.together


def measure(shape: Shape, timeout: float = 600.0) -> Result:
    shape.check()
    return ranks.run(shape.tp, "fivefold.bench.attention_rank:run", shape, timeout=timeout)[0]


def rows(shape: Shape, result: Result) -> dict[str, Any]:
    efficiency = result.speed_up / shape.tp
    return {"shape": asdict(shape), **asdict(result), "speed_up": result.speed_up, "efficiency": efficiency}


def report(console: Console, shape: Shape, result: Result) -> None:
    kv = f" ({shape.kv_heads} for keys and values)" if shape.kv_heads < shape.heads else ""
    console.print(
        f"attention block, hidden {shape.hidden}, {shape.heads} heads{kv}, {shape.batch} x {shape.seq} tokens, "
        f"{shape.dtype}; {result.cores} cores, one thread a rank"
    )
    errors = Table(box=None, header_style="bold", pad_edge=False)
    errors.add_column("tensor")
    errors.add_column("max|a-b| / max|b|", justify="right")
    for name, error in result.errors.items():
        errors.add_row(name, f"{error:.1e}")
    console.print(errors)
    verdict = f"[green]agree[/] at {ASKED:g}" if result.close else f"[red]differ[/] by more than {ASKED:g}"
    console.print(f"allclose: {shape.tp} ranks and one process {verdict}\n")
    times = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "forward + backward", "speed-up", "efficiency"):
        times.add_column(heading, justify="right" if heading else "left")
    times.add_row("one process", f"{result.alone * 1e3:.1f} ms", "1.00", "")
    speed_up = result.speed_up
    times.add_row(f"tp={shape.tp}", f"{result.together * 1e3:.1f} ms", f"{speed_up:.2f}", f"{speed_up / shape.tp:.0%}")
    console.print(times)
    if shape.tp > result.cores:
        console.print(
            f"{shape.tp} ranks share {result.cores} cores: no speed-up beyond {result.cores} is possible here, and "
            "efficiency counts ranks, not cores"
        )
