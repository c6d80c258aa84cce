"""One rank of `python -m benchmarks.attention`: the block alone and together, in turns."""

import torch
from torch import Tensor

from fivefold.bench.attention import TOLERANCE, AttentionResult, AttentionShape
from fivefold.bench.systems import CPU, enter, take_turns
from fivefold.launch.device import DTYPES
from fivefold.launch.host import cores
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.model.attention import Attention
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import shard_model
from fivefold.parallel.tensor import TensorParallel, ops_of


class AttentionBlock:
    """The attention of a one-layer decoder under a layout, and one pass through it."""

    def __init__(self, shape: AttentionShape, mesh: Mesh):
        ops = ops_of(shape.spec, mesh)
        with torch.device("meta"):
            model = Decoder(shape.spec, ops=ops)
        if isinstance(ops, TensorParallel):
            ops.adopt(model)
        self.weights = shard_model([model], shape.spec, mesh, DTYPES[shape.dtype], seed=0)
        attention = model.layers["0"].attention
        assert isinstance(attention, Attention)
        self.attention = attention
        positions = TokenPositions.of(torch.zeros(shape.batch, shape.seq, dtype=torch.int64))
        self.rotation, self.mask = model.rotation(positions, DTYPES[shape.dtype]), ops.attention_mask(positions)

    def run(self, x: Tensor, output_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Output and input gradient; the weights' gradients are left where the optimizer would find them."""
        x = x.detach().requires_grad_()
        with self.weights.microbatch(last=True):
            y = self.attention(x, self.rotation, self.mask)
            y.backward(output_grad)
        assert x.grad is not None
        return y.detach(), x.grad

    def tensors(self, x: Tensor, output_grad: Tensor) -> dict[str, Tensor]:
        """What one pass computes: output and all gradients; collective."""
        found = dict(zip(("output", "input gradient"), self.run(x, output_grad), strict=True))
        self.weights.finish_grad_sync()
        prefix = "layers.0.attention."
        for name, master in self.weights.masters.items():
            if name.startswith(prefix):
                assert master.grad is not None
                found[name.removeprefix(prefix)] = full_tensor(self.weights.as_dtensor(name, master.grad))
        return found


def run(rank: Rank, shape: AttentionShape) -> AttentionResult | None:
    enter(rank)
    random = torch.Generator().manual_seed(0)
    x, output_grad = torch.randn(2, shape.batch, shape.seq, shape.hidden, generator=random).to(DTYPES[shape.dtype])
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
        errors={name: ((got[name] - one).abs().max() / one.abs().max()).item() for name, one in want.items()},
        close=all(torch.allclose(got[name], one, rtol=TOLERANCE, atol=TOLERANCE) for name, one in want.items()),
        alone=seconds.median("alone"),
        together=seconds.median("together"),
        cores=cores(),
    )
