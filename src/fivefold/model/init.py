"""Initial weights, the same in every layout: each element is a function of (seed, parameter name, position)."""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fivefold.launch.heartbeat import beat
from fivefold.layout.sharding import Box
from fivefold.model.philox import Key, exp, log, random_key, random_normal, random_uniform
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Initial, Parameter

# Elements drawn at a time: scratch that stays in a CPU's cache, or kernels that fill a GPU.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}


@torch.no_grad()
def init_param(spec: ModelSpec, parameter: Parameter, out: Tensor, seed: int, box: Box | None = None) -> None:
    """Fill `out` with the initial values of a box of a parameter; by default of all of it."""
    if isinstance(out, FakeTensor):
        return  # a dry run: no values
    if parameter.kind in ("norm", "bias") and parameter.init is None:
        out.fill_(1.0 if parameter.kind == "norm" else 0.0)
        return
    box, shape = box or tuple(map(range, parameter.shape)), parameter.shape
    if len(shape) == 1:  # a column
        box, shape, out = (*box, range(1)), (*shape, 1), out[:, None]
    *stack, rows, columns = box
    # GPT-2's rule: the matrices that write into the residual stream start smaller, by the number of writers.
    std = parameter.std or spec.init_std
    std = std / math.sqrt(spec.residual_writers) if parameter.residual else std
    key = random_key(seed, "init", parameter.name)
    step = max(1, _CHUNK.get(out.device.type, 1 << 18) // len(columns))
    matrices = out.flatten(0, -3) if stack else out[None]  # drawn as one matrix with all rows
    for matrix, place in zip(matrices, product(*stack), strict=True):
        above = 0
        for index, size in zip(place, shape, strict=False):
            above = above * size + index
        first = above * shape[-2] + rows.start
        for start in range(0, len(rows), step):
            piece = range(first + start, first + min(start + step, len(rows)))
            values = (
                random_normal(key, piece, columns, out.device) * std
                if parameter.init is None
                else _drawn(parameter.init, key, piece, columns, out.device)
            )
            matrix[start : start + step].copy_(values)
            beat()


def _drawn(init: Initial, key: Key, rows: range, columns: range, device: torch.device) -> Tensor:
    """Numbers of a named distribution."""
    low, high = (torch.tensor(bound, dtype=torch.float64, device=device) for bound in (init.low, init.high))
    if init.distribution == "constant":
        values = low.expand(len(rows), len(columns))
    elif init.distribution == "uniform":
        values = low + random_uniform(key, rows, columns, device) * (high - low)
    else:
        first = log(low)
        values = exp(first + random_uniform(key, rows, columns, device) * (log(high) - first))
    if init.through == "log":
        return log(values.contiguous())
    # softplus(x) = log(1 + exp(x)), so x = y + log(1 - exp(-y))
    return values + log(1.0 - exp(-values)) if init.through == "softplus_inverse" else values


def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Draw every parameter of a whole (unsharded) model."""
    parameters = dict(model.named_parameters())
    for parameter in spec.parameters():
        init_param(spec, parameter, parameters[parameter.name], seed)
