"""Data parallelism: one model on many ranks, each with its own tokens, and ZeRO's shards of what they all hold.

    weights = spread([model], spec, mesh, torch.bfloat16, seed)   # from the meta device to drawn weights
    for number, microbatch in enumerate(microbatches, start=1):
        with weights.microbatch(last=number == len(microbatches)):
            loss(model(microbatch)).backward()
    weights.finish()                    # masters' gradients are the sums over all ranks
    ...                                 # an optimizer's step on weights.masters
    weights.publish()

Stages 0, 1 and 2 use buckets of our own (`replicated`). Stage 3 and hybrid sharding use FSDP2 (`fsdp`).
"""

from collections.abc import Sequence

import torch
from torch import nn

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero.fsdp import FullySharded
from fivefold.parallel.zero.replicated import Replicated
from fivefold.parallel.zero.weights import Weights
from fivefold.spec.model import ModelSpec

__all__ = ["FullySharded", "Replicated", "Weights", "spread"]


def spread(
    stages: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh, compute: torch.dtype, seed: int, split: bool = False
) -> Weights:
    """Give weights to this rank's stages: decoders on the meta device, whose parameters are plain or DTensors over tp.

    Afterwards they are on the mesh's device, compute in `compute`, and report their gradients. With `split`, whoever
    computes the gradients of linears reports them.
    """
    if mesh.layout.fully_shards(spec):
        return FullySharded(stages, spec, mesh, compute, seed, split=split)
    return Replicated(stages, spec, mesh, compute, seed, split=split)
