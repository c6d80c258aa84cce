"""The check of the lab: two layers on ranks with a part of the samples each, against one process with all of them."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.student import called, load_shards, mark, probe, recorded, unlike
from fivefold.labs.zero.lab import LAYER, LR, MOMENTUM, SAMPLES, SIZES, WIDTHS


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


class Check:
    LAYOUTS = ("dp=2",)
    optimizer: Any = None
    layout: dict[str, int]

    def __init__(self, sharded: bool, samples: int = SAMPLES, widths: tuple[int, ...] = WIDTHS):
        self.sharded, self.samples, self.widths = sharded, samples, widths
        pairs = zip(("first", "second"), pairwise(widths), strict=True)
        self.weights = {f"{name}.weight": unlike((out, wide), wide) for name, (wide, out) in pairs}

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.layout = layout
        model = self.made(self.weights)
        given = list(model.parameters()), LR, MOMENTUM
        if layout and not self.sharded:
            self.optimizer = called("ZeroOneSGD", *given, dist.group.WORLD)
        else:
            self.optimizer = torch.optim.SGD(given[0], lr=LR, momentum=MOMENTUM)
        return model

    def made(self, weights: dict[str, Tensor]) -> Layers:
        values = (weights["first.weight"], weights["second.weight"])
        if self.layout and self.sharded:
            return Layers(*(called("ShardedLinear", weight, dist.group.WORLD) for weight in values))
        return Layers(*map(Whole, values))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full), full)
        if self.layout and not self.sharded:  # its shards are copies of weights
            self.optimizer = called("ZeroOneSGD", list(model.parameters()), LR, MOMENTUM, dist.group.WORLD)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return unlike((self.samples, self.widths[0]), 100 + step), unlike((self.samples, self.widths[-1]), 200 + step)

    def step(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = (side.chunk(dist.get_world_size())[dist.get_rank()] for side in batch)
        with recorded(self.layout), torch.autograd.graph.saved_tensors_hooks(self.kept, lambda tensor: tensor):
            loss = F.mse_loss(model(x, self.layout), y)
            loss.backward()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        self.means = {}
        for parameter in model.parameters():
            self.means[parameter] = parameter.grad.clone()
            if not self.sharded:  # whose gradients are reduced in the optimizer's step
                dist.all_reduce(self.means[parameter])
                self.means[parameter] /= dist.get_world_size()
        return {"loss": total}

    def kept(self, tensor: Tensor) -> Tensor:
        """Forward keeps this for backward."""
        if (
            self.layout
            and self.sharded
            and tensor.numel() in SIZES
            and tensor.shape[0] != SAMPLES // dist.get_world_size()
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
        model.zero_grad()
        return {}


stage1, stage3 = Check(False), Check(True)
bench = Check(True, 512, (512, 2048, 512))
