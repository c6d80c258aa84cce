"""One run of an adapter in a rank: start, step, and read what came out as plain arrays."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.foreign import numbering
from fivefold.foreign.adapter import Adapter, AdapterFile, Layout, layout_text
from fivefold.foreign.dropout import still
from fivefold.foreign.measurement import SEED, Numbers, Observation, RankValues, Settings, Values, joined
from fivefold.foreign.watch import watching
from fivefold.job.config import TrainConfig
from fivefold.launch.device import choose_backend, choose_device
from fivefold.launch.processes import Rank
from fivefold.support.errors import UserError

_SECOND_GROUP = "initialize the default process group twice"  # torch's words
DEVICE = "FIVEFOLD_DEVICE"  # what an adapter may read while it is imported


def start(rank: Rank, place: AdapterFile, layout: Layout, settings: Settings) -> tuple[Adapter, Any]:
    """The adapter, and its model in a layout, in the process group of all ranks."""
    device = choose_device(settings.device, rank.number)  # the current one, where there is a GPU
    sharing = device.type == "cuda" and rank.world > torch.cuda.device_count()
    config = TrainConfig(device=settings.device, share_gpu="nccl" if sharing else "gloo")
    rank.join(choose_backend(device, rank.world, config, rank.number))
    adapter = import_for(place, settings.device)
    torch.set_default_dtype(getattr(torch, adapter.dtype))
    model = build(adapter, layout, settings)
    if device.type == "cuda" and (name := _on_cpu(adapter, model)):
        raise UserError(
            f"the layout {layout_text(layout)} has {name} on the cpu, and --device is cuda; build(layout, device) is "
            "given the device to put the model on",
            "adapter.device",
        )
    return adapter, model


def import_for(place: AdapterFile, device: str) -> Adapter:
    """The adapter's file, which may read the device; refused where it does not run there."""
    os.environ[DEVICE] = device
    adapter = Adapter(place)
    if device not in adapter.devices:
        raise UserError(
            f"the adapter {place.text} does not run on {device}: its DEVICES are {', '.join(adapter.devices)}",
            "adapter.device",
        )
    return adapter


def build(adapter: Adapter, layout: Layout, settings: Settings) -> Any:
    """A new model, whose random numbers are those of every other: what build draws and load does not replace, as
    buffers, is the same each time."""
    torch.manual_seed(settings.seed)
    try:
        return adapter.build(layout, settings.device)
    except ValueError as error:
        if _SECOND_GROUP not in str(error):
            raise
        raise UserError(
            "build() calls init_process_group; leave it out: the process group is up", "adapter.build"
        ) from error


def _on_cpu(adapter: Adapter, model: Any) -> str:
    return next((name for name, parameter in adapter.named(model).items() if parameter.device.type == "cpu"), "")


def run(
    adapter: Adapter, model: Any, settings: Settings, rank: int, numbers: Mapping[str, Numbers], another_seed: int = 0
) -> RankValues:
    """All steps, from the weights that were loaded. The seed is that of dropout alone: data and weights have theirs."""
    return joined([*stepped(adapter, model, settings, rank, numbers, another_seed)])


def stepped(
    adapter: Adapter, model: Any, settings: Settings, rank: int, numbers: Mapping[str, Numbers], another_seed: int = 0
) -> Iterator[RankValues]:
    """The same in parts, each as soon as it is measured, as what follows may fail: a step, and its update."""
    seed = settings.seed + another_seed
    trace = Observation() if settings.watch else None
    for step in range(settings.steps):
        batch = batch_of(adapter, step, settings)
        batches = [batch_digest(batch)]
        watched = trace if step == 0 else None
        with still(settings.still):
            if watched is not None:  # what the first step sets up, as a pipeline tries shapes, is not to be seen
                torch.manual_seed(seed + step)
                stepping(adapter, model, batch)
            torch.manual_seed(seed + step)
            clear(adapter, model)
            with watching(adapter, model, watched):
                result = stepping(adapter, model, batch)
        of_numbers = numbers if step == 0 else {}
        losses, gradients = [number(result, "loss")], [gradients_of(adapter, model)]
        yield RankValues(rank, of_numbers, losses, [], gradients, [], watched, batches)
        norm = None if adapter.update is None else number(adapter.update(model), "grad_norm", "update")
        parameters = {name: _flat(parameter.detach()) for name, parameter in adapter.named(model).items()}
        yield RankValues(rank, {}, [], [norm], [], [parameters])


def stepping(adapter: Adapter, model: Any, batch: Any) -> Any:
    """One step, which should return."""
    try:
        return adapter.step(model, batch)
    except SystemExit as error:
        raise UserError(
            f"step() ended its process, by sys.exit({error.code}); it should return", "adapter.step"
        ) from None


def batch_of(adapter: Adapter, step: int, settings: Settings) -> Any:
    """The global batch of a step, on the device. Another seed begins with another batch of the adapter's."""
    torch.manual_seed(settings.seed + step)
    return placed(adapter.batch(step + abs(settings.seed - SEED) * settings.steps), settings.device)


def batch_digest(batch: Any) -> str:
    """Of what is in a batch; of an object that is no tensor, container or plain value, its type."""
    found = hashlib.sha256()
    for part in _parts_of(batch):
        found.update(part)
    return found.hexdigest()


def _parts_of(batch: Any) -> Iterator[bytes]:
    if isinstance(batch, Tensor) and batch.layout == torch.strided:
        whole = batch.detach().cpu().contiguous()
        yield f"{whole.dtype} {tuple(whole.shape)}".encode()
        yield whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    elif isinstance(batch, np.ndarray) and batch.dtype != object:
        yield f"{batch.dtype} {batch.shape}".encode() + batch.tobytes()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield repr(key).encode()
            yield from _parts_of(value)
    elif isinstance(batch, list | tuple):
        yield f"{len(batch)}".encode()
        for value in batch:
            yield from _parts_of(value)
    else:
        plain = batch is None or isinstance(batch, int | float | str | bytes)
        yield (repr(batch) if plain else type(batch).__name__).encode()


def placed(batch: Any, device: str) -> Any:
    """The same with every tensor on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if type(batch) is dict:
        return {key: placed(value, device) for key, value in batch.items()}
    return type(batch)(placed(value, device) for value in batch) if type(batch) in (list, tuple) else batch


def clear(adapter: Adapter, model: Any) -> None:
    if not adapter.own_grad:
        for parameter in adapter.named(model).values():
            parameter.grad = None


def gradients_of(adapter: Adapter, model: Any) -> dict[str, Values | None]:
    found = {name: (parameter, adapter.grad(parameter)) for name, parameter in adapter.named(model).items()}
    return {name: None if own is None else _flat(_as_cut(own, parameter)) for name, (parameter, own) in found.items()}


def _as_cut(gradient: Tensor, parameter: Any) -> Tensor:
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


def number(result: Any, key: str, of: str = "step") -> float | None:
    """`result[key]` of what a step returned, as a number; a step may return the loss itself. A DTensor, which may be a
    rank's summand of it, is put together."""
    if isinstance(result, Mapping):
        result = result.get(key)
    if result is None:
        return None
    if hasattr(result, "full_tensor"):
        result = result.detach().full_tensor()
    if isinstance(result, Tensor) and result.numel() != 1:
        gave = f"{of}() returned a {key} of shape {tuple(result.shape)}; it should be one number"
        raise UserError(gave, "adapter.step")
    try:
        return float(result)
    except (TypeError, ValueError):
        gave = f"{of}() returned {_described(result)} as {key}; it should return {{'{key}': a number}}"
        raise UserError(gave, "adapter.step") from None


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
