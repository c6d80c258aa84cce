"""All layouts of a model on a cluster at once: arrays of choices, with closed forms (closed_forms.py).

Unlike nodes have a space of their own (planner/mixed_space.py), made of the same shapes and closed forms.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from msgspec import structs

from fivefold.cost.moe import block_share
from fivefold.cost.step import Workload
from fivefold.layout import rules
from fivefold.layout.layout import Layout
from fivefold.layout.rules import Given, Layouts, has_copies, most_stages, tp_fits
from fivefold.planner.closed_forms import (
    DISPATCHES,
    RECOMPUTES,
    Array,
    BlockShape,
    Choices,
    EpChoices,
    PipelineArrays,
)
from fivefold.planner.closed_forms_by_rank import ClosedForms
from fivefold.planner.closed_forms_moe import ExpertClosedForms
from fivefold.schedules.classic import ONE_F_ONE_B
from fivefold.schedules.registry import RECORDS, is_file, record_of
from fivefold.support.plugins import is_plugin
from fivefold.support.text import divisors

MAX_MICROBATCH_SIZES = 12  # of a microbatch that are tried, at most
MOST_TOKENS = 1 << 19  # of a microbatch on a rank: beyond it nothing becomes more efficient
FEWEST_TOKENS = 1024  # of a sequence on a cp rank: below it kernels starve


@dataclass(frozen=True)
class SearchQuery:
    """What is to be planned; `fixed` are the choices that are not free."""

    workload: Workload  # its layout is not looked at
    fixed: dict[str, Any]

    def free(self, name: str, values: list[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else values

    @cached_property
    def pipelines(self) -> list[PipelineArrays]:
        """The schedules that the software has and `fixed` allows, with their chunks; a fixed file is one by itself."""
        name, has = self.fixed.get("schedule"), self.workload.software.schedules
        if name is None:
            return [
                PipelineArrays(record, chunks) for record in RECORDS if record.name in has for chunks in record.planned
            ]
        records = [record_of(name)] if name in has or is_file(name) or is_plugin(name) else []
        chosen = [PipelineArrays(record, chunks) for record in records for chunks in record.planned or (record.chunks,)]
        return [pipeline for pipeline in chosen if pipeline.chunks == self.fixed.get("chunks", pipeline.chunks)]


@dataclass(frozen=True)
class Space:
    """All combinations, with what closed forms say of them."""

    of: Choices
    shapes: list[BlockShape]
    pipelines: list[PipelineArrays]
    memory: Array
    seconds_of: Callable[[Array], Array]  # some elements, by their indices
    dealt: EpChoices | None = None  # of experts

    @cached_property
    def seconds(self) -> Array:
        """Of all; most do not fit, and a search asks for those that may (`seconds_of`)."""
        return self.seconds_of(np.arange(len(self)))

    def __len__(self) -> int:
        return len(self.of.tp)

    def layout(self, at: int) -> Layout:
        """One combination as a layout."""
        names = ("dp", "tp", "pp", "cp", "zero", "microbatches")
        numbers: dict[str, Any] = {name: int(getattr(self.of, name)[at]) for name in names}
        _, _, cp_kind, sp, _, recompute = self.shapes[self.of.shape[at]]
        record, chunks = _without_schedule(self.pipelines[self.of.pipeline[at]], alone=numbers["pp"] == 1)
        if self.dealt is not None:
            numbers |= {"ep": int(self.dealt.ep[at]), "dispatch": DISPATCHES[self.dealt.dispatch[at]]}
        return Layout(**numbers, cp_kind=cp_kind, sp=sp, recompute=recompute, schedule=record.name, chunks=chunks)


def _without_schedule(pipeline: PipelineArrays, alone: bool) -> PipelineArrays:
    """The pipeline as layouts write it: without pp (`alone`) all schedules are the same, except if made for stages."""
    record = pipeline.schedule
    if not alone:
        return pipeline
    return PipelineArrays(record, record.chunks) if not record.repeats else PipelineArrays(ONE_F_ONE_B, 1)


def space(query: SearchQuery) -> Space:
    """Every legal combination (layout/rules.py) that is worth a try."""
    shapes = list(shapes_of(query))
    combinations, dealt = _combinations(query, shapes), None
    forms: ClosedForms
    if query.workload.spec.experts is not None:
        of, dealt = dealt_out(query, shapes, combinations)
        forms = ExpertClosedForms(query.workload, of, shapes, query.pipelines, dealt)
    else:
        of = legal(query, shapes, combinations)
        forms = ClosedForms(query.workload, of, shapes, query.pipelines)
    return Space(of, shapes, query.pipelines, forms.memory(), forms.seconds, dealt)


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


def shapes_of(query: SearchQuery) -> Iterator[BlockShape]:
    """Of a block, all that heads, sequence and cluster allow; and, of what they allow, what is worth a try."""
    workload = query.workload
    spec, world, seq = workload.spec, workload.cluster.world, workload.seq
    reach = 2 * max(group.gpus for group in workload.cluster.groups)  # far enough to see that tp across nodes loses
    tps = [tp for tp in divisors(world) if tp_fits(spec, tp) and tp <= reach]
    cps = [cp for cp in divisors(world) if cp == 1 or seq // cp >= FEWEST_TOKENS]
    for tp, cp in product(query.free("tp", tps), query.free("cp", cps)):
        if world % (tp * cp):
            continue
        kinds = query.free("cp_kind", ["ring", "allgather", "ulysses"]) if cp > 1 else ["ring"]
        sizes = _sizes(workload.batch, max(1, MOST_TOKENS * cp // seq))
        choices = product(
            kinds,
            query.free("sp", [False, True] if tp > 1 else [False]),
            query.free("samples", sizes),
            query.free("recompute", [*RECOMPUTES]),
        )
        for kind, sp, samples, recompute in choices:
            if rules.legal(Layout(tp=tp, cp=cp, cp_kind=kind, sp=sp), Given(spec, seq=seq)):
                yield BlockShape(tp, cp, kind, sp, samples, recompute)


def _sizes(batch: int, most: int) -> list[int]:
    """Divisors of the batch: the small ones all, the larger ones thinned out."""
    sizes = [n for n in divisors(batch) if n <= most] or [1]
    while len(sizes) > MAX_MICROBATCH_SIZES:
        del sizes[MAX_MICROBATCH_SIZES // 2 :: 2]
    return sizes


def _combinations(query: SearchQuery, shapes: list[BlockShape]) -> Choices:
    """Shapes with every pp, ZeRO stage and pipeline; dp is what is left."""
    world, batch = query.workload.cluster.world, query.workload.batch
    members: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        members.setdefault((shape.tp, shape.cp), []).append(index)
    tables: list[Array] = []
    pipelines = range(len(query.pipelines))  # one is enough for a single stage
    for (tp, cp), indices in members.items():
        for pp in query.free("pp", divisors(world // (tp * cp))):
            dp, left = divmod(world, tp * cp * pp)
            if left or pp > most_stages(query.workload.spec) or batch % dp or dp != query.fixed.get("dp", dp):
                continue
            fitting = [index for index in indices if batch // dp % shapes[index].samples == 0]
            rest = list(product(fitting, query.free("zero", [0, 1, 2, 3]), pipelines[:1] if pp == 1 else pipelines))
            rows = np.array(rest, dtype=np.int64).reshape(-1, 3)
            axes = np.broadcast_to([tp, pp, cp, dp], (len(rows), 4))
            tables.append(np.column_stack([axes, rows]))
    table = np.concatenate(tables) if tables else np.zeros((0, 7), dtype=np.int64)
    tp_, pp_, cp_, dp_, shape_, zero_, pipeline_ = table.T
    samples = np.array([shape.samples for shape in shapes] or [1], dtype=np.int64)[shape_]
    return Choices(tp_, pp_, cp_, dp_, zero_, samples, batch // (dp_ * samples), shape_, pipeline_)


def legal(query: SearchQuery, shapes: list[BlockShape], of: Choices) -> Choices:
    """The combinations of a model without experts that are legal and worth a try."""
    rows = _candidates(query, _by_schedule(query, shapes, of))
    return Choices(*(column[rows] for column in of))


def _by_schedule(query: SearchQuery, shapes: list[BlockShape], of: Choices) -> list[tuple[Array, Layouts]]:
    """The combinations that are legal apart from their experts, grouped by schedule, and where each is."""
    names = ("dp", "tp", "pp", "cp", "zero", "microbatches")
    columns = {name: getattr(of, name) for name in names}
    columns |= {name: np.array([getattr(shape, name) for shape in shapes])[of.shape] for name in ("cp_kind", "sp")}
    fixed = of.microbatches == query.fixed.get("microbatches", of.microbatches)
    groups = []
    for (index, pipeline), alone in product(enumerate(query.pipelines), (False, True)):
        record, chunks = _without_schedule(pipeline, alone)
        rows = np.flatnonzero((of.pipeline == index) & ((of.pp == 1) == alone) & fixed)
        layouts = Layouts(record=record, chunks=chunks, **{name: column[rows] for name, column in columns.items()})
        fine = rules.legal(layouts, _rule_inputs(query.workload), rules.OF_THE_REST)
        its = {name: getattr(layouts, name)[fine] for name in columns}
        groups.append((rows[fine], structs.replace(layouts, **its)))
    return groups


def _candidates(query: SearchQuery, groups: list[tuple[Array, Layouts]], **experts: Any) -> Array:
    """The rows that are legal with such experts, and worth a try: ZeRO shards only what has copies."""
    spec, candidates = query.workload.spec, [np.zeros(0, dtype=np.int64)]
    for rows, layouts in groups:
        layouts = structs.replace(layouts, **experts)
        fine = rules.legal(layouts, _rule_inputs(query.workload), rules.OF_EXPERTS)
        if "zero" not in query.fixed:
            fine = fine & ((layouts.zero == 0) | has_copies(layouts, spec))
        candidates.append(rows[np.broadcast_to(fine, rows.shape)])
    return np.sort(np.concatenate(candidates))


def _rule_inputs(workload: Workload) -> Given:
    return Given(workload.spec, workload.cluster.world, workload.seq, workload.batch)


def dealt_out(query: SearchQuery, shapes: list[BlockShape], of: Choices) -> tuple[Choices, EpChoices]:
    """Every legal combination with every ep; gathering all tokens is tried where ep is at most top_k."""
    workload, spec = query.workload, query.workload.spec
    assert spec.experts is not None
    groups = _by_schedule(query, shapes, of)
    indices, eps, kinds = [], [], []
    # Bytes of a parameter that no number of ranks divides, by ZeRO stage.
    least = np.array([workload.software.accounting.state(1.0, 0.0, stage, 2).total for stage in range(4)])
    held = sum(count * block_share(spec, 1, 1, layer).experts for layer, count in spec.counted().items())
    for ep, (kind, name) in product(query.free("ep", divisors(spec.experts.count)), enumerate(DISPATCHES)):
        if query.fixed.get("dispatch", name) != name or (name == "allgather" and ep > spec.experts.top_k):
            continue
        rows = _candidates(query, groups, ep=ep, dispatch=name)
        # Where what a rank holds of experts alone is more than its memory, no closer look is needed.
        rows = rows[held * least[of.zero[rows]] / (ep * of.pp[rows]) < workload.first_device.accelerator.memory]
        indices.append(rows)
        eps.append(np.full(len(rows), ep))
        kinds.append(np.full(len(rows), kind))
    at, ep_, dispatch_ = (np.concatenate([np.zeros(0, dtype=np.int64), *parts]) for parts in (indices, eps, kinds))
    return Choices(*(column[at] for column in of)), EpChoices(ep_, dispatch_)
