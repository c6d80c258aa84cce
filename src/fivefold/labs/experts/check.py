"""The check of the lab: experts on several ranks against one process that has all of them, and all tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.labs.experts.lab import EXPERTS, HIDDEN, OUTPUT, TOP, D
from fivefold.labs.student import Grouped, called, load_shards, probe, recorded, unlike

NAMES = ("router", "up", "down")


class Whole(nn.Module):
    """Every expert computes every token, and the weights of those that were not chosen are 0."""

    def __init__(self, router: Tensor, up: Tensor, down: Tensor):
        super().__init__()
        self.router, self.up, self.down = (nn.Parameter(weight.clone()) for weight in (router, up, down))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = (x @ self.router.T).topk(TOP)
        weights = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, scores.softmax(-1))
        inner = F.gelu(torch.einsum("td,ehd->teh", x, self.up))
        return torch.einsum("teh,edh,te->td", inner, self.down, weights)


class Chosen(Whole):
    """An expert computes the tokens that chose it: what is timed against."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = (x @ self.router.T).topk(TOP)
        weights, output = scores.softmax(-1), torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            given = F.linear(F.gelu(F.linear(x[token], up)), down) * weights[token, place].unsqueeze(-1)
            output = output.index_add(0, token, given)
        return output


class Model(nn.Module):
    """x is a parameter: its gradient is what the layer hands back to the ones before it."""

    def __init__(self, x: Tensor, moe: nn.Module):
        super().__init__()
        self.x, self.moe = nn.Parameter(x.clone()), moe


class Check(Grouped):
    LAYOUTS = ("ep=2",)

    def __init__(self, tokens: int, width: int = D, hidden: int = HIDDEN, alone: type[Whole] = Whole):
        self.shape, self.alone = (tokens, width), alone
        sizes = dict(zip(NAMES, ((EXPERTS, width), (EXPERTS, hidden, width), (EXPERTS, width, hidden)), strict=True))
        self.weights = {"x": unlike(self.shape, 0)}
        self.weights |= {f"moe.{name}": unlike(size, 1 + seed) for seed, (name, size) in enumerate(sizes.items())}

    def build(self, layout: dict[str, int]) -> Model:
        self.join(layout)
        return self.made(self.weights)

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens: all but the last rank have as many as the first, if there are as many."""
        parts = list(x.split(-(-len(x) // self.ranks)))
        return parts[self.rank] if self.rank < len(parts) else x[:0]

    def made(self, weights: dict[str, Tensor]) -> Model:
        given = [weights[f"moe.{name}"] for name in NAMES]
        moe = called("ExpertParallelMoE", *given, TOP, self.group) if self.layout else self.alone(*given)
        return Model(self.own(weights["x"]), moe)

    def load(self, model: Model, full: dict[str, Tensor]) -> None:
        load_shards(model, self.made(full), full)

    def batch(self, step: int) -> Tensor:
        """What each element of the output counts in the loss, so that no two errors cancel."""
        return unlike(self.shape, 100 + step)

    def step(self, model: Any, batch: Tensor) -> dict[str, Tensor]:
        with recorded(self.layout):
            output = model.moe(model.x)
            probe(self.layout, OUTPUT, output)
            loss = (output * self.own(batch)).sum()
            loss.backward()
        router = model.moe.router
        # As data parallelism does, which is another lab.
        self.summed = self.total(torch.zeros_like(router) if router.grad is None else router.grad)
        self.router = router
        return {"loss": self.total(loss)}

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        return self.summed if parameter is self.router else parameter.grad


tokens, few = Check(10), Check(3)
bench = Check(2048, 256, 512, Chosen)
