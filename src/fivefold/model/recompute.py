"""Activation recompute: what a block keeps for its backward pass, and what it computes again.

none       everything autograd saves
selective  the block's input and the outputs of matmuls and attention; norms, rotations, activation functions and
           residual sums, which are cheap to compute and large to keep, run again
full       the block's input alone; the whole forward pass runs again (a third more FLOPs)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fivefold.layout import Recompute

_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.linear.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(how: Recompute) -> Callable[..., Tensor]:
    """A function that runs (block, *inputs) and keeps what `how` says.

    The RNG state is not saved: nothing here draws from one, and dropout is a function of place.
    """
    if how == "none":
        return _plain
    if how == "full":
        return partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _plain(block: nn.Module, *inputs: Any) -> Tensor:
    return block(*inputs)
