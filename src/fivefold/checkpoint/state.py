"""A trainer's state as pieces: masters and AdamW's moments by global name. The model's own weights are made of them."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from fivefold.checkpoint.pieces import Piece
from fivefold.optimizers.optimizer import MOMENTS, Optimizer
from fivefold.parallel.zero import Weights

MODEL = "model"
Shapes = Mapping[str, tuple[int, ...]]  # of every parameter of the model


def model_key(name: str) -> str:
    return f"{MODEL}.{name}"


def keys(name: str, optimizer: bool) -> list[str]:
    """What a checkpoint has of a parameter: its master, and AdamW's moments of it."""
    return [f"{kind}.{name}" for kind in (MODEL, *(MOMENTS if optimizer else ()))]


def held(weights: Weights, shapes: Shapes, optimizer: Optimizer | None) -> dict[str, Piece]:
    """All that this rank holds; the pieces share its memory."""
    return _pieces(weights.masters, weights, shapes, optimizer)


def written(weights: Weights, shapes: Shapes, optimizer: Optimizer) -> dict[str, Piece]:
    """The part of it that this rank writes: of equal copies the ranks take turns, tensor by tensor."""
    mine = []
    for number, name in enumerate(shapes):
        if name in weights.masters:
            copy, copies = weights.copies(name)
            mine += [name] if number % copies == copy else []
    return _pieces(mine, weights, shapes, optimizer)


def _pieces(names: Iterable[str], weights: Weights, shapes: Shapes, optimizer: Optimizer | None) -> dict[str, Piece]:
    return {
        key: Piece.of(tensor, shapes[name], weights.block(name))
        for name in names
        for key, tensor in _tensors(name, weights, optimizer)
        if tensor.numel()
    }


def _tensors(name: str, weights: Weights, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    moments = optimizer.moments(name).values() if optimizer is not None else ()
    tensors = (weights.masters[name].detach(), *moments)
    return zip(keys(name, optimizer is not None), tensors, strict=True)
