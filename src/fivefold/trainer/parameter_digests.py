"""Digests of parameters after each step, in digests.jsonl: `train.digest=true`, which `fivefold compare runs` reads.

A digest is an integer that changes with any bit of a parameter: the sum of (2g + 1) * w[g] modulo 2^64 over its words
w of 32 bits (16 of 2-byte numbers), where g is the word's index in the whole parameter. That of `corruption.py` counts
words from the start of a rank's tensor; this one does not depend on who holds which part, so all layouts that have the
same weights have the same digest. For the same reason it needs no product of the size of the tensor: the index of a
word is row * width + column, so the sums of rows and columns suffice.

A digest does not say by how much two parameters differ; a sketch does. It is four sums of a parameter's elements, with
signs that a hash of row and column gives. The difference of two sketches is the sketch of the difference, and the mean
of its squares is, but for chance, the squared distance of the parameters (Alon, Matias, Szegedy 1996).
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fivefold.launch.waits import timed_wait
from fivefold.layout.sharding import Box
from fivefold.parallel.collectives import all_reduce, wait, waiting
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import ZeroBuckets
from fivefold.trainer.corruption import model_weights
from fivefold.trainer.engine import Engine
from fivefold.trainer.records import AS_THE_MODEL_HAS_IT, Digest, Digests

SKETCHES = 4
_WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
_CHUNK_WORDS = {"cpu": 1 << 20, "cuda": 1 << 24}  # at a time; each takes 8 bytes more
_INTEGERS, _FLOATS = 3, 1 + SKETCHES  # of a parameter: what `_Sums` adds up over ranks


class ParameterDigests:
    """Digests of all parameters of a job's model, over all ranks."""

    def __init__(self, engine: Engine, mesh: Mesh):
        self.engine, self.mesh = engine, mesh
        names = [parameter.name for parameter in engine.job.model.parameters()]
        self.shapes = {parameter.name: parameter.shape for parameter in engine.job.model.parameters()}
        self.rows = {name: row for row, name in enumerate([*names, *map(AS_THE_MODEL_HAS_IT.format, names)])}
        self.signs = _Signs(mesh.device)

    def after(self, step: int) -> Digests | None:
        """Collective: the digests of the weights after a step, on rank 0; None on the others."""
        with _disable_current_modes(), torch.no_grad():
            device, world = self.mesh.device, self.mesh.world
            integers = torch.zeros(len(self.rows), _INTEGERS, dtype=torch.int64, device=device)
            floats = torch.zeros(len(self.rows), _FLOATS, dtype=torch.float64, device=device)
            for name, row, tensor, box, (index, count) in self._held():
                whole, sums = _digest(tensor, box, self.shapes[name], self.signs)
                first = index == 0
                # If all copies are the same, the second adds up to nothing.
                integers[row] = torch.stack((whole * first, whole - whole * (count * first), torch.ones_like(whole)))
                floats[row] = sums * first
            with waiting("the digests of parameters", self.mesh, world):
                integers = timed_wait(wait, all_reduce(integers, world), world)
                floats = timed_wait(wait, all_reduce(floats, world), world)
            return self._record(step, integers.tolist(), floats.tolist()) if world.rank == 0 else None

    def _held(self) -> Iterator[tuple[str, int, Tensor, Box, tuple[int, int]]]:
        """What this rank holds: a parameter's name, its row in the sums, a tensor, where it lies in the parameter, and
        which of how many copies it is."""
        weights = self.engine.weights
        for name, master in weights.masters.items():
            yield name, self.rows[name], master.detach(), weights.master_box(name), weights.copies(name)
        if isinstance(weights, ZeroBuckets):
            weights.wait_params()
        for name, weight in ((state.name.partition(" ")[0], state.tensor) for state in model_weights(self.engine)):
            copy = weights.copies(name, of_weight=True)
            yield name, self.rows[AS_THE_MODEL_HAS_IT.format(name)], weight, weights.local_params[name].box, copy

    def _record(self, step: int, integers: list[list[int]], floats: list[list[float]]) -> Digests:
        held = {name: row for name, row in self.rows.items() if integers[row][2]}
        unequal = [name for name, row in held.items() if integers[row][1]]
        return Digests(
            step=step,
            parameters={name: _as_digest(integers[row][0], floats[row]) for name, row in held.items()},
            # Without deterministic kernels, ranks of tp may round a norm's gradient each in its own way.
            unequal=unequal if self.engine.job.train.deterministic else [],
        )


def _as_digest(bits: int, sums: list[float]) -> Digest:
    square, *sketch = (value if math.isfinite(value) else None for value in sums)
    return Digest(f"{bits % (1 << 64):016x}", None if square is None else math.sqrt(square), tuple(sketch))


class _Signs:
    """Signs of rows and columns, 1.0 or -1.0, kept for the parameters that share them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def rows(self, at: range) -> tuple[Tensor, Tensor]:
        """The indices of rows, and their signs: [n], [n, SKETCHES]."""
        return self._kept(("rows", at), lambda: np.arange(at.start, at.stop), 1)

    def columns(self, box: Box, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The indices of a box of what a row has, counted through all its dimensions, and their signs."""
        return self._kept(("columns", box, shape), lambda: _indices(box, shape), 2)

    def _kept(self, key: tuple[object, ...], make: Callable[[], NDArray[np.int64]], salt: int) -> tuple[Tensor, Tensor]:
        if key not in self.kept:
            indices = make()
            self.kept[key] = (
                torch.from_numpy(indices).to(self.device),
                torch.from_numpy(_hashed_signs(indices, salt)).to(self.device),
            )
        return self.kept[key]


def _indices(box: Box, shape: tuple[int, ...]) -> NDArray[np.int64]:
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return whole[tuple(slice(side.start, side.stop) for side in box)].reshape(-1)


def _hashed_signs(indices: NDArray[np.int64], salt: int) -> NDArray[np.float64]:
    """[n, SKETCHES]: bits of an integer hash, the same on every machine."""
    words = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * 0xD1342543DE82EF95 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    words ^= words >> np.uint64(31)
    bits = (words[:, None] >> np.arange(SKETCHES, dtype=np.uint64)) & np.uint64(1)
    return 1.0 - 2.0 * bits.astype(np.float64)


def _digest(tensor: Tensor, box: Box, shape: tuple[int, ...], signs: _Signs) -> tuple[Tensor, Tensor]:
    """(digest, [squared norm, sketch]) of a box of a parameter, as its part of those of the whole."""
    if len(shape) == 1:
        shape, box = (1, *shape), (range(1), *box)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(_FLOATS, dtype=torch.float64, device=tensor.device)
    if not tensor.numel():
        return total, sums
    flat = tensor.reshape(len(box[0]), -1)
    rows, row_signs = signs.rows(box[0])
    columns, column_signs = signs.columns(box[1:], shape[1:])
    words_each = max(1, flat.element_size() // 4)  # words of a number
    width = math.prod(shape[1:]) * words_each
    if words_each > 1:
        within = torch.arange(words_each, device=tensor.device)
        columns = (columns[:, None] * words_each + within).reshape(-1)
    step = max(1, _CHUNK_WORDS.get(tensor.device.type, 1 << 20) // columns.numel())
    for start in range(0, flat.shape[0], step):
        part, here = flat[start : start + step].contiguous(), slice(start, start + step)
        words = part.view(_WORD_TYPES[part.element_size()]).to(torch.int64)
        total += (words.sum(0) * (2 * columns + 1)).sum() + (words.sum(1) * rows[here]).sum() * (2 * width)
        numbers = part.to(torch.float64)
        sums[0] += torch.linalg.vector_norm(numbers).square()
        sums[1:] += (numbers @ column_signs * row_signs[here]).sum(0)
    return total, sums
