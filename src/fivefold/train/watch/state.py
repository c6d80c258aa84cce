"""What a rank holds between steps, tensor by tensor, and over which axes others hold the same bits of it."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fivefold.parallel.zero import Replicated
from fivefold.train.engine import Engine
from fivefold.train.watch.copies import Lane, lane_of


class Kept(NamedTuple):
    name: str
    tensor: Tensor
    lane: Lane  # empty: nobody else has it


def state_of(engine: Engine) -> list[Kept]:
    """What a checkpoint would have: masters, the optimizer's states, and buffers."""
    return [*_learned(engine), *_buffers(engine)]


def _learned(engine: Engine) -> Iterator[Kept]:
    for name, master in engine.weights.masters.items():
        lane = _lane(engine, name)
        for kind, tensor in {"": master.detach(), **engine.optimizer.kept[name]}.items():
            if tensor.numel():
                yield Kept(f"{kind} of {name}" if kind else name, tensor, lane)


def _buffers(engine: Engine) -> Iterator[Kept]:
    lane = lane_of(["stage"], engine.job.layout) if engine.buffers else ()
    return (Kept(name, buffer, lane) for name, buffer in engine.buffers.items())


def computed_with(engine: Engine) -> list[Kept]:
    """The model's own weights, where they are not the masters themselves. ZeRO 3 has none between steps."""
    weights = engine.weights
    if not isinstance(weights, Replicated):
        return []
    return [
        Kept(f"{name} as the model has it", weight, _lane(engine, name, whole=True))
        for name, weight in weights.weights.items()
        if weight.numel() and not _same(weight, weights.masters[name])
    ]


def _same(weight: Tensor, master: Tensor) -> bool:
    same = weight.untyped_storage()._cdata == master.untyped_storage()._cdata
    return same and weight.numel() == master.numel()


def _lane(engine: Engine, name: str, whole: bool = False) -> Lane:
    axes = engine.weights.copied_over(name, whole)
    if not engine.job.train.deterministic and not engine.weights.held[name].tp.partial:
        axes = [axis for axis in axes if axis != "tp"]  # each rank has a gradient of its own, and its own rounding
    return lane_of(axes, engine.job.layout)
