"""Looks into one step: what modules are given and give, what dropout leaves, what a rank adds to each gradient itself.

Only after a layout has failed, to find where: hooks could disturb what is proven.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fivefold.foreign.adapter import Adapter, plain
from fivefold.foreign.dropout import DROPOUTS
from fivefold.foreign.measurement import Buffer, Call, Drop, Observation, Values
from fivefold.foreign.numbering import local
from fivefold.foreign.torch_modes import everywhere

_MAX_CALLS = 4000  # hooks of one step that are kept
_NOTHING: Values = np.zeros((0, 2))


@contextmanager
def watching(adapter: Adapter, model: Any, trace: Observation | None) -> Iterator[None]:
    """Fill the trace with what happens inside of the context; without one, do nothing."""
    if trace is None:
        yield
        return
    before = _buffers(adapter, model)
    with _modules(adapter, model, trace), _unreduced(adapter, model, trace), everywhere(_Dropouts(trace)):
        yield
    after = _buffers(adapter, model)
    trace.buffers |= {name: buffer for name, buffer in before.items() if after.get(name) == buffer}


# ---- modules --------------------------------------------------------------------------------------------------------


@contextmanager
def _modules(adapter: Adapter, model: Any, trace: Observation) -> Iterator[None]:
    handles: list[Any] = []
    calls: list[_Seen] = []
    for name, module in _named_modules(adapter, model):
        if name:
            handles.append(module.register_forward_hook(_hook(name, calls), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        parts: dict[str, int] = {}
        for call in calls:
            part = parts[call.module] = parts.get(call.module, -1) + 1
            gradients = [entry for entry in call.gradients if len(entry)]
            gradient = np.concatenate(gradients) if gradients else _NOTHING
            trace.calls.append(Call(call.module, call.inputs, call.outputs, gradient, call.width, part))


def _named_modules(adapter: Adapter, model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules with their names in one process; the whole has none."""
    whole = {id(parameter): name for name, parameter in adapter.named(model).items()}
    for module in model if isinstance(model, list | tuple) else [model]:
        if not isinstance(module, torch.nn.Module):
            continue
        names: dict[str, str] = {}
        for name, part in module.named_modules():
            names[name] = _whole_name(name, part, names, whole)
            yield names[name], part


def _buffers(adapter: Adapter, model: Any) -> dict[str, Buffer]:
    return {
        f"{name}.{own}".lstrip("."): Buffer(tuple(local(buffer).shape), _digest(local(buffer)))
        for name, part in _named_modules(adapter, model)
        for own, buffer in part.named_buffers(recurse=False)
        if buffer.is_floating_point() and buffer.device.type != "meta"
    }


def _whole_name(name: str, module: Any, names: Mapping[str, str], whole: Mapping[int, str]) -> str:
    """What a module is called in one process: stages of a pipeline may count their layers anew.

    It follows from the names of its parameters, or, if it has none, from what it is in."""
    for own, parameter in module.named_parameters():
        known, suffix = whole.get(id(parameter), ""), "." + plain(own)
        if known.endswith(suffix):
            return known.removesuffix(suffix)
    parent, _, last = name.rpartition(".")
    return plain(f"{names.get(parent, parent)}.{last}.".lstrip(".")).rstrip(".")


@dataclass
class _Seen:
    """A call of a module; gradients come later."""

    module: str
    inputs: Values
    outputs: Values
    width: int
    gradients: list[Values]


def _hook(name: str, calls: list[_Seen]) -> Callable[..., None]:
    def hook(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        result = _first(output)
        if result is None or len(calls) >= _MAX_CALLS or result.device.type == "meta":
            return
        outputs = fingerprints(result)
        call = _earlier(calls, name, outputs) if in_backward() else None
        if call is None:
            entered = _first([*args, *kwargs.values()])
            inputs = _NOTHING if entered is None else fingerprints(entered)
            call = _Seen(name, inputs, outputs, result.shape[-1], [])
            calls.append(call)
        if result.requires_grad:
            gradients = call.gradients
            result.register_hook(lambda gradient: gradients.append(fingerprints(gradient)))

    return hook


def in_backward() -> bool:
    """Whether autograd runs now: what is computed then is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _earlier(calls: Sequence[_Seen], name: str, outputs: Values) -> _Seen | None:
    """The call of the forward pass that is made again: its place is that of the forward pass, in the order of which
    modules are read; a backward pass makes them again from the end."""
    for call in reversed(calls):
        if call.module == name and call.outputs.shape == outputs.shape and np.allclose(call.outputs, outputs):
            return call
    return None


def _first(value: Any) -> Tensor | None:
    """The first tensor of activations among arguments or results."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() >= 2 else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for part in value if (found := _first(part)) is not None), None)
    return None


def fingerprints(tensor: Tensor) -> Values:
    """Two projections of each token's vector; none of what is only a part of a sum, or of a vector."""
    with torch.no_grad():
        if hasattr(tensor, "placements"):
            last = tensor.dim() - 1
            if any(p.is_partial() or (p.is_shard() and p.dim in (last, -1)) for p in tensor.placements):
                return _NOTHING
            tensor = local(tensor)
        rows = tensor.detach().reshape(-1, tensor.shape[-1]).double().cpu()
        result: Values = (rows @ _projection(rows.shape[-1])).numpy()
        return result


@cache
def _projection(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, 2, generator=generator, dtype=torch.float64)


# ---- gradients before they are reduced ------------------------------------------------------------------------------


@contextmanager
def _unreduced(adapter: Adapter, model: Any, trace: Observation) -> Iterator[None]:
    """Sum what autograd itself brings to each parameter: DDP and the like reduce after that.

    Parameters that are shards of others (FSDP2) get no gradient of their own from autograd, and are left out."""
    handles = []
    for name, parameter in adapter.named(model).items():
        if parameter.requires_grad and parameter.is_leaf:
            handles.append(parameter.register_hook(_adder(name, trace)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adder(name: str, trace: Observation) -> Callable[[Any], None]:
    def add(gradient: Any) -> None:
        value = local(gradient).detach().reshape(-1).double().cpu().numpy()
        trace.unreduced[name] = trace.unreduced[name] + value if name in trace.unreduced else value.copy()

    return add


# ---- dropout --------------------------------------------------------------------------------------------------------


class _Dropouts(TorchFunctionMode):
    """Notes each call of dropout: the line that called it, what went in, which elements are left."""

    def __init__(self, trace: Observation):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in DROPOUTS and isinstance(result, Tensor):
            entered = args[0] if args else (kwargs or {})["input"]
            if entered is not result and bool((result != entered).any()):
                kept, dropped = _digest(result != 0), int(((result == 0) & (entered != 0)).sum())
                drop = Drop(_caller(), _digest(entered), kept, dropped, in_backward())
                self.trace.drops.append(drop)
        return result


def _caller() -> str:
    """The first line outside of torch and this file."""
    frame = sys._getframe(2)
    own, torchs = str(Path(__file__)), str(Path(torch.__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((own, torchs)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _digest(tensor: Tensor) -> str:
    with torch.no_grad():
        data = tensor.detach().cpu().contiguous()
        data = data.to(torch.uint8) if data.dtype == torch.bool else data.double()
        return hashlib.sha256(data.numpy().tobytes()).hexdigest()
