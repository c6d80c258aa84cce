"""The check of the lab: a block between two parts of a sequence, against one process that has all of it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.sequence.lab import GATHERED, HIDDEN, NORMED, OUTPUT, B, D
from fivefold.labs.student import Grouped, called, load_shards, probe, recorded, run_through, unlike

NAMES = ("weight", "bias", "up", "down")
METHODS = {"norm": NORMED, "gather": GATHERED, "mlp": "", "scatter": ""}


class Whole(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor, group: Any):
        super().__init__()
        self.weight, self.bias, self.up, self.down = (nn.Parameter(one.clone()) for one in (weight, bias, up, down))

    def forward(self, x: Tensor) -> Tensor:
        return self.scatter(self.mlp(self.gather(self.norm(x))))

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def mlp(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)

    def scatter(self, summand: Tensor) -> Tensor:
        return summand


class Model(nn.Module):
    """x is a parameter: its gradient is what the block hands back to the one before it."""

    def __init__(self, x: Tensor, norm: Any):
        super().__init__()
        self.x, self.norm = nn.Parameter(x.clone()), norm

    def forward(self, layout: dict[str, int]) -> Tensor:
        output = run_through(layout, self.norm, METHODS, self.x)
        probe(layout, OUTPUT, output)
        return output


class Check(Grouped):
    LAYOUTS = ("tp=2",)

    def __init__(self, tokens: int, sequences: int = B, width: int = D, hidden: int = HIDDEN):
        self.shape = (sequences, tokens, width)
        sizes = dict(zip(NAMES, ((width,), (width,), (hidden, width), (width, hidden)), strict=True))
        self.weights = {"x": unlike(self.shape, 0)}
        self.weights |= {f"norm.{name}": unlike(size, 1 + seed) for seed, (name, size) in enumerate(sizes.items())}

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        return self.made(self.weights)

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens."""
        return x.chunk(self.ranks, dim=1)[self.rank]

    def made(self, weights: dict[str, Tensor]) -> nn.Module:
        given: list[Any] = [*(weights[f"norm.{name}"] for name in NAMES), self.group]
        block = called("SequenceParallelMLP", *given) if self.layout else Whole(*given)
        return Model(self.own(weights["x"]), block)

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full), full)

    def batch(self, step: int) -> Tensor:
        """What each element of the output counts in the loss, so that no two errors cancel."""
        return unlike(self.shape, 100 + step)

    def step(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        with recorded(self.layout):
            loss = (model(self.layout) * self.own(batch)).sum()
            loss.backward()
        return {"loss": self.total(loss)}


six, eight = Check(6), Check(8)
bench = Check(512, 4, 256, 1024)
