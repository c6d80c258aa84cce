"""The check of the lab: two layers on ranks with a part of the samples each, against one process with all of them."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.messages import APART
from fivefold.labs.student import Grouped, called, load_shards, mark, probe, recorded, unlike
from fivefold.labs.zero.lab import LAYER, LR, MOMENTUM, SAMPLES, STAGE_1, STAGE_3, sizes_of


class Whole(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Layers(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, layout: dict[str, int]) -> Tensor:
        inner = self.first(x)
        probe(layout, LAYER, inner)
        return self.second(F.gelu(inner))


class Check(Grouped):
    LAYOUTS = ("dp=2",)
    optimizer: Any = None

    def __init__(self, sharded: bool, widths: tuple[int, ...], samples: int = SAMPLES):
        self.sharded, self.samples, self.widths = sharded, samples, widths
        pairs = zip(("first", "second"), pairwise(widths), strict=True)
        self.weights = {f"{name}.weight": unlike((out, wide), wide) for name, (wide, out) in pairs}

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        model = self.made(self.weights)
        given = list(model.parameters()), LR, MOMENTUM
        if layout and not self.sharded:
            self.optimizer = called("ZeroOneSGD", *given, self.group)
        else:
            self.optimizer = torch.optim.SGD(given[0], lr=LR, momentum=MOMENTUM)
        return model

    def made(self, weights: dict[str, Tensor]) -> Layers:
        values = (weights["first.weight"], weights["second.weight"])
        if self.layout and self.sharded:
            return Layers(*(called("ShardedLinear", weight, self.group) for weight in values))
        return Layers(*map(Whole, values))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full), full)
        if self.layout and not self.sharded:  # its shards are copies of weights
            self.optimizer = called("ZeroOneSGD", list(model.parameters()), LR, MOMENTUM, self.group)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return unlike((self.samples, self.widths[0]), 100 + step), unlike((self.samples, self.widths[-1]), 200 + step)

    def step(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = (side.chunk(self.ranks)[self.rank] for side in batch)
        with recorded(self.layout), torch.autograd.graph.saved_tensors_hooks(self.kept, lambda tensor: tensor):
            loss = F.mse_loss(model(x, self.layout), y)
            loss.backward()
        self.means = {}
        for parameter in model.parameters():
            own = parameter.grad
            # Of ZeRO 1 they are reduced in the optimizer's step, which is not compared yet.
            self.means[parameter] = own.clone() if self.sharded else self.total(own) / self.ranks
        return {"loss": self.total(loss) / self.ranks}

    def kept(self, tensor: Tensor) -> Tensor:
        """Forward keeps this for backward."""
        if (
            self.layout
            and self.sharded
            and tensor.numel() in sizes_of(self.widths)
            and tensor.shape[0] != self.samples // self.ranks
        ):
            mark("state", tensor.numel())
        return tensor

    def grad(self, parameter: nn.Parameter) -> Tensor:
        return self.means[parameter]

    def update(self, model: nn.Module) -> dict[str, Tensor]:
        with recorded(self.layout, again=True):
            self.optimizer.step()
            if self.layout and not self.sharded:
                states = self.optimizer.optimizer.state.values()
                mark("state", sum(one.numel() for state in states for one in state.values() if isinstance(one, Tensor)))
        if self.layout and not self.sharded:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            apart = self.total((self.total(flat) / self.ranks - flat).abs().amax()) > 1e-9
            with recorded(self.layout, again=True):
                if apart:
                    mark(APART)
        model.zero_grad()
        return {}


stage1, stage3 = Check(False, STAGE_1), Check(True, STAGE_3)
bench = Check(True, (512, 2048, 512), 512)
