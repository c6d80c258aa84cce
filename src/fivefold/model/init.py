"""Initial weights, the same in every layout: each element is a function of (seed, parameter name, position)."""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fivefold.launch.heartbeat import beat
from fivefold.layout.sharding import Box
from fivefold.model.philox import random_key, random_normal
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter

# Elements drawn at a time: scratch that stays in a CPU's cache, or kernels that fill a GPU.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}


@torch.no_grad()
def init_param(spec: ModelSpec, parameter: Parameter, out: Tensor, seed: int, box: Box | None = None) -> None:
    """Fill `out` with the initial values of a box of a parameter; by default of all of it."""
    if isinstance(out, FakeTensor):
        return  # a dry run: no values
    if parameter.kind in ("norm", "bias"):
        out.fill_(1.0 if parameter.kind == "norm" else 0.0)
        return
    *stack, rows, columns = box or tuple(map(range, parameter.shape))
    # GPT-2's rule: the matrices that write into the residual stream start smaller, by the number of writers.
    std = parameter.std or spec.init_std
    std = std / math.sqrt(spec.residual_writers) if parameter.residual else std
    key = random_key(seed, "init", parameter.name)
    step = max(1, _CHUNK.get(out.device.type, 1 << 18) // len(columns))
    matrices = out.flatten(0, -3) if stack else out[None]  # drawn as one matrix with all rows
    for matrix, place in zip(matrices, product(*stack), strict=True):
        above = 0
        for index, size in zip(place, parameter.shape, strict=False):
            above = above * size + index
        first = above * parameter.shape[-2] + rows.start
        for start in range(0, len(rows), step):
            piece = range(first + start, first + min(start + step, len(rows)))
            matrix[start : start + step].copy_(random_normal(key, piece, columns, out.device) * std)
            beat()


def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Draw every parameter of a whole (unsharded) model."""
    parameters = dict(model.named_parameters())
    for parameter in spec.parameters():
        init_param(spec, parameter, parameters[parameter.name], seed)
