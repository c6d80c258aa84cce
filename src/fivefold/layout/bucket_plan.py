"""Buckets: which parameters' gradients are reduced together, and in which order.

    for bucket in buckets(local_params(spec, layout).values()):
        bucket.names, bucket.partial, bucket.size(), bucket.padded(4)

A decoder's backward pass finishes its units one by one: the head unit (last norm, head), the blocks from the last to
the first, the embedding unit. Consecutive units are joined until a bucket is large enough for a collective.
Parameters whose gradient must also be summed over tp have buckets of their own: only they take part in that sum.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from fivefold.layout.sharding import LocalParam
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT

# Of a bucket: sending 16 MiB of float32 takes far longer than starting the collective.
MIN_BUCKET_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class BucketParams:
    """The parameters of one bucket, and the units of the decoder that they come from."""

    params: tuple[LocalParam, ...]
    units: tuple[int, ...]  # in the order in which backward finishes them
    partial: bool  # gradients are also summed over tp
    deferred: bool = False  # gradients come from separate weight-gradient passes (W)
    tied: bool = False  # gradients are also summed over the first and last pipeline stage
    experts: bool = False  # sharded over efsdp, the ranks that have the same experts
    full_precision: bool = False  # new weights are gathered in full precision

    @property
    def fsdp_axis(self) -> Literal["fsdp", "efsdp"]:
        return self.params[0].fsdp_axis

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    def size(self) -> int:
        return sum(param.size for param in self.params)

    def padded(self, parts: int) -> int:
        """Elements of the buffer of a reduce-scatter or all-gather over `parts` ranks: shares padded to the largest."""
        return parts * sum(param.share_size(parts) for param in self.params)


def buckets(
    parameters: Iterable[LocalParam],
    min_elements: int = MIN_BUCKET_ELEMENTS,
    *,
    split_backward: bool = False,
    separate_tied: bool = False,
    low_precision: bool = False,
) -> list[BucketParams]:
    """The buckets, in the order in which backward completes them. Forward needs them in the opposite order.

    Separate buckets are made for linears, if the schedule computes their gradients in separate passes
    (`split_backward`); for tied parameters, if another pipeline rank has a copy (`separate_tied`); for experts, which
    are sharded over another axis; for full-precision parameters, if the others are gathered in `low_precision`.
    """

    def kind_of(param: LocalParam) -> tuple[bool, ...]:
        parameter = param.parameter
        return (
            param.tp.partial,
            split_backward and parameter.deferred,
            separate_tied and parameter.tied,
            parameter.experts > 0,
            low_precision and parameter.full_precision,
        )

    units: dict[int, list[LocalParam]] = {}
    for param in parameters:
        units.setdefault(param.parameter.unit, []).append(param)
    order = sorted(units, reverse=True)
    groups: list[BucketParams] = []
    for kind in product((False, True), repeat=5):
        chosen = {unit: [param for param in units[unit] if kind_of(param) == kind] for unit in order}
        groups += [BucketParams(params, of_units, *kind) for params, of_units in _join(chosen, min_elements)]
    return sorted(groups, key=lambda group: -group.units[-1])


def _join(
    units: dict[int, list[LocalParam]], min_elements: int
) -> Iterator[tuple[tuple[LocalParam, ...], tuple[int, ...]]]:
    """The parameters of consecutive units, as many as it takes to have `min_elements` elements, and those units."""
    joined_units: list[int] = []
    joined: list[LocalParam] = []
    for unit, params in units.items():
        if params:
            joined_units.append(unit)
            joined += params
        if sum(param.size for param in joined) >= min_elements:
            yield tuple(joined), tuple(joined_units)
            joined_units, joined = [], []
    if joined:
        yield tuple(joined), tuple(joined_units)


def layers_of(units: Iterable[int]) -> list[int]:
    """The layers among `units`, first to last."""
    return sorted(unit for unit in set(units) if EMBEDDING_UNIT < unit < HEAD_UNIT)
