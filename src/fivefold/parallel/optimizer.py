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
from fivefold.parallel.replicated import Replicated
from fivefold.parallel.weights import Weights
from fivefold.spec.model import ModelSpec

# ---- zero -----------------------------------------------------------------------------------------------------------
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
    stages: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh, compute: torch.dtype, seed: int, split: bool = False
) -> Weights:
    """Give weights to this rank's stages: decoders on the meta device, whose parameters are plain or DTensors over tp.

    Afterwards they are on the mesh's device, compute in `compute`, and report their gradients. With `split`, whoever
    computes the gradients of linears reports them.
    """
    if mesh.layout.fully_shards(spec):
        return FullySharded(stages, spec, mesh, compute, seed, split=split)
    return Replicated(stages, spec, mesh, compute, seed, split=split)


# ---- optimizer ------------------------------------------------------------------------------------------------------


class Optimizer:
    def __init__(self, weights: Weights, spec: ModelSpec, config: OptimizerConfig, mesh: Mesh):
        self.weights, self.config, self.mesh = weights, config, mesh
        self.kept = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in config.states}
            for name, master in weights.masters.items()
        }
        self.updates = 0
        # Decay pulls matrices towards zero; a norm's scale, a bias and an embedding row have no reason to go there.
        linear = {parameter.name for parameter in spec.parameters() if parameter.kind == "linear"}
        stepped = [name for name, master in weights.masters.items() if master.numel()]  # some ranks have no row of it
        decayed, spared = ([name for name in stepped if (name in linear) == kind] for kind in (True, False))
        self.decays = ((config.weight_decay, decayed), (0.0, spared))
        # One kernel for all that a step does to a weight, on a GPU.
        wide = all(master.dtype == torch.float32 for master in weights.masters.values())
        self.fused = config.fuses and wide and mesh.device.type == "cuda"

    def gradient_norm(self, wish: Tensor | None = None, *also: Tensor) -> Tensor:
        """The norm over all parameters of the model, before clipping: in float64, and the same on every rank.

        `wish` are two numbers of this rank's, `also` are more of them, all in float64. They become sums over all ranks:
        beside the norm's they cost nothing.
        """
        masters = self.weights.masters.items()
        mine = [p.grad for name, p in masters if p.grad is not None and self.weights.copies(name)[0] == 0]
        square = _sum_of_squares(mine) if mine else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.world.size > 1:
            parts = [square, square.new_zeros(2) if wish is None else wish, *also]
            sums = torch.cat([part.flatten() for part in parts])
            timed_wait(dist.all_reduce, sums, group=self.mesh.world.group)
            for part, found in zip(parts, sums.split([part.numel() for part in parts]), strict=True):
                part.copy_(found.view_as(part))
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
            learning = [(name, p, p.grad) for name in names if (p := self.weights.masters[name]).grad is not None]
            if not learning:
                continue
            gradients = [gradient.to(p.dtype) for _, p, gradient in learning if gradient is not None]
            if self.config.clip:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            states = [[self.kept[name][key] for name, *_ in learning] for key in self.config.states]
            self.config.update([p for _, p, _ in learning], gradients, states, rate, decay, self.updates)

    def _step_fused(self, rate: float, scale: Tensor, compute_copies: dict[str, Tensor]) -> None:
        for decay, names in self.decays:
            for name in names:
                if (master := self.weights.masters[name]).grad is not None:
                    states, rounded = [*self.kept[name].values()], compute_copies.get(name)
                    self.config.fused_update(master, states, scale, rounded, rate, decay, self.updates)

    def restore(self, updates: int) -> None:
        """After masters and states have been filled in place: as if `updates` steps had led there."""
        self.updates = updates
        self.weights.sync_params()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name the master and the rule's states, as parts of the whole; they share memory with this."""
        local = {n: {"master": master.detach()} | self.kept[n] for n, master in self.weights.masters.items()}
        return {n: {key: self.weights.as_dtensor(n, x) for key, x in states.items()} for n, states in local.items()}

    def resident(self) -> int:
        """Bytes of the states on this rank."""
        return sum(state.nbytes for states in self.kept.values() for state in states.values())


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """In float64."""
    if gradients[0].is_cuda:
        from fivefold.optim import kernels  # Triton's import takes a second

        if all(map(kernels.takes, gradients)):
            return kernels.sum_of_squares(gradients)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
