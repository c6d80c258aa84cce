"""torch.compile of one block at a time: one graph serves all blocks of a stage, and the code between them stays eager.

Hooks stay outside of graphs (all-gathers of weights, FSDP2), and so do linears that can defer their weights'
gradients: deferred tasks cannot be part of a graph. Tensor parallelism's collectives are inside.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
COMPILER_BACKEND = "inductor"
_MAX_GRAPHS = 512  # of one function


def compile_function(function: AnyFunction) -> AnyFunction:
    """The compiled function, with constant shapes: a run has one shape of microbatches, and one of evaluation.

    Dropout has a key for each layer, so each layer has its own graph. More than `_MAX_GRAPHS` are an error: PyTorch
    would otherwise run the function eagerly from then on, and only log that.
    """
    torch._dynamo.config.recompile_limit = _MAX_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False, backend=COMPILER_BACKEND)  # type: ignore[return-value]


def compilation() -> tuple[int, dict[str, int]]:
    """Of this process so far: the number of graphs, and the number of graph breaks by reason."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), {str(why): int(n) for why, n in counters["graph_break"].items()}
