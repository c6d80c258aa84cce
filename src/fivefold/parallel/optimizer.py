"""An optimizer over the full-precision shards of the weights: gradient norm, clipping, and the rule on each shard.

Every rank steps on its own shards. The ranks only have to agree on the norm by which they clip.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.launch.waits import timed_wait
from fivefold.optim.base import OptimizerConfig
from fivefold.parallel.fsdp import FullySharded
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.parallel.zero import ZeroBuckets
from fivefold.spec.model import ModelSpec

# ---- data parallelism -----------------------------------------------------------------------------------------------
# Data parallelism: one model on many ranks, each with its own tokens, and ZeRO's shards of what they all hold.
#
#     weights = shard_model([model], spec, mesh, torch.bfloat16, seed)   # from the meta device to drawn weights
#     for number, microbatch in enumerate(microbatches, start=1):
#         with weights.microbatch(last=number == len(microbatches)):
#             loss(model(microbatch)).backward()
#     weights.finish_grad_sync()                    # masters' gradients are the sums over all ranks
#     ...                                 # an optimizer's step on weights.masters
#     weights.sync_params()
#
# Stages 0, 1 and 2 use buckets of our own (`replicated`). Stage 3 and hybrid sharding use FSDP2 (`fsdp`).


def shard_model(
    stages: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh, compute: torch.dtype, seed: int, *, split: bool = False
) -> Weights:
    """Give weights to this rank's stages: decoders on the meta device, whose parameters are plain or DTensors over tp.

    Afterwards they are on the mesh's device, compute in `compute`, and report their gradients. With `split`, the
    weight-gradient passes report those of linears, by `Weights.add`.
    """
    if mesh.layout.fully_shards(spec):
        return FullySharded(stages, spec, mesh, compute, seed, split=split)
    return ZeroBuckets(stages, spec, mesh, compute, seed, split=split)


# ---- optimizer ------------------------------------------------------------------------------------------------------


class Optimizer:
    def __init__(self, weights: Weights, spec: ModelSpec, config: OptimizerConfig, mesh: Mesh):
        self.weights, self.config, self.mesh = weights, config, mesh
        self.states = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in config.states}
            for name, master in weights.masters.items()
        }
        self.updates = 0
        # Decay pulls matrices towards zero; a norm's scale, a bias and an embedding row have no reason to go there.
        linear = {parameter.name for parameter in spec.parameters() if parameter.kind == "linear"}
        stepped = [name for name, master in weights.masters.items() if master.numel()]  # some ranks have no row of it
        decayed = [name for name in stepped if name in linear]
        not_decayed = [name for name in stepped if name not in linear]
        self.decays = ((config.weight_decay, decayed), (0.0, not_decayed))
        # One kernel for all that a step does to a weight, on a GPU.
        fp32 = all(master.dtype == torch.float32 for master in weights.masters.values())
        self.fused = config.fuses and fp32 and mesh.device.type == "cuda"

    def gradient_norm(self, numbers: Tensor | None = None, *also: Tensor) -> Tensor:
        """The norm over all parameters of the model, before clipping: in float64, and the same on every rank.

        `numbers` are two of this rank's (a request to stop, its loss), `also` are more of them, all in float64. They
        become sums over all ranks, in place: beside the norm's they cost nothing.
        """
        masters = self.weights.masters.items()
        local = [p.grad for name, p in masters if p.grad is not None and self.weights.copies(name)[0] == 0]
        square = _sum_of_squares(local) if local else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.world.size > 1:
            summands = [square, square.new_zeros(2) if numbers is None else numbers, *also]
            sums = torch.cat([summand.flatten() for summand in summands])
            timed_wait(dist.all_reduce, sums, group=self.mesh.world.group)
            for summand, total in zip(summands, sums.split([x.numel() for x in summands]), strict=True):
                summand.copy_(total.view_as(summand))
        return square.sqrt()

    @torch.no_grad()
    def step(self, rate: float | None, norm: Tensor) -> None:
        """One update at `rate` (None: no update), with gradients scaled down to `clip` where their `norm` is above it.

        The gradients are gone afterwards, and the new weights are on their way to the model.
        """
        compute_copies: dict[str, Tensor] = {}
        if rate is not None:
            self.updates += 1
            clip = self.config.clip
            scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
            if self.fused:
                compute_copies = self.weights.compute_copies()
                self._step_fused(rate, scale.float(), compute_copies)
            else:
                self._step_plain(rate, scale)
        self.weights.sync_params(rounded=frozenset(compute_copies))

    def _step_plain(self, rate: float, scale: Tensor) -> None:
        for decay, names in self.decays:
            updated = {name: p for name in names if (p := self.weights.masters[name]).grad is not None}
            if not updated:
                continue
            gradients = [p.grad.to(p.dtype) for p in updated.values() if p.grad is not None]
            if self.config.clip:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            states = [[self.states[name][key] for name in updated] for key in self.config.states]
            self.config.update([*updated.values()], gradients, states, rate, decay, self.updates)

    def _step_fused(self, rate: float, scale: Tensor, compute_copies: dict[str, Tensor]) -> None:
        for decay, names in self.decays:
            for name in names:
                if (master := self.weights.masters[name]).grad is not None:
                    states, rounded = [*self.states[name].values()], compute_copies.get(name)
                    self.config.fused_update(master, states, scale, rounded, rate, decay, self.updates)

    def restore(self, updates: int) -> None:
        """After masters and states have been filled in place: as if `updates` steps had led there."""
        self.updates = updates
        self.weights.sync_params()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name the master and the rule's states, as parts of full tensors; they share memory with this."""
        local = {n: {"master": master.detach()} | self.states[n] for n, master in self.weights.masters.items()}
        return {n: {key: self.weights.as_dtensor(n, x) for key, x in states.items()} for n, states in local.items()}

    def resident(self) -> int:
        """Bytes of the states on this rank."""
        return sum(state.nbytes for states in self.states.values() for state in states.values())


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """In float64."""
    if gradients[0].is_cuda:
        from fivefold.optim import kernels  # Triton's import takes a second

        if all(map(kernels.takes, gradients)):
            return kernels.sum_of_squares(gradients)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
