"""Data parallelism: one model on many ranks, each with its own tokens, and ZeRO's shards of what they all hold.

    weights = spread([model], spec, mesh, torch.bfloat16, seed)   # from the meta device to drawn weights
    for number, microbatch in enumerate(microbatches, start=1):
        with weights.microbatch(last=number == len(microbatches)):
            loss(model(microbatch)).backward()
    weights.finish()                    # masters' gradients are the sums over all ranks
    ...                                 # an optimizer's step on weights.masters
    weights.publish()

Stages 0, 1 and 2 are buckets of our own (`replicated`), stage 3 and hybrid sharding are FSDP2 (`fully`).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.layout.sharding import Box
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero.fsdp import FullySharded
from fivefold.parallel.zero.part import Part
from fivefold.parallel.zero.replicated import Replicated
from fivefold.spec.model import ModelSpec

__all__ = ["FullySharded", "Replicated", "Weights", "spread"]


class Weights(Protocol):
    """A model's weights on this rank: in full precision for the optimizer, in the compute dtype for the model."""

    masters: dict[str, nn.Parameter]
    """By global name, this rank's shard in full precision; `grad` is set by `finish` and gone after `publish`."""

    halves: bool
    """Whether every backward pass is to come in two halves, because in this schedule some do."""

    def microbatch(self, last: bool, stage: int = 0, part: Part = "all") -> AbstractContextManager[None]:
        """Around the backward pass of one microbatch through one of this rank's stages, whole or half; `last`: no
        other will follow in this step."""

    def add(self, name: str, gradient: Tensor) -> None:
        """A gradient that does not come from autograd: one of a weight-gradient pass of its own."""

    def finish(self) -> None:
        """After the last microbatch: the masters' gradients are sums over all ranks that hold the parameter."""

    def mirrors(self) -> dict[str, Tensor]:
        """The model's weights that are rounded copies of this rank's masters, and that nobody else has a part in."""

    def publish(self, rounded: frozenset[str] = frozenset()) -> None:
        """After the masters have changed: the model's weights follow, at the latest when its forward needs them.

        Those that are `rounded` have followed already.
        """

    def ready(self) -> None:
        """Wait until the model's own weights are the published ones, for whoever reads them without a forward."""

    def copies(self, name: str) -> tuple[int, int]:
        """Which copy this rank's shard is, and of how many: in sums over the world the first one counts."""

    def block(self, name: str) -> Box:
        """The part of the whole parameter that this rank's master is."""

    def globally(self, name: str, local: Tensor) -> Tensor:
        """The whole parameter's view of a shard that is shaped like the master: a DTensor over zero x tp."""

    def buffers(self) -> Iterator[Tensor]:
        """Memory of gradients that is held between steps."""

    def gradient_memory(self) -> Iterator[Tensor]:
        """Memory of gradients that is held right now."""

    def resident(self) -> dict[str, int]:
        """Bytes of parameters, gradients and masters held right now; a master that is its parameter counts once."""


def spread(
    stages: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh, compute: torch.dtype, seed: int, split: bool = False
) -> Weights:
    """Take decoders on the meta device, this rank's stages, whose parameters are plain or DTensors over tp, and give
    them their weights.

    Afterwards they are on the mesh's device, compute in `compute`, and report their gradients; with `split`, those of
    linears are reported by whoever computes them.
    """
    if mesh.layout.zero == 3 and mesh.zero.size * mesh.replicate.size > 1:
        return FullySharded(stages, spec, mesh, compute, seed, split=split)
    return Replicated(stages, spec, mesh, compute, seed, split=split)
