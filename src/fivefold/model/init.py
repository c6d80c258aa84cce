"""Initial weights, layout-free: any block of any parameter is a function of (seed, name, place)."""

import math

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fivefold.model import random
from fivefold.spec.model import ModelSpec, Parameter

# Elements drawn at a time: scratch that stays in a CPU's cache, or kernels that fill a GPU.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}


def std_of(spec: ModelSpec, parameter: Parameter) -> float:
    """GPT-2's rule: the matrices that write into the residual stream start smaller, by the number of writers."""
    writes_residual = parameter.name.endswith((".attention.o.weight", ".mlp.down.weight"))
    return spec.init_std / math.sqrt(2 * spec.layers) if writes_residual else spec.init_std


@torch.no_grad()
def draw(
    spec: ModelSpec,
    parameter: Parameter,
    out: Tensor,
    seed: int,
    rows: range | None = None,
    columns: range | None = None,
) -> None:
    """Fill `out` with the block rows x columns of a parameter (the whole of it if not said)."""
    if isinstance(out, FakeTensor):
        return  # a dry run: there is nothing to fill
    if parameter.kind == "norm":
        out.fill_(1.0)
        return
    if parameter.kind == "bias":
        out.zero_()
        return
    rows = range(parameter.shape[0]) if rows is None else rows
    columns = range(parameter.shape[1]) if columns is None else columns
    key, std = random.key(seed, "init", parameter.name), std_of(spec, parameter)
    step = max(1, _CHUNK.get(out.device.type, 1 << 18) // len(columns))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        out[start : start + step].copy_(random.normal(key, piece, columns, out.device) * std)


def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Draw every parameter of a whole (unsharded) model."""
    parameters = dict(model.named_parameters())
    for parameter in spec.parameters():
        draw(spec, parameter, parameters[parameter.name], seed)
