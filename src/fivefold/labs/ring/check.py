"""The check of the lab: a student's function on parts of a sequence, against one process's kernel on all of it."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.labs.ring.lab import OUTPUT, TOKENS, B, D, H
from fivefold.labs.student import Grouped, called, load_shards, probe, recorded, unlike


class Sides(nn.Module):
    """q, k and v are parameters: their gradients are compared."""

    def __init__(self, sides: dict[str, Tensor]):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(sides[name].clone()) for name in "qkv")


class Check(Grouped):
    LAYOUTS = ("cp=2",)

    def __init__(self, causal: bool, scale: float = 1.0, shape: tuple[int, ...] = (B, H, TOKENS, D)):
        self.causal, self.shape = causal, shape
        self.weights = {name: unlike(shape, seed) * scale for seed, name in enumerate("qkv")}

    def build(self, layout: dict[str, int]) -> Sides:
        self.join(layout)
        return self.made(self.weights)

    def made(self, weights: dict[str, Tensor]) -> Sides:
        return Sides({name: self.own(weight) for name, weight in weights.items()})

    def own(self, side: Tensor) -> Tensor:
        """This rank's tokens."""
        return side.chunk(self.ranks, dim=2)[self.rank]

    def load(self, model: Sides, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full))

    def batch(self, step: int) -> Tensor:
        """What each element of the output counts in the loss, so that no two errors cancel."""
        return unlike(self.shape, 100 + step)

    def step(self, model: Sides, batch: Tensor) -> dict[str, Tensor]:
        sides = model.q, model.k, model.v
        with recorded(self.layout):
            if self.layout:
                output = called("ring_attention", *sides, self.causal, self.group)
            else:
                with sdpa_kernel(SDPBackend.MATH):  # a fused kernel is another matter than how many ranks there are
                    output = F.scaled_dot_product_attention(*sides, is_causal=self.causal)
            probe(self.layout, OUTPUT, output)
            loss = (output * self.own(batch)).sum()
            loss.backward()
        return {"loss": self.total(loss)}


whole, causal, large = Check(False), Check(True), Check(True, 30.0)
bench = Check(True, shape=(2, 4, 1024, 32))
