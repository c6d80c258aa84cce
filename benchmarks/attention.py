"""`python -m benchmarks.attention`: one attention block, tensor-parallel over real ranks, against one process.

measure(AttentionShape(tp=2, hidden=512, heads=8, kv_heads=8, seq=256, batch=4, dtype="float32", rounds=15))

Both have the same weights and the same input.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fivefold.bench.harness import refuse, too_small
from fivefold.bench.rank_timing import CPU, join_ranks, take_turns
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.launch import processes
from fivefold.launch.device import TORCH_DTYPES
from fivefold.launch.host import cores
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.model.attention import Attention
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import MixerInputs
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.data_parallel import shard_model
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import TensorParallel, ops_of
from fivefold.render.blocks import Block, Result, Table, Text, show
from fivefold.spec.model import ModelSpec
from fivefold.support.dtypes import DTYPES, dtype_of
from fivefold.support.text import did_you_mean

TOLERANCE = 1e-3  # of the exercise; the errors themselves are printed beside it


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
        problems = too_small(tp=self.tp, seq=self.seq, batch=self.batch, rounds=self.rounds)
        if self.dtype not in DTYPES:
            problems.append(f"unknown --dtype {self.dtype!r}; {did_you_mean(self.dtype, DTYPES)}")
        refuse([*problems, *self.spec.problems()])
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
    result: AttentionResult = processes.run(shape.tp, "benchmarks.attention:run", shape, timeout=timeout)[0]
    return result


# ---- ranks ----------------------------------------------------------------------------------------------------------


class AttentionBlock:
    """The attention of a one-layer decoder under a layout, and one pass through it."""

    def __init__(self, shape: AttentionShape, mesh: Mesh):
        ops = ops_of(shape.spec, mesh)
        with torch.device("meta"):
            model = Decoder(shape.spec, ops=ops)
        if isinstance(ops, TensorParallel):
            ops.shard_parameters(model)
        self.weights = shard_model([model], shape.spec, mesh, TORCH_DTYPES[shape.dtype], seed=0)
        attention = model.layers["0"].attention
        assert isinstance(attention, Attention)
        self.attention = attention
        positions = TokenPositions.of(torch.zeros(shape.batch, shape.seq, dtype=torch.int64))
        rotation = model.rotation(positions, TORCH_DTYPES[shape.dtype])
        self.shared = MixerInputs(positions, rotation, ops.attention_mask(positions))

    def run(self, x: Tensor, output_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Output and input gradient; the weights' gradients are left where the optimizer would find them."""
        x = x.detach().requires_grad_()
        with self.weights.microbatch(last=True):
            y = self.attention(x, self.shared)
            y.backward(output_grad)
        assert x.grad is not None
        return y.detach(), x.grad

    def tensors(self, x: Tensor, output_grad: Tensor) -> dict[str, Tensor]:
        """What one pass computes: output and all gradients; collective."""
        tensors = dict(zip(("output", "input gradient"), self.run(x, output_grad), strict=True))
        self.weights.finish_grad_sync()
        prefix = "layers.0.attention."
        for name, master in self.weights.masters.items():
            if name.startswith(prefix):
                assert master.grad is not None
                tensors[name.removeprefix(prefix)] = full_tensor(self.weights.as_dtensor(name, master.grad))
        return tensors


def run(rank: Rank, shape: AttentionShape) -> AttentionResult | None:
    join_ranks(rank)
    random, dtype = torch.Generator().manual_seed(0), TORCH_DTYPES[shape.dtype]
    x, output_grad = torch.randn(2, shape.batch, shape.seq, shape.hidden, generator=random).to(dtype)
    together = AttentionBlock(shape, Mesh.of(Layout(tp=shape.tp), CPU))
    alone = AttentionBlock(shape, Mesh.of(Layout(), CPU)) if rank.number == 0 else None
    got, want = together.tensors(x, output_grad), alone.tensors(x, output_grad) if alone else {}
    calls = {
        "alone": (lambda: alone.run(x, output_grad)) if alone else None,
        "together": lambda: together.run(x, output_grad),
    }
    seconds = take_turns(calls, shape.rounds, alone=("alone",))
    if alone is None:
        return None
    return AttentionResult(
        shape,
        errors={name: ((got[name] - wanted).abs().max() / wanted.abs().max()).item() for name, wanted in want.items()},
        close=all(torch.allclose(got[name], wanted, rtol=TOLERANCE, atol=TOLERANCE) for name, wanted in want.items()),
        alone=seconds.median("alone"),
        together=seconds.median("together"),
        cores=cores(),
    )


# ---- command --------------------------------------------------------------------------------------------------------


def attention(
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width of the block.")] = 512,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads; 0: as many as heads.")] = 0,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Timed passes of each kind, in turns; medians are shown.")] = 15,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run one attention block over real ranks and in one process, and compare.

    The same weights and input go through both: outputs and all gradients must
    agree, and forward and backward passes are timed in turns. One rank has one
    thread. Ranks beyond the machine's cores share them, and the table says so.

    [dim]Examples:[/]

      python -m benchmarks.attention --tp 2

      python -m benchmarks.attention --tp 4 --hidden 1024 --heads 16 --kv-heads 4

      python -m benchmarks.attention --dtype float64 --json
    """
    show(
        measure(AttentionShape(tp, hidden, heads, kv_heads or heads, seq, batch, dtype_of(dtype), rounds)),
        as_json=as_json,
        output=output,
    )


app = program(attention)

if __name__ == "__main__":
    from benchmarks import attention as this_module  # by the name under which ranks unpickle its classes

    main(this_module.app)
