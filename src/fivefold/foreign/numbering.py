"""Which element of the whole model each local element is: found by loading element numbers, and not declared.

An adapter can load full weights into its model in any layout; it must, to give both runs the same weights. So the full
weights are filled with the numbers of their own elements, loaded once, and read where they ended up. Slices of tp,
fused matrices, stages of a pipeline, tied copies, experts, shards of FSDP and replicas all come out of that.

The elements of all parameters of the one process are numbered one after the other. A dtype holds whole numbers exactly
up to 2^(bits of its significand), so narrow ones take several loads, a digit each.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.foreign.adapter import Adapter, plain
from fivefold.foreign.compare import Tensors
from fivefold.foreign.measurement import Numbers
from fivefold.support.errors import UserError

_EMPTY = -1.0  # what parameters hold before a load: an element that keeps it is padding
_BASES = {torch.float64: 2**52, torch.float32: 2**23, torch.bfloat16: 2**8, torch.float16: 2**11}


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor or DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def find(adapter: Adapter, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Numbers]:
    """For each local parameter the number of each of its elements, flat; -1 where nothing was loaded."""
    named, tensors = adapter.named(model), Tensors(shapes)
    first, count = dict(zip(tensors.names, map(int, tensors.starts), strict=True)), tensors.size
    base = min((_base(parameter) for parameter in named.values()), default=2**52)
    result: dict[str, Numbers] = {}
    place = 1
    while True:
        with torch.no_grad():
            for parameter in named.values():
                local(parameter.detach()).fill_(_EMPTY)
        load(adapter, model, {name: _digits(first[name], shape, place, base) for name, shape in shapes.items()})
        for name, parameter in adapter.named(model).items():
            digit = local(parameter.detach()).reshape(-1).double().cpu().numpy().round().astype(np.int64)
            known = result.setdefault(name, np.zeros_like(digit))
            if len(known) != len(digit):
                sizes = f"loading changed the size of {name} on this rank from {len(known)} to {len(digit)}"
                raise UserError(sizes, "adapter.load")
            result[name] = np.where((digit < 0) | (known < 0), -1, known + digit * place)
        place *= base
        if place >= count:
            break
    for name, numbers in result.items():
        if (numbers >= count).any():
            raise UserError(
                f"load() does not put elements of the full weights into {name} as they are: element numbers of {count} "
                f"came out as up to {int(numbers.max())}; weights may be cut and permuted, and not computed with",
                "adapter.load",
            )
    return result


def _base(parameter: Any) -> int:
    base = _BASES.get(parameter.dtype)
    if base is None:
        raise UserError(
            f"a parameter is of {parameter.dtype}; verify knows {', '.join(str(known) for known in _BASES)}",
            "adapter.dtype",
        )
    return base


def _digits(first: int, shape: tuple[int, ...], place: int, base: int) -> Tensor:
    size = int(np.prod(shape))
    return ((torch.arange(first, first + size) // place) % base).double().reshape(shape)


def load(adapter: Adapter, model: Any, full: Mapping[str, Tensor]) -> None:
    """Give the model the full weights, by the adapter's own function or as usual."""
    with torch.no_grad():
        if adapter.own_load is not None:
            adapter.own_load(model, full)
            return
        for name, parameter in adapter.named(model).items():
            if name not in full:
                raise UserError(
                    f"this rank has a parameter {name}, and one process has none of that name; give it its name there "
                    "by named(model), or its weights by load(model, full)",
                    "adapter.named",
                )
            _copy(name, parameter, full[name])


def _copy(name: str, parameter: Any, value: Tensor) -> None:
    value = value.to(device=parameter.device, dtype=parameter.dtype)
    if tuple(parameter.shape) != tuple(value.shape):
        raise UserError(
            f"{name} has shape {tuple(parameter.shape)} here and {tuple(value.shape)} in one process; say in "
            "load(model, full) which part of it this rank holds",
            "adapter.load",
        )
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    local(parameter.detach()).copy_(value)


def general_position(adapter: Adapter, model: Any) -> dict[str, Tensor]:
    """The weights that both runs begin with: those of the adapter, moved so that no norm is 1 and no bias 0.

    A bug cannot hide behind a factor that happens to be one, or a summand that happens to be nothing.
    """
    generator = torch.Generator().manual_seed(20_201)
    full = {}
    for name, parameter in adapter.named(model).items():
        value = local(parameter.detach()).double().cpu()
        spread = float(value.std()) if value.numel() > 1 else 0.0
        moved = value + (0.2 * spread or 0.1) * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        full[plain(name)] = moved.to(parameter.dtype).double()
    return full
