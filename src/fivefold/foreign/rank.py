"""What a rank does with an adapter: build, number, load, step; and one process, which is the truth for all layouts."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.foreign import numbering
from fivefold.foreign.adapter import Adapter, AdapterFile, Layout
from fivefold.foreign.compare import Tensors, at_numbers
from fivefold.foreign.measurement import (
    AdapterDescription,
    Insight,
    Numbers,
    Observation,
    OneProcess,
    RankValues,
    Settings,
    Values,
)
from fivefold.foreign.watch import watching
from fivefold.job.config import TrainConfig
from fivefold.launch.device import choose_backend, choose_device
from fivefold.launch.processes import Rank
from fivefold.support.errors import UserError

_SEED = 1234
_NOISE_DRAWS = 3  # runs of one process with every weight moved by a rounding
_PACKAGES = ["torch", "transformers", "torchtitan", "megatron", "accelerate", "deepspeed", "nemo", "lightning", "numpy"]
_IGNORE = -100  # what torch's cross-entropy leaves out


def describe(rank: Rank, place: AdapterFile) -> AdapterDescription:
    adapter = Adapter(place)
    worlds = [adapter.world(layout) for layout in adapter.layouts]
    return AdapterDescription(adapter.layouts, worlds, adapter.dtype, adapter.known, adapter.update is not None)


def world_of(rank: Rank, place: AdapterFile, layouts: Sequence[Layout]) -> list[int]:
    adapter = Adapter(place)
    return [adapter.world(layout) for layout in layouts]


def measure(rank: Rank, place: AdapterFile, layout: Layout, settings: Settings, weights: Path) -> RankValues:
    """One rank of a layout, from the weights that one process has written."""
    adapter, model = _start(rank, place, layout, settings)
    full = _read(weights)
    numbers = numbering.find(adapter, model, {name: tuple(tensor.shape) for name, tensor in full.items()})
    numbering.load(adapter, model, full)
    return _run(adapter, model, settings, rank.number, numbers)


def refer(rank: Rank, place: AdapterFile, settings: Settings, weights: Path) -> OneProcess:
    """One process; writes the weights that all layouts begin with."""
    from safetensors.torch import save_file

    adapter, model = _start(rank, place, {}, settings)
    full = dict(sorted(numbering.general_position(adapter, model).items()))  # elements are numbered in this order
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    save_file({name: tensor.contiguous() for name, tensor in full.items()}, weights)
    numbers = numbering.find(adapter, model, shapes)
    tensors = Tensors(shapes)
    _check_whole(numbers, tensors)

    def run(model: Any, weights: Mapping[str, Tensor], seed: int = _SEED) -> RankValues:
        numbering.load(adapter, model, weights)
        return _run(adapter, model, settings, 0, numbers, seed)

    values = run(model, full)
    if any(loss is None for loss in values.losses):
        raise UserError("step() gave no loss in one process; it should return {'loss': ...}", "adapter.step")
    another = run(adapter.build({}), full, _SEED + 1)
    before = np.concatenate([tensor.reshape(-1).numpy() for tensor in full.values()])
    reference = OneProcess(
        shapes,
        losses=[float(loss or 0.0) for loss in values.losses],
        norms=values.norms,
        gradients=[at_numbers(numbers, gradients, tensors.size) for gradients in values.gradients],
        weights=before,
        parameters=[at_numbers(numbers, after, tensors.size) for after in values.parameters],
        versions=_versions(),
        random=values.losses[0] != another.losses[0],
    )
    if adapter.dtype == "float64":
        return reference
    draws = [run(adapter.build({}), _rounded(full, adapter.dtype, draw)) for draw in range(_NOISE_DRAWS)]
    return _with_noise(reference, draws, numbers)


def explain(rank: Rank, place: AdapterFile, settings: Settings, weights: Path) -> Insight:
    """One process again: the gradient of each sample alone, those without a term of the loss, and what modules see."""
    adapter, model = _start(rank, place, {}, settings)
    full = _read(weights)
    numbers = numbering.find(adapter, model, {name: tuple(tensor.shape) for name, tensor in full.items()})
    size = sum(tensor.numel() for tensor in full.values())

    def gradient(batch: Any, model: Any) -> Values:
        numbering.load(adapter, model, full)
        _clear(adapter, model)
        torch.manual_seed(_SEED)
        adapter.step(model, batch)
        return at_numbers(numbers, _gradients(adapter, model), size)

    numbering.load(adapter, model, full)
    trace = _run(adapter, model, replace(settings, steps=1, watch=True), 0, numbers).trace
    assert trace is not None
    batch, samples, counts = adapter.batch(0), [], []
    with suppress(Exception):  # a batch of one sample may be none that this code can step
        for part in _samples(batch):
            samples.append(gradient(part, adapter.build({})))
            counts.append(_targets(part))
        samples = [sample for sample in samples if np.isfinite(sample).all()]
    terms = {}
    for name, switch in adapter.terms.items():
        model = adapter.build({})
        switch(model, False)
        terms[name] = gradient(batch, model)
        switch(model, True)
    return Insight(samples, counts if all(counts) else [], terms, trace)


def _read(weights: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(sorted(load_file(weights).items()))


# ---- one run --------------------------------------------------------------------------------------------------------


def _start(rank: Rank, place: AdapterFile, layout: Layout, settings: Settings) -> tuple[Adapter, Any]:
    device = choose_device(settings.device, rank.number)  # the current one, where there is a GPU
    sharing = device.type == "cuda" and rank.world > torch.cuda.device_count()
    config = TrainConfig(device=settings.device, share_gpu="nccl" if sharing else "gloo")
    rank.join(choose_backend(device, rank.world, config, rank.number))
    torch.manual_seed(_SEED)
    adapter = Adapter(place)
    torch.set_default_dtype(getattr(torch, adapter.dtype))
    return adapter, adapter.build(dict(layout))


def _run(
    adapter: Adapter, model: Any, settings: Settings, rank: int, numbers: Mapping[str, Any], seed: int = _SEED
) -> RankValues:
    losses, norms, gradients, parameters = [], [], [], []
    trace = Observation() if settings.watch else None
    for step in range(settings.steps):
        torch.manual_seed(_SEED + step)  # the data are the same for all seeds
        batch = adapter.batch(step)
        watched = trace if step == 0 else None
        if watched is not None:  # what the first step sets up, as a pipeline tries shapes, would be taken for the step
            torch.manual_seed(seed + step)
            adapter.step(model, batch)
        torch.manual_seed(seed + step)
        _clear(adapter, model)
        with watching(adapter, model, watched):
            result = adapter.step(model, batch)
        losses.append(_number(result, "loss"))
        gradients.append(_gradients(adapter, model))
        norms.append(None if adapter.update is None else _number(adapter.update(model), "grad_norm"))
        parameters.append({name: _flat(parameter.detach()) for name, parameter in adapter.named(model).items()})
    return RankValues(rank, numbers, losses, norms, gradients, parameters, trace)


def _clear(adapter: Adapter, model: Any) -> None:
    if not adapter.own_grad:
        for parameter in adapter.named(model).values():
            parameter.grad = None


def _gradients(adapter: Adapter, model: Any) -> dict[str, Values | None]:
    found = {name: (parameter, adapter.grad(parameter)) for name, parameter in adapter.named(model).items()}
    return {name: None if own is None else _flat(_placed(own, parameter)) for name, (parameter, own) in found.items()}


def _placed(gradient: Tensor, parameter: Any) -> Tensor:
    """DTensor may leave a gradient as summands, or whole where the parameter is cut: what reads it redistributes it."""
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(gradient, "placements", placements) == placements:
        return gradient
    from torch.distributed.tensor import DTensor

    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=placements)


def _flat(tensor: Tensor) -> Values:
    values: Values = numbering.local(tensor).detach().reshape(-1).double().cpu().numpy().copy()
    return values


def _number(result: Any, key: str) -> float | None:
    """`result[key]` of what a step returned, as a number; a step may return the loss itself."""
    if isinstance(result, Mapping):
        result = result.get(key)
    elif key != "loss":
        return None if result is None else float(result)
    if result is None:
        return None
    if isinstance(result, Tensor) and result.numel() != 1:
        gave = f"step() returned a {key} of shape {tuple(result.shape)}; it should be one number"
        raise UserError(gave, "adapter.step")
    return float(numbering.local(result) if isinstance(result, Tensor) else result)


# ---- one process ----------------------------------------------------------------------------------------------------


def _check_whole(numbers: Mapping[str, Numbers], tensors: Tensors) -> None:
    """One process holds every element once, each where its name says."""
    for name, first, end in zip(tensors.names, tensors.starts, tensors.ends, strict=True):
        if not np.array_equal(numbers[name], np.arange(first, end)):
            wrong = f"load() does not put the elements of {name} where they are in full[{name!r}], in one process"
            raise UserError(wrong, "adapter.load")


def _rounded(full: Mapping[str, Tensor], dtype: str, draw: int) -> dict[str, Tensor]:
    """The weights, each moved by one rounding up or down."""
    generator = torch.Generator().manual_seed(draw)
    eps = torch.finfo(getattr(torch, dtype)).eps
    signs = {
        name: torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        for name, tensor in full.items()
    }
    return {name: tensor * (1 + eps * signs[name]) for name, tensor in full.items()}


def _with_noise(reference: OneProcess, draws: Sequence[RankValues], numbers: Mapping[str, Numbers]) -> OneProcess:
    """By parameter, the largest distance of any draw: what rounding does to this model."""
    tensors = Tensors(reference.shapes)

    def largest(truth: Values, drawn: Sequence[Mapping[str, Values | None]]) -> Values:
        others = [at_numbers(numbers, values, tensors.size) for values in drawn]
        return tensors.largest(np.max([np.abs(other - truth) for other in others], axis=0))

    noise = [largest(truth, [draw.gradients[step] for draw in draws]) for step, truth in enumerate(reference.gradients)]
    moved = [
        largest(truth, [dict(draw.parameters[step]) for draw in draws])
        for step, truth in enumerate(reference.parameters)
    ]

    def scalar(truth: Sequence[float | None], pick: Callable[[RankValues], Sequence[float | None]]) -> float:
        pairs = [(a, b) for draw in draws for a, b in zip(truth, pick(draw), strict=True)]
        return max((abs(a - b) / (abs(a) or 1.0) for a, b in pairs if a is not None and b is not None), default=0.0)

    return replace(
        reference, noise=noise, parameter_noise=moved,
        loss_noise=scalar(reference.losses, lambda draw: draw.losses),
        norm_noise=scalar(reference.norms, lambda draw: draw.norms),
    )  # fmt: skip


def _samples(batch: Any) -> list[Any]:
    """The batch in samples: every tensor of it cut along its first dimension, which all share."""
    tensors = _tensors(batch)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) != 1 or not tensors:
        return []
    return [_sliced(batch, slice(index, index + 1)) for index in range(sizes.pop())]


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [tensor for part in batch for tensor in _tensors(part)] if isinstance(batch, list | tuple) else []


def _sliced(batch: Any, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part]
    if isinstance(batch, Mapping):
        return {key: _sliced(value, part) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        cut = [_sliced(value, part) for value in batch]
        return tuple(cut) if isinstance(batch, tuple) else cut
    return batch


def _targets(sample: Any) -> int:
    """How many targets carry loss: by the tensor with torch's ignored index in it, or that is called labels."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    tensors = [labels] if isinstance(labels, Tensor) else [t for t in _tensors(sample) if not t.is_floating_point()]
    return int((tensors[-1] != _IGNORE).sum()) if tensors else 0


def _versions() -> dict[str, str]:
    """Of the packages in use here, those with compiled code or parallelism in them."""
    of = packages_distributions()
    found = {of[name][0] for name in _PACKAGES if name in sys.modules and name in of}
    return {name: version(name) for name in sorted(found)}
