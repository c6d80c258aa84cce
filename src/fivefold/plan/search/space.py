"""All layouts of a model on a cluster at once: arrays of choices, with closed forms of time and memory (closed.py)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from fivefold.layout.layout import LEAST, SCHEDULES, Layout, Recompute, tp_fits
from fivefold.plan.cost.time import Case
from fivefold.plan.search.closed import Array, Block, Choices, Closed, Pipeline, Shape

PIPELINES = (
    Pipeline("1f1b", 1),
    Pipeline("interleaved", 2),
    Pipeline("interleaved", 4),
    Pipeline("interleaved", 8),
    Pipeline("zb-h1", 1),
    Pipeline("zb-v", 2),
    Pipeline("v-half", 2),
    Pipeline("dualpipe-v", 2),
)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SIZES = 12  # of a microbatch that are tried, at most
MOST_TOKENS = 1 << 19  # of a microbatch on a rank: beyond it nothing becomes more efficient
FEWEST_TOKENS = 1024  # of a sequence on a cp rank: below it kernels starve


@dataclass(frozen=True)
class Wish:
    """What is to be planned; `fixed` are the choices that are not free."""

    case: Case  # its layout is not looked at
    fixed: dict[str, Any]

    def free(self, name: str, values: list[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else values


@dataclass(frozen=True)
class Space:
    """All combinations, with what closed forms say of them."""

    of: Choices
    shapes: list[Shape]
    seconds: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.of.tp)

    def layout(self, at: int) -> Layout:
        """One combination as a layout."""
        of, shape, pipeline = self.of, self.shapes[self.of.shape[at]], PIPELINES[self.of.pipeline[at]]
        alone = of.pp[at] == 1
        return Layout(
            dp=int(of.dp[at]),
            tp=shape.tp,
            pp=int(of.pp[at]),
            cp=shape.cp,
            cp_kind=shape.cp_kind,
            zero=int(of.zero[at]),
            sp=shape.sp,
            schedule="1f1b" if alone else pipeline.schedule,
            chunks=0 if alone or pipeline.chunks == SCHEDULES[pipeline.schedule] else pipeline.chunks,
            microbatches=int(of.microbatches[at]),
            recompute=shape.recompute,
        )


def space(wish: Wish) -> Space:
    """Every combination that the model, the batch and the sequence allow."""
    shapes = list(_shapes(wish))
    of = _legal(wish, _combinations(wish, shapes))
    if not len(of.tp):
        return Space(of, shapes, np.zeros(0), np.zeros(0))
    blocks = [Block.of(wish.case, shape) for shape in shapes]
    closed = Closed.make(wish.case, of, blocks, PIPELINES)
    return Space(of, shapes, closed.seconds(), closed.memory())


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _shapes(wish: Wish) -> Iterator[Shape]:
    """Of a block, all that heads, sequence and cluster allow."""
    case = wish.case
    spec, world, seq = case.spec, case.cluster.world, case.seq
    reach = 2 * max(group.gpus for group in case.cluster.groups)  # far enough to see that tp across nodes loses
    tps = [tp for tp in divisors(world) if tp_fits(spec, tp) and tp <= reach]
    cps = [cp for cp in divisors(world) if cp == 1 or seq // cp >= FEWEST_TOKENS]
    for tp, cp in product(wish.free("tp", tps), wish.free("cp", cps)):
        if world % (tp * cp):
            continue
        kinds = wish.free("cp_kind", ["ring", "allgather", "ulysses"]) if cp > 1 else ["ring"]
        sizes = _sizes(case.batch, max(1, MOST_TOKENS * cp // seq))
        choices = product(
            kinds,
            wish.free("sp", [False, True] if tp > 1 else [False]),
            wish.free("samples", sizes),
            wish.free("recompute", [*RECOMPUTES]),
        )
        for kind, sp, samples, recompute in choices:
            shape = Shape(tp, cp, kind, sp, samples, recompute)
            if not Layout(tp=tp, cp=cp, cp_kind=kind, sp=sp).problems(spec, seq=seq):
                yield shape


def _sizes(batch: int, most: int) -> list[int]:
    """Divisors of the batch: the small ones all, the larger ones thinned out."""
    found = [n for n in divisors(batch) if n <= most] or [1]
    while len(found) > SIZES:
        del found[SIZES // 2 :: 2]
    return found


def _combinations(wish: Wish, shapes: list[Shape]) -> Choices:
    """Shapes with every pp, ZeRO stage and pipeline; dp is what is left."""
    case = wish.case
    world, batch = case.cluster.world, case.batch
    members: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        members.setdefault((shape.tp, shape.cp), []).append(index)
    tables: list[Array] = []
    for (tp, cp), mine in members.items():
        for pp in wish.free("pp", divisors(world // (tp * cp))):
            if pp > case.spec.layers + 2 or world % (tp * cp * pp):
                continue
            dp = world // (tp * cp * pp)
            if batch % dp or dp != wish.fixed.get("dp", dp):
                continue
            fitting = [index for index in mine if batch // dp % shapes[index].samples == 0]
            zeros = wish.free("zero", [0, 1, 2, 3] if dp * cp > 1 else [0])
            rows = np.array(list(product(fitting, zeros, _pipelines(wish, pp))), dtype=np.int64).reshape(-1, 3)
            axes = np.broadcast_to([tp, pp, cp, dp], (len(rows), 4))
            tables.append(np.column_stack([axes, rows]))
    table = np.concatenate(tables) if tables else np.zeros((0, 7), dtype=np.int64)
    tp_, pp_, cp_, dp_, shape_, zero_, pipeline_ = table.T
    samples = np.array([shape.samples for shape in shapes] or [1], dtype=np.int64)[shape_]
    return Choices(tp_, pp_, cp_, dp_, zero_, samples, batch // (dp_ * samples), shape_, pipeline_)


def _pipelines(wish: Wish, pp: int) -> list[int]:
    """Those that the software has and the wish allows; one is enough for a single stage."""
    fixed = wish.fixed
    found = [
        index
        for index, (name, chunks) in enumerate(PIPELINES)
        if name in wish.case.stack.schedules
        and name == fixed.get("schedule", name)
        and chunks == (fixed.get("chunks", chunks) if "schedule" in fixed else chunks)
    ]
    return found[:1] if pp == 1 else found


def _legal(wish: Wish, of: Choices) -> Choices:
    """Enough microbatches for the schedule, and enough layers for the stages."""
    chunks = np.where(of.pp == 1, 1, np.array([one.chunks for one in PIPELINES])[of.pipeline])
    least = np.array([LEAST.get(one.schedule, 0) for one in PIPELINES])[of.pipeline]
    legal = (of.pp == 1) | (of.microbatches >= least * of.pp)
    legal &= of.pp * chunks <= wish.case.spec.layers + 2
    if "microbatches" in wish.fixed:
        legal &= of.microbatches == wish.fixed["microbatches"]
    return Choices(*(column[legal] for column in of))
