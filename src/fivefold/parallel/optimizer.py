"""An optimizer over the full-precision shards of the weights: gradient norm, clipping, and the update of each shard.

    weights.finish_grad_sync()                # the masters have their gradients
    norm = optimizer.gradient_norm()
    optimizer.step(lr, norm)                  # the masters are updated, and the model's weights with them

Every rank updates its own shards. Two things need other ranks: the norm is summed over all of them, and an optimizer
whose rule reads whole matrices brings these together (`matrices.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.launch.waits import timed_wait
from fivefold.optim.base import OptimizerConfig, check_update, group_of, reading, states_of
from fivefold.optim.groups import ParamGroup
from fivefold.parallel.matrices import WholeMatrices
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.spec.model import ModelSpec


class LocalGroup(NamedTuple):
    """Parameters that are updated together: by `update`, with the same settings and states of the same names."""

    settings: ParamGroup
    states: tuple[str, ...]
    names: list[str]


class Optimizer:
    def __init__(
        self,
        weights: Weights,
        spec: ModelSpec,
        config: OptimizerConfig,
        mesh: Mesh,
        compute: torch.dtype = torch.float32,
    ):
        """`compute`: the dtype that the model computes in, and an update rule that reads whole matrices, too."""
        self.weights, self.config, self.mesh = weights, config, mesh
        self.updates = 0  # steps that have changed the weights: of the whole run, including earlier starts
        parameters = {parameter.name: parameter for parameter in spec.parameters()}
        self.states = {
            name: {key: torch.zeros_like(master, requires_grad=False) for key in states_of(config, parameters[name])}
            for name, master in weights.masters.items()
        }
        self.matrices = WholeMatrices(weights, spec, config, mesh, compute) if config.unit == "matrix" else None
        self.param_groups = self._param_groups(spec)
        # On a GPU, one kernel does all that a step does to a weight.
        all_float32 = all(master.dtype == torch.float32 for master in weights.masters.values())
        self.fused = config.fuses and all_float32 and mesh.device.type == "cuda"

    def _param_groups(self, spec: ModelSpec) -> list[LocalGroup]:
        """Of the parameters whose rule reads one element at a time: all but those of `matrices`."""
        groups: dict[tuple[ParamGroup, tuple[str, ...]], list[str]] = defaultdict(list)
        for parameter in spec.parameters():
            master = self.weights.masters.get(name := parameter.name)
            if master is None or not master.numel():  # a shard may have no rows
                continue
            settings = group_of(self.config, parameter)
            if settings.rule == "element":
                groups[settings, tuple(self.states[name])].append(name)
        return [LocalGroup(settings, states, names) for (settings, states), names in groups.items()]

    # ---- gradient norm -----------------------------------------------------------------------------------------------

    def gradient_norm(self, extra_scalars: Tensor | None = None, *extra_sums: Tensor) -> Tensor:
        """The gradient norm over all parameters of the model, before clipping: float64, and equal on all ranks.

        `extra_scalars` are two of this rank's (a request to stop, its loss), `extra_sums` are others, all float64. They
        become sums over all ranks, in place: in the norm's all-reduce, so at no cost.
        """
        gradients = [  # of several ranks that hold the same shard, the first counts it
            master.grad
            for name, master in self.weights.masters.items()
            if master.grad is not None and self.weights.copies(name)[0] == 0
        ]
        device = self.mesh.device
        square = _sum_of_squares(gradients) if gradients else torch.zeros((), dtype=torch.float64, device=device)
        if self.mesh.world.size > 1:
            scalars = square.new_zeros(2) if extra_scalars is None else extra_scalars
            self._sum_over_world([square, scalars, *extra_sums])
        return square.sqrt()

    def _sum_over_world(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in one all-reduce."""
        sums = torch.cat([tensor.flatten() for tensor in tensors])
        timed_wait(dist.all_reduce, sums, group=self.mesh.world.group)
        for tensor, total in zip(tensors, sums.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    # ---- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float | None, norm: Tensor) -> None:
        """Clip the gradients by their `norm` and update the weights; with lr None, only release the gradients.

        On return, the gradients are released, and the all-gathers of the new weights have been started.
        """
        self.weights.sync_params(already_cast=frozenset() if lr is None else self.update(lr, norm))

    @torch.no_grad()
    def update(self, lr: float, norm: Tensor) -> frozenset[str]:
        """Clip the gradients by their `norm` and update the masters; returns the parameters whose copies in the compute
        dtype are new already."""
        self.updates += 1
        clip_coef = self._clip_coef(norm)
        if self.matrices is not None:
            self.matrices.step(self.states, clip_coef, lr, self.updates)
        if self.fused:
            return self._update_fused(lr, clip_coef)
        self._update_foreach(lr, clip_coef)
        return frozenset()

    def _clip_coef(self, norm: Tensor) -> Tensor | None:
        """What clipping multiplies all gradients with, at most 1; None if nothing is ever clipped."""
        max_norm = self.config.clip
        return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None

    def _update_foreach(self, lr: float, clip_coef: Tensor | None) -> None:
        """Update each group by calls that take the tensors of all its parameters."""
        update_rule = self.config.update
        for group, kept, names in self.param_groups:
            masters = {name: p for name in names if (p := self.weights.masters[name]).grad is not None}
            if not masters:
                continue
            gradients = [p.grad.to(p.dtype) for p in masters.values() if p.grad is not None]
            if clip_coef is not None:
                torch._foreach_mul_(gradients, clip_coef.to(gradients[0].dtype))
            states = {key: [self.states[name][key] for name in masters] for key in kept}
            rate = lr * group.lr_factor
            updated = [*masters.values()]
            with reading(self.config, "update", states):
                update_rule(updated, gradients, states, rate, group.weight_decay, self.updates)
            check_update(self.config, updated, states)

    def _update_fused(self, lr: float, clip_coef: Tensor | None) -> frozenset[str]:
        """Update each parameter by one kernel, which also writes the model's copy in the compute dtype, if there is one
        on this rank.

        Returns the names of those that have such a copy.
        """
        scale = torch.ones((), device=self.mesh.device) if clip_coef is None else clip_coef.float()
        compute_copies = self.weights.compute_copies()
        for group, _, names in self.param_groups:
            settings = (lr * group.lr_factor, group.weight_decay, self.updates)
            for name in names:
                if (master := self.weights.masters[name]).grad is not None:
                    self.config.fused_update(master, self.states[name], scale, compute_copies.get(name), *settings)
        return frozenset(name for group in self.param_groups for name in group.names if name in compute_copies)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name the master and the optimizer's states, as shards of full tensors; views of this memory."""
        local = {n: {"master": master.detach()} | self.states[n] for n, master in self.weights.masters.items()}
        return {n: {key: self.weights.as_dtensor(n, x) for key, x in states.items()} for n, states in local.items()}

    def restore(self, updates: int) -> None:
        """Continue after `updates` steps, once masters and states have been loaded in place."""
        self.updates = updates
        self.weights.sync_params()

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
