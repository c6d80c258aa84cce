"""The check of the lab: ranks with a part of the samples each against one process with all of them."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.data_parallel.lab import BUCKET, SAMPLES, START, WIDTHS
from fivefold.labs.student import TIMERS, Grouped, called, load_shards, mark, mark_waits, probe, recorded, unlike


class Layers(nn.Module):
    def __init__(self, weights: dict[str, Tensor], tied: bool):
        super().__init__()
        self.order = [0, 1, 1, 2] if tied else list(range(len(weights) // 2))
        self.weights = nn.ParameterList()
        for index in sorted(set(self.order)):
            for name in ("weight", "bias"):
                self.weights.append(nn.Parameter(weights[f"{index}.{name}"].clone()))

    def forward(self, x: Tensor) -> Tensor:
        for place, index in enumerate(self.order):
            x = F.linear(F.gelu(x) if place else x, self.weights[2 * index], self.weights[2 * index + 1])
        return x


class Check(Grouped):
    LAYOUTS = ("dp=2",)

    def __init__(self, tied: bool, samples: int = SAMPLES, widths: tuple[int, ...] = WIDTHS, bucket: int = BUCKET):
        self.tied, self.samples, self.widths, self.bucket = tied, samples, widths, bucket
        self.weights: dict[str, Tensor] = {}
        for index, (wide, out) in enumerate(pairwise(widths)):
            self.weights |= {f"{index}.weight": unlike((out, wide), index), f"{index}.bias": unlike((out,), 10 + index)}

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        if layout and not TIMERS:
            mark_waits("all_reduce")
        other = {name: weight + self.rank for name, weight in self.weights.items()}
        model = self.made(other)
        probe(layout, START, self.inner(model).weights[-1])
        self.inner(model).weights[0].register_post_accumulate_grad_hook(lambda _: mark("backward"))
        return model

    def made(self, weights: dict[str, Tensor]) -> nn.Module:
        layers = Layers(weights, self.tied)
        return called("DataParallel", layers, self.group, self.bucket) if self.layout else layers

    def inner(self, model: nn.Module) -> Layers:
        return model.module if self.layout else model  # type: ignore[return-value]

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        names = [f"{index}.{name}" for index in range(len(self.widths) - 1) for name in ("weight", "bias")]
        return list(zip(names, self.inner(model).weights, strict=True))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(self.inner(model), Layers(full, self.tied))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return unlike((self.samples, self.widths[0]), 100 + step), unlike((self.samples, self.widths[-1]), 200 + step)

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = (side.chunk(self.ranks)[self.rank] for side in batch)
        with recorded(self.layout):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if self.layout:
                model.finish()  # type: ignore[operator]
        return {"loss": self.total(loss) / self.ranks}


layers, tied = Check(False), Check(True)
bench = Check(False, 512, (512,) * 7, 4 << 20)
