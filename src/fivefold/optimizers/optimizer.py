"""AdamW over the full-precision shards of the weights, wherever they lie.

Every rank steps on its own shards; the only thing that the ranks must agree on is the norm by which they clip. The
kernels are torch's; not so torch.optim around them, which imports the compiler and would double the start of a rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.job.config import OptimizerConfig
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import Weights
from fivefold.spec.model import ModelSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    def __init__(self, weights: Weights, spec: ModelSpec, config: OptimizerConfig, mesh: Mesh):
        self.weights, self.config, self.mesh = weights, config, mesh
        self.kept = {name: _moments(master) for name, master in weights.masters.items()}
        self.updates = 0
        # Decay pulls matrices towards zero; a norm's scale, a bias and an embedding row have no reason to go there.
        linear = {parameter.name for parameter in spec.parameters() if parameter.kind == "linear"}
        stepped = [name for name, master in weights.masters.items() if master.numel()]  # some ranks have no row of it
        decayed, spared = ([name for name in stepped if (name in linear) == kind] for kind in (True, False))
        self.decays = ((config.weight_decay, decayed), (0.0, spared))
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
            self.updates += 1
            clip = self.config.clip
            scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
            if self.fused:
                mirrors = self.weights.mirrors()
                self._step_fused(rate, scale.float(), mirrors)
            else:
                self._step_plain(rate, scale)
        self.weights.publish(rounded=frozenset(mirrors))

    def _step_plain(self, rate: float, scale: Tensor) -> None:
        config, masters = self.config, self.weights.masters
        for decay, names in self.decays:
            learning = [name for name in names if masters[name].grad is not None]
            if not learning:
                continue
            gradients = [gradient for name in learning if (gradient := masters[name].grad) is not None]
            if config.clip:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            number = torch.full((), float(self.updates), device=self.mesh.device)
            first, second = ([self.kept[name][key] for name in learning] for key in MOMENTS)
            torch._fused_adamw_(
                [masters[name] for name in learning],
                gradients,
                first,
                second,
                [],
                [number] * len(learning),
                lr=rate,
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
            )

    def _step_fused(self, rate: float, scale: Tensor, mirrors: dict[str, Tensor]) -> None:
        from fivefold.optimizers.fused_adamw import adamw

        for decay, names in self.decays:
            for name in names:
                if self.weights.masters[name].grad is not None:
                    moments, rounded = self.kept[name], mirrors.get(name)
                    pair = moments["exp_avg"], moments["exp_avg_sq"]
                    adamw(self.weights.masters[name], pair, scale, rounded, self.config, rate, decay, self.updates)

    def moments(self, name: str) -> dict[str, Tensor]:
        """AdamW's two of this rank's shard of a parameter."""
        return self.kept[name]

    def restore(self, updates: int) -> None:
        """After masters and moments have been filled in place: as if `updates` steps had led there."""
        self.updates = updates
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
        return sum(moment.nbytes for moments in self.kept.values() for moment in moments.values())


def _moments(master: Tensor) -> dict[str, Tensor]:
    return {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
