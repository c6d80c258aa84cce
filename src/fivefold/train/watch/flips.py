"""Flipped bits on purpose: FIVEFOLD_FAULT=flip@rank=1,step=4,at=weight, so that it is seen who finds them."""

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.launch import faults
from fivefold.train.engine import Engine

_BIT = 1 << 2  # of the last byte but one: in the mantissa of every kind of number, so that no loss jumps


@torch.no_grad()
def flip(tensor: Tensor) -> None:
    """One bit of its first number."""
    tensor.view(-1)[:1].view(torch.uint8)[-2:-1].bitwise_xor_(_BIT)


def after_update(engine: Engine, step: int) -> None:
    """In a weight that the model computes with, or in this rank's masters and the optimizer's states."""
    if faults.strike("weight", step=step) == "flip":
        engine.weights.ready()  # those that come over the flipped ones would mend them
        flip(_largest([parameter for model in engine.stages.values() for parameter in model.parameters()]))
    if faults.strike("shard", step=step) == "flip":
        flip(_largest([state for states in engine.optimizer.kept.values() for state in states.values()]))


def _largest(tensors: list[Any]) -> Tensor:
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return max(local, key=lambda tensor: tensor.numel())


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        flip(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def before_forward(engine: Engine, step: int) -> None:
    """In what the first block of this rank is given, in the first microbatch of a step; of a stage without blocks, in
    what that is given."""
    if faults.strike("compute", step=step) != "flip":
        return
    stages = [*engine.stages.values()]
    block = next((block for model in stages for block in model.layers.values()), stages[-1])

    def once(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        handle.remove()
        return (_Flipped.apply(given[0]), *given[1:])

    handle = block.register_forward_pre_hook(once)
