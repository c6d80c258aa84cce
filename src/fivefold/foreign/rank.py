"""What a rank does with an adapter: build, number, load, step; and one process, which is the truth for all layouts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.foreign import numbering
from fivefold.foreign.adapter import Adapter, AdapterFile, Layout
from fivefold.foreign.compare import Tensors, at_numbers
from fivefold.foreign.dropout import still
from fivefold.foreign.measurement import (
    AdapterDescription,
    Insight,
    Numbers,
    OneProcess,
    RankValues,
    Settings,
    Values,
    joined,
)
from fivefold.foreign.packages import files_beside, versions
from fivefold.foreign.stepping import (
    batch_digest,
    batch_of,
    build,
    clear,
    gradients_of,
    import_for,
    placed,
    run,
    start,
    stepped,
    stepping,
)
from fivefold.launch.processes import Rank
from fivefold.support.errors import UserError
from fivefold.support.text import first_of_many

_NOISE_DRAWS = 3  # runs of one process with every weight moved by a rounding
_IGNORE = -100  # what torch's cross-entropy leaves out


def describe(rank: Rank, place: AdapterFile, chosen: Sequence[Layout], device: str) -> AdapterDescription:
    """What the adapter says of these layouts, or else of its own."""
    adapter = import_for(place, device)
    layouts = [*chosen] or adapter.layouts
    worlds, known = [adapter.world(layout) for layout in layouts], [adapter.known(layout) for layout in layouts]
    return AdapterDescription(layouts, worlds, adapter.dtype, known, adapter.update is not None)


def measure(rank: Rank, place: AdapterFile, layout: Layout, settings: Settings, weights: Path) -> Iterator[RankValues]:
    """One rank of a layout, from the weights that one process has written; in parts, as they are measured."""
    adapter, model = start(rank, place, layout, settings)
    full = _read(weights)
    numbers = numbering.find(adapter, model, {name: tuple(tensor.shape) for name, tensor in full.items()})
    numbering.load(adapter, model, full)
    yield from stepped(adapter, model, settings, rank.number, numbers)


def refer(rank: Rank, place: AdapterFile, settings: Settings, weights: Path) -> OneProcess:
    """One process; writes the weights that all layouts begin with."""
    from safetensors.torch import save_file

    adapter, model = start(rank, place, {}, settings)
    full = dict(sorted(numbering.general_position(adapter, model).items()))  # elements are numbered in this order
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    save_file({name: tensor.contiguous() for name, tensor in full.items()}, weights)
    numbers = numbering.find(adapter, model, shapes)
    tensors = Tensors(shapes)
    _check_whole(numbers, tensors)
    _check_batches(adapter, settings)
    taught = [name for name, parameter in adapter.named(model).items() if parameter.requires_grad]

    def once(weights: Mapping[str, Tensor], another: int = 0, still: bool = False) -> RankValues:
        own = replace(settings, still=still)
        model = build(adapter, {}, own)
        numbering.load(adapter, model, weights)
        parts: list[RankValues] = []
        for part in stepped(adapter, model, own, 0, numbers, another):  # what is refused may be why the next part fails
            parts.append(part)
            _check(joined(parts))
        return joined(parts)

    values, random = once(full), ""
    if values.losses != once(full, another=1).losses:
        values = once(full, still=True)
        random = "dropout" if values.losses == once(full, another=1, still=True).losses else "draws"
        values = values if random == "dropout" else once(full)
    reference = OneProcess(
        shapes,
        losses=[float(loss or 0.0) for loss in values.losses],
        norms=values.norms,
        gradients=[at_numbers(numbers, gradients, tensors.size) for gradients in values.gradients],
        weights=np.concatenate([tensor.reshape(-1).numpy() for tensor in full.values()]),
        parameters=[at_numbers(numbers, after, tensors.size) for after in values.parameters],
        versions=versions(),
        random=random,
        threads=torch.get_num_threads(),
        files=files_beside(place),
        batches=values.batches,
        ungraded=[name for name in taught if all(gradients[name] is None for gradients in values.gradients)],
    )
    if adapter.dtype == "float64":
        return reference
    draws = [once(_rounded(full, adapter.dtype, draw), still=random == "dropout") for draw in range(_NOISE_DRAWS)]
    return _with_noise(reference, draws, numbers)


def explain(rank: Rank, place: AdapterFile, settings: Settings, weights: Path) -> Insight:
    """One process again: the gradient of each sample alone, those without a term of the loss, and what modules see."""
    adapter, model = start(rank, place, {}, settings)
    full = _read(weights)
    numbers = numbering.find(adapter, model, {name: tuple(tensor.shape) for name, tensor in full.items()})
    size = sum(tensor.numel() for tensor in full.values())

    def gradient(batch: Any, model: Any) -> Values:
        numbering.load(adapter, model, full)
        clear(adapter, model)
        torch.manual_seed(settings.seed)
        with still(settings.still):
            stepping(adapter, model, placed(batch, settings.device))
        return at_numbers(numbers, gradients_of(adapter, model), size)

    numbering.load(adapter, model, full)
    trace = run(adapter, model, replace(settings, steps=1, watch=True), 0, numbers).trace
    assert trace is not None
    terms = {}
    for name, switch in adapter.terms.items():
        model = build(adapter, {}, settings)
        switch(model, False)
        terms[name] = gradient(batch_of(adapter, 0, settings), model)
        switch(model, True)
    samples, counts = _alone(adapter, settings, gradient)
    return Insight(samples, counts, terms, trace)


def _alone(
    adapter: Adapter, settings: Settings, gradient: Callable[[Any, Any], Values]
) -> tuple[dict[int, Values], list[int]]:
    """The gradient of each sample that has one, by its number, and how many targets each sample has. A batch of one
    sample may be none that this code can step: then there are none."""
    parts = _samples(batch_of(adapter, 0, settings))
    counts = [_targets(part) for part in parts]
    try:
        found = {number: gradient(part, build(adapter, {}, settings)) for number, part in enumerate(parts)}
    except Exception:
        return {}, counts
    has = {number: own for number, own in found.items() if np.isfinite(own).all() and np.abs(own).max(initial=0.0) > 0}
    return has, counts if any(counts) else []


def _check_batches(adapter: Adapter, settings: Settings) -> None:
    for step in range(settings.steps):
        if batch_digest(batch_of(adapter, step, settings)) != batch_digest(batch_of(adapter, step, settings)):
            unlike = "batch(step) is not the same twice; it must be the same on all ranks, in every layout"
            raise UserError(unlike, "adapter.batch")


def _check(values: RankValues) -> None:
    """Losses and gradients of one process are something to compare with."""
    for step, loss in enumerate(values.losses):
        if loss is None:
            raise UserError("step() gave no loss in one process; it should return {'loss': ...}", "adapter.step")
        if not math.isfinite(loss):
            gave = f"step() gave the loss {loss} in one process, in step {step + 1}: nothing can be compared with that"
            raise UserError(gave, "adapter.step")
    for step, gradients in enumerate(values.gradients):
        given = {name: own for name, own in gradients.items() if own is not None}
        elsewhere = "did step() call backward? If gradients are elsewhere, add grad(parameter)"
        if not given:
            raise UserError(f"one process has no gradient; {elsewhere}", "adapter.gradient")
        if odd := [name for name, own in given.items() if not np.isfinite(own).all()]:
            kind = "NaN" if any(np.isnan(given[name]).any() for name in odd) else "infinite"
            gave = f"step() gave {kind} gradients in one process: {first_of_many(odd)} (step {step + 1})"
            raise UserError(gave, "adapter.gradient")
        if not any(own.any() for own in given.values()):
            raise UserError(f"all gradients of one process are zero; {elsewhere}", "adapter.gradient")


def _read(weights: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(sorted(load_file(weights).items()))


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
