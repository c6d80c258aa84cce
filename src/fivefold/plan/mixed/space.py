"""All layouts over unlike nodes at once: arrays of choices and of the groups' orders, with closed forms (closed.py)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.plan.cost.footprint import HEADROOM
from fivefold.plan.cost.time import Case
from fivefold.plan.mixed.closed import MixedClosed
from fivefold.plan.mixed.groups import groups_of, orders
from fivefold.plan.search.closed import SLACK, Array, Choices, Shape
from fivefold.plan.search.space import Space, Wish, legal, shapes_of
from fivefold.support.numbers import divisors


@dataclass(frozen=True)
class MixedSpace:
    """All combinations of choices and orders of the groups; `memory` is the fullest rank's share of its device."""

    space: Space
    orders: list[Cluster]
    order: Array  # which of them an element has

    def __len__(self) -> int:
        return len(self.space)

    @property
    def fits(self) -> Array:
        return self.space.memory <= HEADROOM * SLACK

    def case(self, case: Case, at: int) -> Case:
        """One combination, its layers not yet divided."""
        cluster, layout = self.orders[self.order[at]], self.space.layout(at)
        return replace(case, cluster=cluster, layout=layout, groups=groups_of(cluster, layout))


def mixed_space(wish: Wish) -> MixedSpace:
    """Every combination in which each replica spans all groups."""
    shapes = list(shapes_of(wish))
    every = list(orders(wish.case.cluster))
    of = legal(wish, _combinations(wish, shapes))
    count = len(of.tp)
    seconds, memory = (np.full((len(every), count), np.inf) for _ in range(2))
    closed = MixedClosed(wish, shapes, of)
    for number, cluster in enumerate(every):
        for pp in np.unique(of.pp).tolist():
            rows = np.flatnonzero(of.pp == pp)
            seconds[number, rows], memory[number, rows] = closed.of_rows(rows, _ranks(wish.case.cluster, cluster, pp))
    tiled = Choices(*(np.tile(column, len(every)) for column in of))
    space = Space(tiled, shapes, wish.pipelines, seconds.ravel(), memory.ravel())
    return MixedSpace(space, every, np.repeat(np.arange(len(every)), count))


def _ranks(given: Cluster, order: Cluster, pp: int) -> list[int]:
    """The group of each pipeline rank, by its number in the given cluster."""
    return [given.groups.index(one) for one in order.groups for _ in range(one.world * pp // order.world)]


def _combinations(wish: Wish, shapes: list[Shape]) -> Choices:
    """Shapes with every dp that leaves each replica whole nodes of every kind, ZeRO stage and pipeline."""
    rows = np.array(list(_rows(wish, shapes)), dtype=np.int64).reshape(-1, 7)
    tp, pp, cp, dp, shape, zero, pipeline = rows.T
    samples = np.array([one.samples for one in shapes] or [1], dtype=np.int64)[shape]
    return Choices(tp, pp, cp, dp, zero, samples, wish.case.batch // (dp * samples), shape, pipeline)


def _rows(wish: Wish, shapes: list[Shape]) -> Iterator[tuple[int, ...]]:
    cluster, batch, most = wish.case.cluster, wish.case.batch, wish.case.spec.layers + 2
    pipelines = range(len(wish.pipelines))
    for number, shape in enumerate(shapes):
        for dp in wish.free("dp", divisors(cluster.world)):
            row = dp * shape.tp * shape.cp
            pp = cluster.world // row
            if pp > most or pp != wish.fixed.get("pp", pp) or batch % (dp * shape.samples) or not _spans(cluster, row):
                continue
            if any(group.world // dp % group.gpus for group in cluster.groups):
                continue
            zeros = wish.free("zero", [0, 1, 2, 3] if dp * shape.cp > 1 else [0])
            for zero, pipeline in product(zeros, pipelines):
                yield shape.tp, pp, shape.cp, dp, number, zero, pipeline


def _spans(cluster: Cluster, row: int) -> bool:
    return not any(group.world % row for group in cluster.groups)
