"""The load of experts in a step: counted where tokens are routed, summed over all ranks, and followed by biases.

Every rank counts the tokens that it routes, in every microbatch of its layers; a recomputation and an evaluation count
none. The sums over the world travel with the gradient norm, in float64, which is exact for whole numbers: so experts
add no collective to a step, but 8 bytes for each of [layers with experts x experts] and for the two losses to that
one. A step that is skipped, or fails, moves no bias.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fivefold.job.config import Job
from fivefold.model.decoder import Decoder
from fivefold.model.experts.balance import follow_load
from fivefold.model.experts.mixture import Mixture
from fivefold.model.experts.router import Router
from fivefold.train.records import Load


def mixtures(stages: Iterable[Decoder]) -> dict[int, Mixture]:
    """By the number of their layer."""
    blocks = (item for model in stages for item in model.layers.items())
    return {int(layer): block.mlp for layer, block in blocks if isinstance(block.mlp, Mixture)}


def routers(stages: Iterable[Decoder]) -> dict[int, Router]:
    return {layer: mixture.router for layer, mixture in mixtures(stages).items()}


class Loads:
    """Of the layers with experts, on this rank and then on all."""

    def __init__(self, job: Job, stages: Iterable[Decoder], device: torch.device):
        assert job.model.experts is not None
        self.train, self.first, self.device = job.train, job.model.dense_layers, device
        self.shape = job.model.layers - self.first, job.model.experts.count
        self.due = job.train.batch * job.data.seq * job.model.experts.top_k
        self.mixtures = mixtures(stages)
        self.sums = self._empty()

    def _empty(self) -> Tensor:
        """Tokens by layer and expert, then the sums over layers of the balance loss and the z loss."""
        return torch.zeros(math.prod(self.shape) + 2, dtype=torch.float64, device=self.device)

    def begin(self) -> None:
        """A step begins."""
        for mixture in self.mixtures.values():
            mixture.router.load = mixture.losses = None

    def counted(self) -> Tensor:
        """What this rank has counted since; whoever adds up the ranks' does so in place."""
        self.sums = self._empty()
        tokens, losses = self.tokens, self.sums[-2:]
        for layer, mixture in self.mixtures.items():
            if mixture.router.load is not None:
                tokens[layer - self.first] = mixture.router.load
            if mixture.losses is not None:
                losses += mixture.losses
        return self.sums

    @property
    def tokens(self) -> Tensor:
        """By layer and expert."""
        return self.sums[:-2].view(self.shape)

    def follow(self) -> None:
        """Move the biases; every rank has the sums, and moves its own alike."""
        for layer, mixture in self.mixtures.items():
            if mixture.router.balance is not None and self.train.balance_rate:
                load = self.tokens[layer - self.first].to(torch.int64)
                follow_load(mixture.router.balance, load, self.train.balance_rate)

    def record(self, sums: list[float], whole: bool) -> Load:
        """Of a step whose sums have reached the host; `whole`: with the tokens of every expert."""
        layers, experts = self.shape
        tokens = [[round(one) for one in sums[at * experts : (at + 1) * experts]] for at in range(layers)]
        balance, z = (total / layers for total in sums[-2:])
        return Load.of(
            tokens,
            self.due,
            balance_loss=balance if self.train.balance_loss else None,
            z_loss=z if self.train.router_z_loss else None,
            whole=whole,
        )
