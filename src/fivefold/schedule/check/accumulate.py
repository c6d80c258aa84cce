"""Accumulate: a stage's weight gradients are added up in ascending order of microbatches, as a single device does it.

Floating-point sums depend on their order; this is what makes a pipeline's gradients equal to the last bit.
"""

from collections.abc import Iterator
from itertools import pairwise

from fivefold.schedule.check.index import Index, Problem


def accumulate(index: Index) -> Iterator[Problem]:
    for stage, rank in enumerate(index.schedule.placement.owner):
        for before, after in pairwise(index.weight_gradients(stage)):
            if after < before:
                yield Problem(
                    f"rank {rank} has {index.named(rank, after)} before {index.named(rank, before)}: "
                    f"the weight gradients of stage {stage} would be summed in another order than on a single device",
                    rank,
                    after,
                )
