"""The check of the lab: stages that a student's executor runs, against one process that has all layers."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.pipeline.lab import LAYERS, SAMPLES, WIDTH, actions
from fivefold.labs.student import Grouped, called, expect, kind_of_value, load_shards, mark, recorded, unlike


class Layers(nn.Module):
    """Some of the layers, by their numbers."""

    def __init__(self, weights: dict[str, Tensor], numbers: range):
        super().__init__()
        self.layers = nn.ParameterDict({f"{number}": weights[f"layers.{number}"].clone() for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in self.layers.items():
            x = F.linear(F.gelu(x) if number != "0" else x, weight)
        return x


class Check(Grouped):
    LAYOUTS = ("pp=2,m=2",)

    def __init__(
        self, schedule: str, samples: int = SAMPLES, width: int = WIDTH, layers: int = LAYERS, even: bool = False
    ):
        self.schedule, self.shape, self.count, self.even = schedule, (samples, width), layers, even
        self.weights = {f"layers.{number}": unlike((width, width), number) for number in range(layers)}

    def KNOWN(self, layout: dict[str, int]) -> dict[str, int]:
        return {"m": layout.get("m", 1)}

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        return self.made(self.weights)

    def made(self, weights: dict[str, Tensor]) -> Layers:
        if not self.layout:
            return Layers(weights, range(self.count))
        rank, stages = self.rank, self.layout["pp"]
        if self.even:
            firsts = [self.count * stage // stages for stage in range(stages + 1)]
        else:  # the first stage has one layer, and the others share the rest
            firsts = [0, *(1 + (self.count - 1) * stage // (stages - 1) for stage in range(stages))]
        return Layers(weights, range(firsts[rank], firsts[rank + 1]))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return unlike(self.shape, 100 + step), unlike(self.shape, 200 + step)

    def step(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        if not self.layout:
            with recorded(self.layout):
                loss = F.mse_loss(model(batch[0]), batch[1])
                loss.backward()
            return {"loss": loss.detach()}
        stages, m = self.layout["pp"], self.layout["m"]
        inputs, targets = (list(side.chunk(m)) for side in batch)
        hooks = [model.register_forward_pre_hook(lambda *_: mark("F")),
                 model.register_full_backward_hook(lambda *_: mark("B"))]  # fmt: skip
        given = actions(self.schedule, stages, m, self.rank)
        shape = (len(inputs[0]), self.shape[1])
        arguments = (given, model, inputs, lambda y, i: F.mse_loss(y, targets[i]), shape, self.group)
        with recorded(self.layout):
            losses = called("run", *arguments)
            last = self.rank == stages - 1
            wanted = f"a list of {m} losses" if last else "[]: the last stage alone has losses"
            held = (
                f"run returns {kind_of_value(losses)}"
                if not isinstance(losses, list)
                else f"run returns {len(losses)} losses"
            )
            expect(isinstance(losses, list) and len(losses) == (m if last else 0), held, wanted)
        for hook in hooks:
            hook.remove()
        if self.rank < stages - 1:
            return {"loss": None}
        return {"loss": sum(loss.detach() for loss in losses) / m}


gpipe, one_f_one_b = Check("gpipe"), Check("1f1b")
bench = Check("1f1b", 1024, 320, 8, even=True)
