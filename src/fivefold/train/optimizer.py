"""AdamW over the full-precision shards of the weights, wherever they lie.

Every rank steps on its own shards; the only thing that the ranks must agree on is the norm by which they clip.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.data import Weights
from fivefold.parallel.mesh import Mesh
from fivefold.spec import ModelSpec
from fivefold.train.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    def __init__(self, weights: Weights, spec: ModelSpec, config: OptimizerConfig, mesh: Mesh):
        self.weights, self.mesh, self.clip = weights, mesh, config.clip
        # Decay pulls matrices towards zero; a norm's scale, a bias and an embedding row have no reason to go there.
        decayed = {parameter.name for parameter in spec.parameters() if parameter.kind == "linear"}
        stepped = {name: p for name, p in weights.masters.items() if p.numel()}  # fewer rows than ranks: some have none
        groups = [
            {"params": [p for name, p in stepped.items() if name in decayed], "weight_decay": config.weight_decay},
            {"params": [p for name, p in stepped.items() if name not in decayed], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]] or groups[:1]  # a stage may hold nothing at all
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        # As AdamW itself would at its first step; here, so that all ranks have the same entries at any time.
        for master in weights.masters.values():
            moments = {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
            self.adam.state[master] = {"step": torch.zeros((), device=master.device)} | moments
        self.updates = 0
        self.names = {master: name for name, master in weights.masters.items()}
        # One kernel for all that a step does to a weight, on a GPU.
        self.fused = mesh.device.type == "cuda" and all(m.dtype == torch.float32 for m in weights.masters.values())

    def gradient_norm(self, wish: Tensor | None = None) -> Tensor:
        """The norm over all parameters of the model, before clipping: in float64, and the same on every rank.

        `wish` is a number of this rank's, and becomes the sum over all ranks: beside the norm's it costs nothing.
        """
        masters = self.weights.masters.items()
        mine = [p.grad for name, p in masters if p.grad is not None and self.weights.copies(name)[0] == 0]
        if mine:
            norms = torch._foreach_norm(mine, 2, dtype=torch.float64)
            square = torch.stack(norms).square().sum()
        else:
            square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.world.size > 1:
            sums = torch.stack((square, torch.zeros_like(square) if wish is None else wish))
            dist.all_reduce(sums, group=self.mesh.world.group)
            square = sums[0]
            if wish is not None:
                wish.copy_(sums[1])
        return square.sqrt()

    @torch.no_grad()
    def step(self, rate: float | None, norm: Tensor) -> None:
        """One update at `rate` (None: no update), with gradients scaled down to `clip` where their `norm` is above it.

        The gradients are gone afterwards, and the new weights are on their way to the model.
        """
        mirrors: dict[str, Tensor] = {}
        if rate is not None:
            for group in self.adam.param_groups:
                group["lr"] = rate
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
            if self.fused:
                mirrors = self.weights.mirrors()
                self._step_fused(scale.float(), mirrors)
            else:
                self._step_plain(scale)
            self.updates += 1
        self.weights.publish(rounded=frozenset(mirrors))

    def _step_plain(self, scale: Tensor) -> None:
        gradients = [p.grad for p in self.weights.masters.values() if p.grad is not None and p.numel()]
        if self.clip and gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        self.adam.step()

    def _step_fused(self, scale: Tensor, mirrors: dict[str, Tensor]) -> None:
        from fivefold.train.fused import adamw

        for group in self.adam.param_groups:
            stepped = [master for master in group["params"] if master.grad is not None]
            for master in stepped:
                state = self.adam.state[master]
                moments = state["exp_avg"], state["exp_avg_sq"]
                adamw(master, moments, scale, mirrors.get(self.names[master]), group, self.updates + 1)
            torch._foreach_add_([self.adam.state[master]["step"] for master in stepped], 1)

    def moments(self, name: str) -> dict[str, Tensor]:
        """AdamW's two of this rank's shard of a parameter."""
        return {key: self.adam.state[self.weights.masters[name]][key] for key in MOMENTS}

    def restore(self, updates: int) -> None:
        """After masters and moments have been filled in place: as if `updates` steps had led there."""
        self.updates = updates
        for state in self.adam.state.values():
            state["step"].fill_(updates)
        self.weights.publish()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name the master and AdamW's two moments, as parts of the whole; they share memory with this."""
        kept: dict[str, dict[str, Tensor]] = {}
        for name, master in self.weights.masters.items():
            local = {"master": master.detach()} | self.moments(name)
            kept[name] = {key: self.weights.globally(name, value) for key, value in local.items()}
        return kept

    def resident(self) -> int:
        """Bytes of the two moments on this rank."""
        moments = [state[key] for state in self.adam.state.values() for key in MOMENTS]
        return sum(moment.numel() * moment.element_size() for moment in moments)
