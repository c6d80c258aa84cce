"""All layouts of a model on a cluster at once: arrays of choices, with closed forms of time and memory (closed.py).

Unlike nodes have a space of their own (planner/mixed_space.py), made of the same shapes and closed forms.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from fivefold.cost.step import Case
from fivefold.layout.layout import Layout, tp_fits
from fivefold.planner.closed import (
    DISPATCHES,
    RECOMPUTES,
    Array,
    BlockArrays,
    BlockShape,
    Choices,
    Closed,
    EpChoices,
    PipelineArrays,
    dealt_out,
)
from fivefold.planner.closed_experts import closed_of
from fivefold.schedules.registry import LARGEST, RECORDS, is_file, record_of
from fivefold.support.text import divisors

SIZES = 12  # of a microbatch that are tried, at most
MOST_TOKENS = 1 << 19  # of a microbatch on a rank: beyond it nothing becomes more efficient
FEWEST_TOKENS = 1024  # of a sequence on a cp rank: below it kernels starve


@dataclass(frozen=True)
class SearchQuery:
    """What is to be planned; `fixed` are the choices that are not free."""

    case: Case  # its layout is not looked at
    fixed: dict[str, Any]

    def free(self, name: str, values: list[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else values

    @cached_property
    def pipelines(self) -> list[PipelineArrays]:
        """The schedules that the software has and `fixed` allows, with their chunks; a fixed file is one by itself."""
        name, has = self.fixed.get("schedule"), self.case.stack.schedules
        if name is None:
            return [
                PipelineArrays(record, chunks) for record in RECORDS if record.name in has for chunks in record.planned
            ]
        records = [record_of(name)] if name in has or is_file(name) else []
        every = [PipelineArrays(record, chunks) for record in records for chunks in record.planned or (record.chunks,)]
        return [one for one in every if one.chunks == self.fixed.get("chunks", one.chunks)]


@dataclass(frozen=True)
class Space:
    """All combinations, with what closed forms say of them."""

    of: Choices
    shapes: list[BlockShape]
    pipelines: list[PipelineArrays]
    seconds: Array
    memory: Array
    dealt: EpChoices | None = None  # of experts

    def __len__(self) -> int:
        return len(self.of.tp)

    def layout(self, at: int) -> Layout:
        """One combination as a layout."""
        names = ("dp", "tp", "pp", "cp", "zero", "microbatches")
        numbers: dict[str, Any] = {name: int(getattr(self.of, name)[at]) for name in names}
        _, _, cp_kind, sp, _, recompute = self.shapes[self.of.shape[at]]
        record, chunks = self.pipelines[self.of.pipeline[at]]
        alone = numbers["pp"] == 1
        schedule = "1f1b" if alone and record.repeats else record.name
        chunks = 0 if alone or chunks == record.chunks else chunks
        if self.dealt is not None:
            numbers |= {"ep": int(self.dealt.ep[at]), "dispatch": DISPATCHES[self.dealt.dispatch[at]]}
        return Layout(**numbers, cp_kind=cp_kind, sp=sp, recompute=recompute, schedule=schedule, chunks=chunks)


def space(wish: SearchQuery) -> Space:
    """Every combination that the model, the batch and the sequence allow."""
    shapes = list(shapes_of(wish))
    of = legal(wish, _combinations(wish, shapes))
    if not len(of.tp):
        return Space(of, shapes, wish.pipelines, np.zeros(0), np.zeros(0))
    if wish.case.spec.experts is not None:
        return _with_experts(wish, of, shapes)
    blocks = np.array([BlockArrays.of(wish.case, shape) for shape in shapes])
    closed = Closed(wish.case, of, BlockArrays(*blocks[of.shape].T), wish.pipelines)
    return Space(of, shapes, wish.pipelines, closed.seconds(), closed.memory())


def _with_experts(wish: SearchQuery, of: Choices, shapes: list[BlockShape]) -> Space:
    of, dealt = dealt_out(wish.case, of, wish.fixed)
    if not len(of.tp):
        return Space(of, shapes, wish.pipelines, np.zeros(0), np.zeros(0))
    closed = closed_of(wish.case, of, dealt, shapes, wish.pipelines)
    return Space(of, shapes, wish.pipelines, closed.seconds(), closed.memory(), dealt)


def few_of_a_kind(
    order: Iterable[int],
    kind: Callable[[int], Hashable],
    alike: int,
    most: int,
    wanted: Callable[[int], bool] = lambda _: True,
) -> list[int]:
    """The first of an order that are wanted, `most` of them, with at most `alike` of each kind."""
    seen: Counter[Hashable] = Counter()
    chosen: list[int] = []
    for at in order:
        own = kind(at)
        if seen[own] < alike and wanted(at):
            seen[own] += 1
            chosen.append(at)
        if len(chosen) == most:
            break
    return chosen


def shapes_of(wish: SearchQuery) -> Iterator[BlockShape]:
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
            if not Layout(tp=tp, cp=cp, cp_kind=kind, sp=sp).problems(spec, seq=seq):
                yield BlockShape(tp, cp, kind, sp, samples, recompute)


def _sizes(batch: int, most: int) -> list[int]:
    """Divisors of the batch: the small ones all, the larger ones thinned out."""
    found = [n for n in divisors(batch) if n <= most] or [1]
    while len(found) > SIZES:
        del found[SIZES // 2 :: 2]
    return found


def _combinations(wish: SearchQuery, shapes: list[BlockShape]) -> Choices:
    """Shapes with every pp, ZeRO stage and pipeline; dp is what is left."""
    world, batch = wish.case.cluster.world, wish.case.batch
    members: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        members.setdefault((shape.tp, shape.cp), []).append(index)
    tables: list[Array] = []
    pipelines = range(len(wish.pipelines))  # one is enough for a single stage
    for (tp, cp), mine in members.items():
        for pp in wish.free("pp", divisors(world // (tp * cp))):
            dp, left = divmod(world, tp * cp * pp)
            if left or pp > wish.case.spec.layers + 2 or batch % dp or dp != wish.fixed.get("dp", dp):
                continue
            fitting = [index for index in mine if batch // dp % shapes[index].samples == 0]
            # Of experts there may be copies where there are none of the rest; `dealt_out` knows for which ep.
            shared = dp * cp * (tp if wish.case.spec.experts is not None else 1) > 1
            zeros = wish.free("zero", [0, 1, 2, 3] if shared else [0])
            rest = list(product(fitting, zeros, pipelines[:1] if pp == 1 else pipelines))
            rows = np.array(rest, dtype=np.int64).reshape(-1, 3)
            axes = np.broadcast_to([tp, pp, cp, dp], (len(rows), 4))
            tables.append(np.column_stack([axes, rows]))
    table = np.concatenate(tables) if tables else np.zeros((0, 7), dtype=np.int64)
    tp_, pp_, cp_, dp_, shape_, zero_, pipeline_ = table.T
    samples = np.array([shape.samples for shape in shapes] or [1], dtype=np.int64)[shape_]
    return Choices(tp_, pp_, cp_, dp_, zero_, samples, batch // (dp_ * samples), shape_, pipeline_)


def legal(wish: SearchQuery, of: Choices) -> Choices:
    """Enough microbatches for the schedule, layers for the stages, and whole weights where a rank has two ends."""
    chunks = np.where(of.pp == 1, 1, np.array([one.chunks for one in wish.pipelines])[of.pipeline])
    least = np.array([one.schedule.least for one in wish.pipelines])[of.pipeline]
    fine = (of.pp == 1) | (of.microbatches >= least * of.pp)
    fine &= of.pp * chunks * of.microbatches <= LARGEST
    for schedule, _ in wish.pipelines:
        if held := schedule.schedule:  # of a file, for its own numbers alone
            fine &= (of.pp == held.p) & (of.microbatches == held.m)
    fine &= of.pp * chunks <= wish.case.spec.layers + 2
    if wish.case.spec.tied:  # `Layout.problems` says why
        bent = np.array([one.both_ends for one in wish.pipelines])[of.pipeline] & (of.pp > 1)
        three = (of.zero == 3) & (of.dp * of.cp * (of.tp if wish.case.spec.experts is not None else 1) > 1)
        fine &= ~(bent & (three | (of.zero == 2) & (of.dp * of.cp > 1)))
    if "microbatches" in wish.fixed:
        fine &= of.microbatches == wish.fixed["microbatches"]
    return Choices(*(column[fine] for column in of))
