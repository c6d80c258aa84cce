"""Where the ranks of a layout send tokens, held against where the reference sent them.

A token is known by its sample and its position. Every layer must send it to the experts that one process sent it to,
and over all ranks exactly once. In float64 ranks choose for themselves. In narrower dtypes a rounding can decide
between two experts of nearly the same score, and then everything after it differs: there the reference's choice is
replayed, and tokens for which ranks would have chosen others are counted: no more than rounding explains.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model.decoder import Decoder
from fivefold.model.recompute import again
from fivefold.train.load import mixtures
from fivefold.verify.compare import Error, bias, counts, router_name
from fivefold.verify.verdict import Routed


@dataclass
class _Seen:
    """Of one layer, in one step."""

    first: int  # the number of the batch's first sample
    wanted: Tensor  # [B, S, K] what the reference chose, best first
    visits: NDArray[np.int64]  # [B, S] how often this rank routed each token
    found: list[Tensor]  # rows of (sample, position, experts...) that differ


class RouteRecorder:
    """Looks over the shoulders of the routers of this rank's stages."""

    def __init__(self, stages: Iterable[Decoder], replay: bool):
        self.replay, self.here = replay, torch.empty(0)
        self.mixtures = mixtures(stages)
        self.seen: dict[int, _Seen] = {}
        for layer, mixture in self.mixtures.items():
            # Between graphs: inside, a recomputed block would have others in its second run, which counts nothing.
            aside = torch.compiler.disable if mixture.ops.compiled else lambda function: function
            mixture.register_forward_pre_hook(aside(self._meet))
            mixture.router.choose = aside(self._watched(layer, mixture.router))

    def begin(self, samples: NDArray[np.int64], routing: dict[int, Tensor]) -> None:
        """A step begins, with these samples; `routing` is the reference's."""
        self.seen = {
            layer: _Seen(int(samples[0]), routing[layer], np.zeros(routing[layer].shape[:2], np.int64), [])
            for layer in self.mixtures
        }

    @torch.no_grad()
    def _meet(self, mixture: Any, inputs: tuple[Any, ...]) -> None:
        """Which samples and positions the tokens have that this rank routes: its dispatch deals them out like any."""
        _, positions = inputs
        places = torch.stack([positions.samples[:, None].expand_as(positions.position_ids), positions.position_ids], -1)
        self.here = mixture.ops.dispatch.own_tokens(places)

    def _watched(self, layer: int, router: Any) -> Callable[[Tensor], Tensor]:
        choose = router.choose or router.best

        @torch.no_grad()
        def watched(scores: Tensor) -> Tensor:
            own, seen = choose(scores), self.seen[layer]
            samples, positions = self.here.cpu().unbind(-1)
            rows = samples - seen.first
            wanted = seen.wanted[rows, positions]
            if not again():
                np.add.at(seen.visits, (rows.numpy(), positions.numpy()), 1)
                differ = (own.cpu().sort(-1).values != wanted.sort(-1).values).any(-1)
                seen.found.append(torch.column_stack([samples, positions, own.cpu()])[differ])
            return wanted.to(own.device) if self.replay else own

        return watched

    def end(self, step: int) -> list[Routed]:
        """What this rank routed."""
        found = ((layer, seen, torch.cat(seen.found)) for layer, seen in self.seen.items() if seen.found)
        return [
            Routed(step, router_name(layer), seen.visits, len(strays), seen.first, _words(seen, strays))
            for layer, seen, strays in found
        ]

    def balances(self) -> dict[str, Tensor]:
        """The numbers that help experts to be chosen, by name."""
        found = {layer: mixture.router.balance for layer, mixture in self.mixtures.items()}
        return {f"{router_name(n)}.balance": one.cpu().clone() for n, one in found.items() if one is not None}

    def biases(self, step: int, wanted: dict[str, Tensor], rate: float, bound: float) -> list[Error]:
        """The same, after a step, against the reference's."""
        return [bias(name, step, one, wanted[name], rate, bound) for name, one in self.balances().items()]


def loads(step: int, found: Tensor, routing: dict[int, Tensor]) -> list[Error]:
    """The tokens of each expert, summed over ranks: [layers with experts, X]."""
    return [
        counts(
            router_name(layer),
            step,
            row.to(torch.int64),
            torch.bincount(chosen.flatten(), minlength=len(row)),
        )
        for row, (layer, chosen) in zip(found.cpu(), sorted(routing.items()), strict=True)
    ]


def _words(seen: _Seen, strays: Tensor) -> str:
    if not len(strays):
        return ""
    sample, position, *experts = strays[0].tolist()
    wanted = seen.wanted[sample - seen.first, position].tolist()
    token = f"sample {sample}, position {position}"
    return f"sends {token} to experts {_list(experts)}, and one process to {_list(wanted)}"


def _list(experts: list[int]) -> str:
    return ", ".join(map(str, experts))
