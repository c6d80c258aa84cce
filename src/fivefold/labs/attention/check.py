"""The check of the lab: a student's attention on every rank against one process's."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.attention.lab import HEAD, HEADS, MIXED, SUMMED, B, D, S
from fivefold.labs.student import Grouped, called, load_shards, probe, recorded, run_through, unlike


class Whole(nn.Module):
    """One process, by PyTorch's own kernel."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, kv_heads: int, group: Any):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(weight.clone()) for weight in (q, k, v, o))
        self.head, self.shared = q.shape[0] // heads, heads // kv_heads

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, weight).unflatten(-1, (-1, self.head)).transpose(1, 2) for weight in (self.q, self.k, self.v)
        )
        k, v = (side.repeat_interleave(self.shared, dim=1) for side in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def project(self, mixed: Tensor) -> Tensor:
        return F.linear(mixed, self.o)


class Model(nn.Module):
    """x is a parameter: its gradient is what the layer hands back to the ones before it."""

    def __init__(self, weights: dict[str, Tensor], attention: Any):
        super().__init__()
        self.x, self.attention = nn.Parameter(weights["x"].clone()), attention

    def forward(self, layout: dict[str, int]) -> Tensor:
        output = run_through(layout, self.attention, {"attend": MIXED, "project": ""}, self.x)
        probe(layout, SUMMED, output)
        return output


class Check(Grouped):
    def __init__(self, kv_heads: int, heads: int = HEADS, head: int = HEAD, shape: tuple[int, int, int] = (B, S, D)):
        self.kv_heads, self.heads, self.shape, width = kv_heads, heads, shape, shape[-1]
        kv = (kv_heads * head, width)
        sizes = {"q": (heads * head, width), "k": kv, "v": kv, "o": (width, heads * head)}
        self.weights = {"x": unlike(shape, 0)}
        self.weights |= {f"attention.{name}": unlike(size, 1 + seed) for seed, (name, size) in enumerate(sizes.items())}
        self.LAYOUTS = ["tp=2"]

    def build(self, layout: dict[str, int]) -> nn.Module:
        self.join(layout)
        return self.made(self.weights)

    def made(self, weights: dict[str, Tensor]) -> nn.Module:
        values = [weights[f"attention.{name}"] for name in "qkvo"]
        given: list[Any] = [*values, self.heads, self.kv_heads, self.group]
        return Model(weights, called("TensorParallelAttention", *given) if self.layout else Whole(*given))

    def load(self, model: nn.Module, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full), full)

    def batch(self, step: int) -> Tensor:
        """What each element of the output counts in the loss, so that no two errors cancel."""
        return unlike(self.shape, 100 + step)

    def step(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        with recorded(self.layout):
            loss = (model(self.layout) * batch).sum()
            loss.backward()
        return {"loss": loss.detach()}


heads, grouped, paired, shared = Check(8), Check(4), Check(2), Check(1)
bench = Check(8, heads=8, head=32, shape=(4, 256, 256))
