"""`python -m benchmarks.attention`: one attention block, tensor-parallel over real ranks, against one process.

measure(Shape(tp=2, hidden=512, heads=8, kv_heads=8, seq=256, batch=4, dtype="float32", rounds=15))

Both have the same weights and the same input.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.bench.harness import refuse, too_small
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.text import did_you_mean

TOLERANCE = 1e-3  # of the exercise; the errors themselves are printed beside it
DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True)
class AttentionShape:
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
        heads, kv_heads, ffn = self.heads, self.kv_heads, max(1, self.heads)
        return ModelSpec(
            name="this block", layers=1, vocab=2, hidden=self.hidden, heads=heads, kv_heads=kv_heads, ffn=ffn
        )

    def check(self) -> None:
        found = too_small(tp=self.tp, seq=self.seq, batch=self.batch, rounds=self.rounds)
        if self.dtype not in DTYPES:
            found.append(f"unknown --dtype {self.dtype!r}; {did_you_mean(self.dtype, DTYPES)}")
        refuse([*found, *self.spec.problems()])
        refuse(Layout(tp=self.tp).problems(self.spec)[:1])  # about heads: the block has no feed-forward part


@dataclass(frozen=True)
class AttentionResult(Result):
    shape: AttentionShape
    errors: dict[str, float]  # max|a-b| / max|b| of the output, the input's gradient and every weight's
    close: bool  # torch.allclose at TOLERANCE, all of them
    alone: float  # seconds of a forward and backward pass, medians
    together: float
    cores: int

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.close

    def to_dict(self) -> dict[str, Any]:
        speed_up = self.alone / self.together
        return asdict(self) | {"speed_up": speed_up, "efficiency": speed_up / self.shape.tp}

    def blocks(self) -> Iterator[Block]:
        shape, tp = self.shape, self.shape.tp
        kv = f" ({shape.kv_heads} for keys and values)" if shape.kv_heads < shape.heads else ""
        yield Text(
            f"attention block, hidden {shape.hidden}, {shape.heads} heads{kv}, {shape.batch} x {shape.seq} tokens, "
            f"{shape.dtype}; {self.cores} cores, one thread a rank"
        )
        yield Table(["tensor", ">max|a-b| / max|b|"], [(name, f"{error:.1e}") for name, error in self.errors.items()])
        how = f"agree at {TOLERANCE:g}" if self.close else f"differ by more than {TOLERANCE:g}"
        yield Text(f"allclose: {tp} ranks and one process {how}\n", "good" if self.close else "bad")
        alone, together, speed_up = self.alone * 1e3, self.together * 1e3, self.alone / self.together
        rows = [
            ("one process", f"{alone:.1f} ms", "1.00", ""),
            (f"tp={tp}", f"{together:.1f} ms", f"{speed_up:.2f}", f"{speed_up / tp:.0%}"),
        ]
        yield Table(["", ">forward + backward", ">speed-up", ">efficiency"], rows)
        if tp > self.cores:
            yield Text(
                f"{tp} ranks share {self.cores} cores: no speed-up beyond {self.cores} is possible here, and "
                "efficiency counts ranks, not cores"
            )


def measure(shape: AttentionShape, timeout: float = 600.0) -> AttentionResult:
    shape.check()
    found: AttentionResult = processes.run(shape.tp, "fivefold.bench.attention_rank:run", shape, timeout=timeout)[0]
    return found
