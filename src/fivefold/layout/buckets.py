"""Buckets: which parameters are reduced together, and in which order. Pure arithmetic, for the ranks and the planner.

    for bucket in buckets(held(spec, layout)):
        bucket.names, bucket.partial, bucket.size(), bucket.padded(4)

A decoder's backward pass finishes its units one by one: the top (last norm, head), the blocks from the last to the
first, the bottom (embeddings). Consecutive units join until a bucket is worth a collective of its own. Parameters whose
gradient must also be summed over tp have buckets of their own, since only they take part in that sum.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import TensorShard, chunk, over_tp
from fivefold.spec.model import ModelSpec, Parameter

MINIMUM = 1 << 22  # elements of a bucket: 16 MiB of float32 keep a link busy far longer than its start takes
TOP, BOTTOM = "top", "bottom"


@dataclass(frozen=True)
class Held:
    """A parameter as one tp rank holds it: the block rows x columns of the whole."""

    parameter: Parameter
    tp: TensorShard
    rows: range
    columns: range | None  # None: the parameter is a vector

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def width(self) -> int:
        return 1 if self.columns is None else len(self.columns)

    @property
    def size(self) -> int:
        return len(self.rows) * self.width

    @property
    def late(self) -> bool:
        """Whether a schedule that splits backward computes its gradient apart: the weights of linears."""
        return self.parameter.kind == "linear"

    def share(self, parts: int, index: int) -> range:
        """The rows (of the whole parameter) that ZeRO gives to rank `index` of `parts`."""
        mine = chunk(len(self.rows), parts, index)
        return self.rows[mine.start : mine.stop]

    def block(self, parts: int, index: int) -> tuple[range, ...]:
        """The same as rows, and for a matrix columns, of the whole parameter."""
        rows = self.share(parts, index)
        return (rows,) if self.columns is None else (rows, self.columns)

    def share_size(self, parts: int) -> int:
        """Elements of the largest share, to which the others are padded."""
        return -(-len(self.rows) // parts) * self.width


def held(spec: ModelSpec, layout: Layout, tp_rank: int = 0) -> dict[str, Held]:
    """Every parameter of the model, as tp rank `tp_rank` holds it."""
    shards = over_tp(spec, layout)
    return {
        parameter.name: _held(parameter, shards[parameter.name], layout.tp, tp_rank) for parameter in spec.parameters()
    }


def _held(parameter: Parameter, shard: TensorShard, tp: int, rank: int) -> Held:
    rows = chunk(parameter.shape[0], tp, rank) if shard.dim == 0 else range(parameter.shape[0])
    if len(parameter.shape) == 1:
        return Held(parameter, shard, rows, None)
    columns = chunk(parameter.shape[1], tp, rank) if shard.dim == 1 else range(parameter.shape[1])
    return Held(parameter, shard, rows, columns)


@dataclass(frozen=True)
class Grouping:
    """The parameters of one bucket, and the units of the decoder that they come from."""

    held: tuple[Held, ...]
    units: tuple[str, ...]  # "top", "layers.3", "bottom": in the order in which backward finishes them
    partial: bool  # gradients are summed over tp too
    late: bool = False  # gradients come from weight-gradient passes of their own
    shared: bool = False  # gradients are summed over the two ends of the pipeline too

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.held)

    def size(self) -> int:
        return sum(one.size for one in self.held)

    def padded(self, parts: int) -> int:
        """Elements that a reduce-scatter or all-gather over `parts` ranks is handed: shares padded to the first."""
        return parts * sum(one.share_size(parts) for one in self.held)


def buckets(
    parameters: Iterable[Held], minimum: int = MINIMUM, split: bool = False, shared: Collection[str] = ()
) -> list[Grouping]:
    """The buckets, in the order in which backward completes them. Forward needs them in the opposite order.

    `split`: the schedule computes the gradients of linears apart from the rest, so they have buckets of their own; so
    have parameters that are `shared` with another stage.
    """
    units: dict[str, list[Held]] = {}
    for one in parameters:
        units.setdefault(unit_of(one.name), []).append(one)
    order = sorted(units, key=_when_finished)
    groups: list[Grouping] = []
    for kind in product((False, True), repeat=3):
        chosen = {unit: [one for one in units[unit] if _kind(one, split, shared) == kind] for unit in order}
        groups += [Grouping(members, names, *kind) for members, names in _join(chosen, minimum)]
    return sorted(groups, key=lambda group: order.index(group.units[-1]))


def _kind(one: Held, split: bool, shared: Collection[str]) -> tuple[bool, bool, bool]:
    return one.tp.partial, split and one.late, one.name in shared


def _join(units: dict[str, list[Held]], minimum: int) -> Iterator[tuple[tuple[Held, ...], tuple[str, ...]]]:
    """Consecutive units' parameters until they are enough, and the names of those units."""
    names: list[str] = []
    members: list[Held] = []
    for unit, mine in units.items():
        if mine:
            names.append(unit)
            members += mine
        if sum(one.size for one in members) >= minimum:
            yield tuple(members), tuple(names)
            names, members = [], []
    if members:
        yield tuple(members), tuple(names)


def unit_of(name: str) -> str:
    """The part of the decoder that must have run forward when this parameter is needed."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return f"layers.{rest.partition('.')[0]}"
    return BOTTOM if first in ("embedding", "positions") else TOP


def _layer(unit: str) -> int:
    return int(unit.partition(".")[2])


def _when_finished(unit: str) -> float:
    ends = {TOP: -math.inf, BOTTOM: math.inf}
    return ends[unit] if unit in ends else -_layer(unit)


def layers_of(units: Collection[str]) -> list[str]:
    """The blocks among `units`, first to last."""
    return sorted((unit for unit in units if unit not in (TOP, BOTTOM)), key=_layer)
