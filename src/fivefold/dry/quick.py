"""Fake tensors, quicker: what an operator makes of given shapes is asked once.

PyTorch's fake mode remembers, too, but asks so much about every argument that a remembered answer costs a quarter of a
millisecond; a rank of a 70B model asks fifty thousand times. Here a tensor is its type, shape, strides and offset,
which is all that the operators of a dense model look at.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode whose memory answers sooner."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, tuple[Any, ...] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        key = _key(func, args, kwargs)
        recipe = self.known.get(key) if key is not None else None
        if recipe is None:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
            if key is not None and key not in self.known:
                self.known[key] = _recipe(args, result)
            return result
        base, dtype, device, shape, stride, offset = recipe
        if base is None:
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        empty = torch.empty((0,), dtype=dtype, device="meta")
        return FakeTensor(self, empty.set_(args[base].untyped_storage(), offset, shape, stride), device)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the result's form depends on; None where that is not known to be little."""
    if func.namespace != "aten" or func._schema.is_mutable:
        return None
    parts: list[Any] = [func]
    for arg in args if not kwargs else (*args, *kwargs.keys(), *kwargs.values()):
        kind = type(arg)
        if kind is FakeTensor:
            parts += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device)
        elif kind is list:
            if any(type(item) is not int for item in arg):
                return None
            parts.append(tuple(arg))
        elif kind in _PLAIN or isinstance(arg, _PLAIN):
            parts.append((kind, arg))
        else:
            return None
    return tuple(parts)


def _recipe(args: Any, result: Any) -> tuple[Any, ...] | None:
    """How to make the result again: as new memory, or as a view of one of the arguments."""
    if type(result) is not FakeTensor or any(result is arg for arg in args) or result.constant is not None:
        return None
    form = (result.dtype, result.fake_device, tuple(result.shape), result.stride(), result.storage_offset())
    memory = result.untyped_storage()._cdata
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == memory:
            return (place, *form)
    fresh = torch.empty_strided(form[2], form[3], dtype=result.dtype, device="meta").untyped_storage().nbytes()
    return (None, *form) if fresh == result.untyped_storage().nbytes() and not form[4] else None
