"""torch.compile, a block at a time: one graph serves all blocks of a stage, and what joins them stays in Python.

Hooks stay outside (weights that arrive, FSDP2), and so do linears that can put off their weights' gradients: what they
leave for later is no part of a graph. Tensor parallelism's collectives are inside.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
BACKEND = "inductor"
_MOST = 512  # graphs of one function


def compiled(function: Function) -> Function:
    """Shapes are constants: a run has one shape of microbatch, and one more where it looks at held-out data.

    Dropout has a key for each layer, and so a graph. Should a function ever need more graphs than that, it is an error:
    PyTorch would run it uncompiled from then on, and say so in a log.
    """
    torch._dynamo.config.recompile_limit = _MOST
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False, backend=BACKEND)  # type: ignore[return-value]


def compilation() -> tuple[int, dict[str, int]]:
    """Of this process so far: graphs that were made, and the reasons for breaks between them, with their number."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), {str(why): int(n) for why, n in counters["graph_break"].items()}
