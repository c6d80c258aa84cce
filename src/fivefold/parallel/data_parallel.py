"""Data parallelism: replicas of the model on many ranks, each with its own tokens, and ZeRO's sharding of their states.

    weights = shard_model([model], spec, mesh, torch.bfloat16, seed)   # from the meta device to initial weights
    for index, microbatch in enumerate(microbatches):
        with weights.microbatch(last=index == len(microbatches) - 1):
            loss(model(microbatch)).backward()
    weights.finish_grad_sync()          # masters' gradients are the sums over all ranks
    ...                                 # an optimizer's step on weights.masters
    weights.sync_params()

ZeRO 0, 1 and 2 use buckets of our own (`zero.py`). ZeRO 3 and hybrid sharding use FSDP2 (`fsdp.py`).
"""

from collections.abc import Sequence

import torch
from torch import nn

from fivefold.parallel.fsdp import FullySharded
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.parallel.zero import ZeroBuckets
from fivefold.spec.model import ModelSpec


def shard_model(
    stages: Sequence[nn.Module],
    spec: ModelSpec,
    mesh: Mesh,
    compute: torch.dtype,
    seed: int,
    *,
    split_backward: bool = False,
) -> Weights:
    """Shard this rank's stages as the layout's ZeRO stage says, and initialise their weights.

    The stages are decoders on the meta device, with plain parameters or DTensors over tp. Afterwards they are on the
    mesh's device, compute in `compute`, and report their gradients. With `split_backward`, weight-gradient passes
    report the gradients of linears, by `Weights.add`.
    """
    if mesh.layout.fully_shards(spec):
        return FullySharded(stages, spec, mesh, compute, seed, split_backward=split_backward)
    return ZeroBuckets(stages, spec, mesh, compute, seed, split_backward=split_backward)
