"""Fake tensors, quicker: what an operator makes of given shapes is asked once.

PyTorch's fake mode remembers, too, but asks so much about every argument that a remembered answer costs a quarter of a
millisecond; a rank of a 70B model asks fifty thousand times. Here a tensor is its type, shape, strides and offset,
which is all that the operators of a dense model look at.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SPACES = ("aten", "_c10d_functional")


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode whose memory answers sooner."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, _Recipes | None] = {}
        self.attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if (form := _FORMS.get(func)) is not None:
            return form(*args, **(kwargs or {}))
        key = _key(func, args, kwargs)
        recipes = self.known.get(key) if key is not None else None
        if recipes is None:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
            if key is not None and key not in self.known:
                self.known[key] = _recipes(args, result)
            return result
        made = [self._make(recipe, args) for recipe in recipes.each]
        return made[0] if recipes.kind is None else recipes.kind(made)

    def _make(self, recipe: "_Recipe", args: Any) -> Tensor:
        if recipe.same:
            return args[recipe.base]
        if recipe.base is None:
            empty = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
        else:
            empty = torch.empty((0,), dtype=recipe.dtype, device="meta")
            empty.set_(args[recipe.base].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
        # What FakeTensor's own constructor makes, its attributes copied at once.
        device = recipe.device
        if device not in self.attributes:
            self.attributes[device] = dict(FakeTensor(self, torch.empty((0,), device="meta"), device).__dict__)
        made = Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes[device])
        return made


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Whose numbers are all below `minlength`: PyTorch's own fake would have to look at them."""
    return x.new_empty((minlength,), dtype=torch.int64)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *others: Any) -> Tensor:
    """[N, I], [G, I, O] -> [N, O]; [O, N], [N, I] -> [G, O, I]. PyTorch's own fake takes bfloat16 alone."""
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (len(offs), a.shape[0], b.shape[1]))


# Operators whose results' form is known here.
_FORMS: dict[Any, Any] = {torch.ops.aten.bincount.default: _bincount, torch.ops.aten._grouped_mm.default: _grouped_mm}


class _Recipe(NamedTuple):
    """How to make a tensor again: as new memory, or as a view of an argument."""

    base: int | None  # the argument
    same: bool  # it is the argument itself
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Recipes(NamedTuple):
    kind: type | None  # list or tuple; None: a tensor alone
    each: list[_Recipe]


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the result's form depends on; None where that is not known to be little."""
    if func.namespace not in _SPACES or func._schema.is_mutable:
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


def _recipes(args: Any, result: Any) -> _Recipes | None:
    kind = type(result) if isinstance(result, list | tuple) else None
    each = [_recipe(args, one) for one in ((result,) if kind is None else result)]
    return None if kind not in (None, list, tuple) or None in each else _Recipes(kind, each)  # type: ignore[arg-type]


def _recipe(args: Any, result: Any) -> _Recipe | None:
    if type(result) is not FakeTensor or result.constant is not None:
        return None
    offset = int(result.storage_offset())
    form = (result.dtype, result.fake_device, tuple(result.shape), result.stride(), offset)
    memory = result.untyped_storage()
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == memory._cdata:
            return _Recipe(place, result is arg, *form)
    fresh = torch.empty_strided(*form[2:4], dtype=result.dtype, device="meta").untyped_storage().nbytes()
    return _Recipe(None, False, *form) if fresh == memory.nbytes() and not offset else None
