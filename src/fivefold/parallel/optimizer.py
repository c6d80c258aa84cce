"""An optimizer over the full-precision shards of the weights: gradient norm, clipping, and the update of each shard.

Every rank updates its own shards. The only thing that is reduced is the norm for clipping.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.launch.waits import timed_wait
from fivefold.optim.base import OptimizerConfig
from fivefold.parallel.fsdp import FullySharded
from fivefold.parallel.matrices import WholeMatrices
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.parallel.zero import ZeroBuckets
from fivefold.spec.model import ModelSpec

# ---- data parallelism -----------------------------------------------------------------------------------------------
# Data parallelism: replicas of the model on many ranks, each with its own tokens, and ZeRO's sharding of their states.
#
#     weights = shard_model([model], spec, mesh, torch.bfloat16, seed)   # from the meta device to initial weights
#     for index, microbatch in enumerate(microbatches):
#         with weights.microbatch(last=index == len(microbatches) - 1):
#             loss(model(microbatch)).backward()
#     weights.finish_grad_sync()          # masters' gradients are the sums over all ranks
#     ...                                 # an optimizer's step on weights.masters
#     weights.sync_params()
#
# ZeRO 0, 1 and 2 use buckets of our own (`zero.py`). ZeRO 3 and hybrid sharding use FSDP2 (`fsdp.py`).


def shard_model(
    stages: Sequence[nn.Module],
    spec: ModelSpec,
    mesh: Mesh,
    compute: torch.dtype,
    seed: int,
    *,
    split_backward: bool = False,
) -> Weights:
    """Initialise the weights of this rank's stages: decoders on the meta device, with plain parameters or DTensors over
    tp.

    Afterwards they are on the mesh's device, compute in `compute`, and report their gradients. With `split_backward`,
    weight-gradient passes report the gradients of linears, by `Weights.add`.
    """
    if mesh.layout.fully_shards(spec):
        return FullySharded(stages, spec, mesh, compute, seed, split_backward=split_backward)
    return ZeroBuckets(stages, spec, mesh, compute, seed, split_backward=split_backward)


# ---- optimizer ------------------------------------------------------------------------------------------------------


class Optimizer:
    def __init__(
        self,
        weights: Weights,
        spec: ModelSpec,
        config: OptimizerConfig,
        mesh: Mesh,
        compute: torch.dtype = torch.float32,
    ):
        """`compute`: the dtype that the model computes in, and rules that read whole matrices, too."""
        self.weights, self.config, self.mesh = weights, config, mesh
        parameters = {parameter.name: parameter for parameter in spec.parameters()}
        self.states = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in config.states_of(parameters[name])}
            for name, master in weights.masters.items()
        }
        self.updates = 0
        self.matrices = WholeMatrices(weights, spec, config, mesh, compute) if config.unit == "matrix" else None
        # Weight decay is for matrices: not for norms, biases and embeddings.
        linear = {name for name, parameter in parameters.items() if parameter.kind == "linear"}
        whole = set() if self.matrices is None else set(self.matrices.names)
        stepped = [
            name for name, master in weights.masters.items() if master.numel() and name not in whole
        ]  # a rank may have no row of a parameter
        decayed = [name for name in stepped if name in linear]
        not_decayed = [name for name in stepped if name not in linear]
        self.stepped = frozenset(stepped)  # element by element
        self.decays = ((config.weight_decay, decayed), (0.0, not_decayed))
        # On a GPU, one kernel does all that a step does to a weight.
        fp32 = all(master.dtype == torch.float32 for master in weights.masters.values())
        self.fused = config.fuses and fp32 and mesh.device.type == "cuda"

    def gradient_norm(self, extra_scalars: Tensor | None = None, *extra_sums: Tensor) -> Tensor:
        """The gradient norm over all parameters of the model, before clipping: float64, and equal on all ranks.

        `extra_scalars` are two of this rank's (a request to stop, its loss), `extra_sums` are others, all float64. They
        become sums over all ranks, in place: in the norm's all-reduce, so at no cost.
        """
        masters = self.weights.masters.items()
        local = [p.grad for name, p in masters if p.grad is not None and self.weights.copies(name)[0] == 0]
        square = _sum_of_squares(local) if local else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.world.size > 1:
            summands = [square, square.new_zeros(2) if extra_scalars is None else extra_scalars, *extra_sums]
            sums = torch.cat([summand.flatten() for summand in summands])
            timed_wait(dist.all_reduce, sums, group=self.mesh.world.group)
            for summand, total in zip(summands, sums.split([x.numel() for x in summands]), strict=True):
                summand.copy_(total.view_as(summand))
        return square.sqrt()

    @torch.no_grad()
    def step(self, rate: float | None, norm: Tensor) -> None:
        """One update at the learning rate `rate` (None: no update), with gradients clipped to the norm `clip`.

        Afterwards the gradients are released, and the all-gathers of the new weights are started.
        """
        self.weights.sync_params(already_cast=frozenset() if rate is None else self.update(rate, norm))

    @torch.no_grad()
    def update(self, rate: float, norm: Tensor) -> frozenset[str]:
        """The masters' update alone; returns the parameters whose compute copies are new already."""
        self.updates += 1
        clip = self.config.clip
        scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
        if self.matrices is not None:
            clipping = scale if clip else None
            self.matrices.step(self.states, clipping, rate, self.config.weight_decay, self.updates)
        if not self.fused:
            self._step_plain(rate, scale)
            return frozenset()
        compute_copies = {n: copy for n, copy in self.weights.compute_copies().items() if n in self.stepped}
        self._step_fused(rate, scale.float(), compute_copies)
        return frozenset(compute_copies)

    def _step_plain(self, rate: float, scale: Tensor) -> None:
        for decay, names in self.decays:
            updated = {name: p for name in names if (p := self.weights.masters[name]).grad is not None}
            if not updated:
                continue
            gradients = [p.grad.to(p.dtype) for p in updated.values() if p.grad is not None]
            if self.config.clip:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            # Tensors by state: all of these parameters have the same.
            states = [[*each] for each in zip(*(self.states[name].values() for name in updated), strict=True)]
            self.config.update([*updated.values()], gradients, states, rate, decay, self.updates)

    def _step_fused(self, rate: float, scale: Tensor, compute_copies: dict[str, Tensor]) -> None:
        for decay, names in self.decays:
            for name in names:
                if (master := self.weights.masters[name]).grad is not None:
                    states, compute_copy = [*self.states[name].values()], compute_copies.get(name)
                    self.config.fused_update(master, states, scale, compute_copy, rate, decay, self.updates)

    def restore(self, updates: int) -> None:
        """Continue after `updates` steps, once masters and states have been loaded in place."""
        self.updates = updates
        self.weights.sync_params()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name the master and the optimizer's states, as shards of full tensors; views of this memory."""
        local = {n: {"master": master.detach()} | self.states[n] for n, master in self.weights.masters.items()}
        return {n: {key: self.weights.as_dtensor(n, x) for key, x in states.items()} for n, states in local.items()}

    def resident(self) -> int:
        """Bytes of this rank's optimizer states."""
        return sum(state.nbytes for states in self.states.values() for state in states.values())


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """The sum of squares of all gradients, in float64."""
    if gradients[0].is_cuda:
        from fivefold.optim import kernels  # Triton's import takes a second

        if all(map(kernels.takes, gradients)):
            return kernels.sum_of_squares(gradients)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
