"""ZeRO 3 and hybrid sharding: FSDP2, a block at a time.

A rank holds a share of the rows of every parameter, in full precision: its master. A block's weights are gathered in
the compute dtype for its forward and again for its backward, and released after each; its gradients are reduce-
scattered in full precision every microbatch. With `replicate`, that happens within each copy, and the shards of the
gradients are summed over the copies once a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.buckets import Held, layers_of, unit_of
from fivefold.parallel.data.part import Part
from fivefold.parallel.data.shards import bytes_of, counts, draw_rows, globally, held_by, wide
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.staging import stage
from fivefold.spec import ModelSpec


class FullySharded:
    def __init__(self, stages: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh, compute: torch.dtype, seed: int):
        self.mesh = mesh
        self.shared = {"embedding.weight"} if spec.tied and mesh.ends.size > 1 else set()
        self.held: dict[str, Held] = {}
        self.modules: list[FSDPModule] = []
        self.parameters: dict[str, DTensor] = {}
        self.masters: dict[str, nn.Parameter] = {}
        self.roots: list[FSDPModule] = []
        for model in stages:
            held = held_by(model, spec, mesh)
            model.to(wide(compute))
            self.modules += _shard(model, layers_of({unit_of(name) for name in held}), mesh, compute)
            self.roots.append(self.modules[-1])
            self.held |= held
            model.to_empty(device=mesh.device)  # each rank its shards only: nobody ever holds the whole model
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                self.parameters[name] = parameter
                one, local = self.held[name], parameter._local_tensor
                draw_rows(spec, one, one.share(mesh.zero.size, mesh.zero.rank), local, seed)
                self.masters[name] = nn.Parameter(local.detach())

    @contextmanager
    def microbatch(self, last: bool, stage: int = 0, part: Part = "all") -> Iterator[None]:
        if self.mesh.replicate.size > 1:
            self.roots[stage].set_requires_all_reduce(last)
        yield

    def add(self, name: str, gradient: Tensor) -> None:
        raise NotImplementedError("zero=3 has no weight-gradient passes of their own")

    def finish(self) -> None:
        for name, parameter in self.parameters.items():
            master, gradient = self.masters[name], parameter.grad
            # FSDP2 pads what does not divide, in storage of its own: the optimizer must step on that and no other.
            assert parameter._local_tensor.data_ptr() == master.data_ptr(), f"{name} has moved in memory"
            master.grad = gradient._local_tensor if isinstance(gradient, DTensor) else torch.zeros_like(master)
            if name in self.shared:
                dist.all_reduce(master.grad, group=self.mesh.ends.group)

    def publish(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    def ready(self) -> None:
        """The masters are the model's weights."""

    def counts(self, name: str) -> bool:
        copied = name in self.shared and self.mesh.ends.rank > 0
        return not copied and counts(self.held[name], self.mesh, sharded=True)

    def globally(self, name: str, local: Tensor) -> Tensor:
        return globally(self.held[name], local, self.mesh, sharded=True)

    def resident(self) -> dict[str, int]:
        seen: set[int] = set()
        gradients = [p.grad._local_tensor for p in self.parameters.values() if isinstance(p.grad, DTensor)]
        gathered, summed = [], []
        for group in _groups(self.modules):
            gathered += [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]
            summed += [group._partial_reduce_output] if group._partial_reduce_output is not None else []
        return {
            "parameters": bytes_of((*self.masters.values(), *gathered), seen),
            "gradients": bytes_of((*gradients, *summed), seen),
            "masters": 0,
        }


def _shard(model: nn.Module, blocks: list[str], mesh: Mesh, compute: torch.dtype) -> list[FSDPModule]:
    """The model in FSDP2's hands, block by block; itself the last."""
    found: list[FSDPModule] = []
    plane = mesh.plane("replicate", "zero") if mesh.replicate.size > 1 else mesh.plane("zero")
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide(compute), cast_forward_inputs=False)
    for module in (*(model.get_submodule(block) for block in blocks), model):
        sharded = fully_shard(module, mesh=plane, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        # Sums: the loss has been divided by the token count already. Plain ones: gloo cannot scale while it adds.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if mesh.zero.staged:
            stage(sharded)
        found.append(sharded)
    return found


def _groups(modules: list[FSDPModule]) -> Iterator[Any]:
    """FSDP2's own view of its parameters, which torch 2.13 keeps in a list and 2.11 does not."""
    for module in modules:
        state: Any = module._get_fsdp_state()
        yield from state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
