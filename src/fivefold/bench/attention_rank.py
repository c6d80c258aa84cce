"""One rank of the lab: the attention block alone and together, in turns, so that both meet the same noise."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bench.attention import ASKED, Result, Shape
from fivefold.launch.cores import cores
from fivefold.launch.device import DTYPES
from fivefold.launch.ranks import Rank
from fivefold.layout.layout import Layout
from fivefold.model.decoder import Attention, Decoder
from fivefold.model.positions import TokenPositions
from fivefold.parallel.gather_full import whole
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.ops import verbs_of
from fivefold.parallel.tensor import TensorParallel
from fivefold.parallel.zero import spread


class Block:
    """The attention of a one-layer decoder under a layout, and one pass through it."""

    def __init__(self, shape: Shape, mesh: Mesh):
        ops = verbs_of(shape.spec, mesh)
        with torch.device("meta"):
            model = Decoder(shape.spec, ops=ops)
        if isinstance(ops, TensorParallel):
            ops.adopt(model)
        self.weights = spread([model], shape.spec, mesh, DTYPES[shape.dtype], seed=0)
        attention = model.layers["0"].attention
        assert isinstance(attention, Attention)
        self.attention = attention
        place = TokenPositions.of(torch.zeros(shape.batch, shape.seq, dtype=torch.int64))
        self.rotation, self.sight = model.rotation(place, DTYPES[shape.dtype]), ops.sight(place)

    def run(self, x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Output and input gradient; the weights' gradients are left where the optimizer would find them."""
        x = x.detach().requires_grad_()
        with self.weights.microbatch(last=True):
            y = self.attention(x, self.rotation, self.sight)
            y.backward(slope)
        assert x.grad is not None
        return y.detach(), x.grad

    def gradients(self) -> dict[str, Tensor]:
        self.weights.finish()
        prefix = "layers.0.attention."
        found = {}
        for name, master in self.weights.masters.items():
            if name.startswith(prefix):
                assert master.grad is not None
                found[name.removeprefix(prefix)] = whole(self.weights.globally(name, master.grad))
        return found


def run(rank: Rank, shape: Shape) -> Result | None:
    torch.set_num_threads(1)  # what is compared is ranks, not threads
    rank.join("gloo")
    cpu = torch.device("cpu")
    random = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, shape.batch, shape.seq, shape.hidden, generator=random).to(DTYPES[shape.dtype])
    together = Block(shape, Mesh.of(Layout(tp=shape.tp), cpu))
    alone = Block(shape, Mesh.of(Layout(), cpu)) if rank.number == 0 else None
    got = dict(zip(("output", "input gradient"), together.run(x, slope), strict=True)) | together.gradients()
    want = {}
    if alone is not None:
        want = dict(zip(("output", "input gradient"), alone.run(x, slope), strict=True)) | alone.gradients()
    times: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(shape.rounds):
        for name, block in (("alone", alone), ("together", together)):
            dist.barrier()
            if block is not None:
                start = time.perf_counter()
                block.run(x, slope)
                if name == "together":
                    dist.barrier()  # the slowest rank is the time
                times[name].append(time.perf_counter() - start)
    if alone is None:
        return None
    return Result(
        errors={name: ((got[name] - one).abs().max() / one.abs().max()).item() for name, one in want.items()},
        close=all(torch.allclose(got[name], one, rtol=ASKED, atol=ASKED) for name, one in want.items()),
        alone=statistics.median(times["alone"]),
        together=statistics.median(times["together"]),
        cores=cores(),
    )
