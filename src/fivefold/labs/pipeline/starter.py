"""A pipeline executor. The statement is in README.md; check with `fivefold lab check .`"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn


def run(
    actions: list[tuple[str, int]],
    stage: nn.Module,
    inputs: list[Tensor],
    loss_of: Callable[[Tensor, int], Tensor],
    shape: tuple[int, int],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Run this rank's actions, ("F", microbatch) and ("B", microbatch), in this order.

    Rank r is stage r. The first stage takes `inputs[microbatch]`; each stage sends what it gives, [rows, width] as
    `shape` says, to the next one; the last gives `loss_of(output, microbatch)`. Gradients travel back. All is float64.
    Returns the losses of all microbatches, in order, on the last stage, and [] on the others. Afterwards the gradients
    of `stage` are those of the mean of all losses.
    """
    raise NotImplementedError
