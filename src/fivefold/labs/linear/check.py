"""The check of the lab: an MLP of a student's two layers against one process of `nn.functional.linear`."""

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.linear.lab import COLUMN, OUT, ROW, THIN, B, D, S
from fivefold.labs.student import Grouped, called, load_shards, probe, recorded, unlike


class MLP(nn.Module):
    """x is a parameter: its gradient is what the layers hand back to the ones before them."""

    def __init__(self, weights: dict[str, Tensor], first: nn.Module, second: nn.Module):
        super().__init__()
        self.x = nn.Parameter(weights["x"].clone())
        self.first, self.second = first, second

    def forward(self, layout: dict[str, int]) -> Tensor:
        inner = self.first(self.x)
        probe(layout, COLUMN, inner)
        output = self.second(F.gelu(inner))
        probe(layout, ROW, output)
        return output


class Whole(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Check(Grouped):
    def __init__(self, shape: tuple[int, ...], hidden: int, out: int):
        self.shape, self.out = shape, out
        sizes = {"x": shape, "first.weight": (hidden, shape[-1]), "first.bias": (hidden,),
                 "second.weight": (out, hidden), "second.bias": (out,)}  # fmt: skip
        self.weights = {name: unlike(size, seed) for seed, (name, size) in enumerate(sizes.items())}
        self.LAYOUTS = ["tp=2"]

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        return self.made(self.weights, alone=not layout)

    def made(self, weights: dict[str, Tensor], alone: bool) -> nn.Module:
        pairs = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in ("first", "second")]
        if alone:
            return MLP(weights, *(Whole(*pair) for pair in pairs))
        names = "ColumnParallelLinear", "RowParallelLinear"
        return MLP(weights, *(called(name, *pair, self.group) for name, pair in zip(names, pairs, strict=True)))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full, alone=not self.layout), full)

    def batch(self, step: int) -> Tensor:
        """What each element of the output counts in the loss, so that no two errors cancel."""
        return unlike((*self.shape[:-1], self.out), 100 + step)

    def step(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        with recorded(self.layout):
            output = model(self.layout)
            loss = (output * batch).sum()
            loss.backward()
        return {"loss": loss.detach()}


mlp = Check((B, S, D), 24, D)
thin = Check(THIN, 12, OUT)
bench = Check((8, 128, 256), 1024, 256)
