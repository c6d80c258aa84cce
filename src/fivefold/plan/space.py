"""All layouts of a model on a cluster at once: arrays of choices, with closed forms of time and memory.

Every combination of tp, pp, cp, ZeRO stage, sp, microbatch, schedule and recompute is one element. What a block costs
depends on a few of those choices only, and is worked out once for each; numpy does the rest for all combinations
together. The closed forms rank and prune. What survives is timed by its schedule (search.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fivefold.layout import SCHEDULES, ContextKind, Layout, Recompute, tp_fits
from fivefold.plan.activations import kept
from fivefold.plan.footprint import CONTEXT, FRAGMENTATION, logits_held
from fivefold.plan.memory import Accounting
from fivefold.plan.time import Case

Array = np.ndarray[Any, np.dtype[Any]]

# Schedules that are tried: name, chunks, live microbatches per rank (of p and m), and how much of the fill remains.
# Fill and peaks are those of `fivefold schedules`; the survivors' come from their own schedule.
PIPELINES: tuple[tuple[str, int, float], ...] = (
    ("1f1b", 1, 1.0),
    ("interleaved", 2, 1.0),
    ("interleaved", 4, 1.0),
    ("interleaved", 8, 1.0),
    ("zb-h1", 1, 0.4),
    ("zb-v", 2, 0.3),
    ("v-half", 2, 0.8),
    ("dualpipe-v", 2, 0.7),
)
Shape = tuple[int, int, ContextKind, bool, int, Recompute]  # tp, cp, its kind, sp, samples of a microbatch, recompute
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def live(schedule: str, p: Array, m: Array, chunks: int) -> Array:
    """Microbatches whose activations a rank holds at most, in units of a whole rank's."""
    peak = {
        "interleaved": p + (p - 1) / chunks,
        "v-half": p / 2 + 1.0,
        "dualpipe-v": p + 1.0,
    }.get(schedule, p)
    return np.minimum(m, peak)


@dataclass(frozen=True)
class Wish:
    """What is to be planned; `fixed` are the choices that are not free."""

    case: Case  # its layout is not looked at
    fixed: dict[str, Any]

    def free(self, name: str, values: list[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else values


class Choices(NamedTuple):
    """Arrays of one length, an element a combination."""

    tp: Array
    pp: Array
    cp: Array
    dp: Array
    zero: Array
    samples: Array
    microbatches: Array
    shape: Array  # index into `shapes`
    pipeline: Array  # index into PIPELINES


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
        of = self.of
        tp, cp, kind, sp, _, recompute = self.shapes[of.shape[at]]
        schedule, chunks, _ = PIPELINES[of.pipeline[at]]
        alone = of.pp[at] == 1
        return Layout(
            dp=int(of.dp[at]),
            tp=tp,
            pp=int(of.pp[at]),
            cp=cp,
            cp_kind=kind,
            zero=int(of.zero[at]),
            sp=sp,
            schedule="1f1b" if alone else schedule,
            chunks=0 if alone or chunks == SCHEDULES[schedule] else chunks,
            microbatches=int(of.microbatches[at]),
            recompute=recompute,
        )


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def space(wish: Wish) -> Space:
    """Every combination that the model, the batch and the sequence allow."""
    case = wish.case
    spec, world, batch = case.spec, case.cluster.world, case.batch
    shapes, costs = _shapes(wish)
    by_axes: dict[tuple[int, int], list[int]] = {}
    for index, (tp, cp, *_rest) in enumerate(shapes):
        by_axes.setdefault((tp, cp), []).append(index)
    columns: list[Array] = []
    for (tp, cp), members in by_axes.items():
        for pp in wish.free("pp", divisors(world // (tp * cp))):
            if pp > spec.layers + 2 or world % (tp * cp * pp):
                continue
            dp = world // (tp * cp * pp)
            if batch % dp or dp != wish.fixed.get("dp", dp):
                continue
            fitting = [index for index in members if batch // dp % shapes[index][4] == 0]
            zeros = wish.free("zero", [0, 1, 2, 3] if dp * cp > 1 else [0])
            pipelines = list(_pipelines(wish, pp))
            rows = np.array(list(product(fitting, zeros, pipelines)), dtype=np.int64).reshape(-1, 3)
            if len(rows):
                ones = np.ones(len(rows), dtype=np.int64)
                columns.append(np.column_stack([tp * ones, pp * ones, cp * ones, dp * ones, rows]))
    table = np.concatenate(columns) if columns else np.zeros((0, 7), dtype=np.int64)
    tp, pp, cp, dp, shape, zero, pipeline = table.T
    samples = np.array([one[4] for one in shapes] or [1], dtype=np.int64)[shape] if len(table) else shape
    m = batch // (dp * np.maximum(1, samples))
    chunks = np.array([one[1] for one in PIPELINES])[pipeline]
    alone = pp == 1
    needs = np.array([{"interleaved": 1, "dualpipe-v": 2}.get(one[0], 0) for one in PIPELINES])[pipeline]
    legal = (alone | (m >= needs * pp)) & (pp * np.where(alone, 1, chunks) <= spec.layers + 2)
    if "microbatches" in wish.fixed:
        legal &= m == wish.fixed["microbatches"]
    keep = np.flatnonzero(legal)
    columns = [column[keep] for column in (tp, pp, cp, dp, zero, samples, m, shape, pipeline)]
    chosen = Choices(*columns)
    seconds, memory = _closed_forms(case, costs, chosen)
    return Space(chosen, shapes, seconds, memory)


def _pipelines(wish: Wish, pp: int) -> Iterator[int]:
    for index, (name, chunks, _) in enumerate(PIPELINES):
        if (
            name not in wish.case.stack.schedules
            or name != wish.fixed.get("schedule", name)
            or chunks != wish.fixed.get("chunks", chunks)
        ):
            continue
        yield index
        if pp == 1:
            return


def _shapes(wish: Wish) -> tuple[list[Shape], dict[str, Array]]:
    """(tp, cp, kind of cp, sp, samples, recompute), and for each the seconds and bytes of a block and of the ends."""
    case = wish.case
    spec, world, batch, seq = case.spec, case.cluster.world, case.batch, case.seq
    gpus = max(group.gpus for group in case.cluster.groups)
    tps = [tp for tp in divisors(world) if tp_fits(spec, tp) and tp <= 2 * gpus]
    cps = [cp for cp in divisors(world) if seq % (2 * cp) == 0 and (cp == 1 or seq // cp >= 1024)]
    found: list[Shape] = []
    rows: list[list[float]] = []
    for tp, cp in product(wish.free("tp", tps), wish.free("cp", cps)):
        if world % (tp * cp):
            continue
        kinds = wish.free("cp_kind", ["ring", "allgather", "ulysses"]) if cp > 1 else ["ring"]
        sizes = wish.free("samples", [n for n in (1, 2, 4, 8, 16, 32) if n <= batch and n * seq // cp <= MOST_TOKENS])
        for kind, sp, samples, recompute in product(
            kinds, wish.free("sp", [False, True] if tp > 1 else [False]), sizes, wish.free("recompute", [*RECOMPUTES])
        ):
            if (sp and (tp == 1 or seq % (2 * cp * tp))) or (kind == "ulysses" and spec.heads % (tp * cp)):
                continue
            layout = Layout(tp=tp, cp=cp, cp_kind=kind, sp=sp, recompute=recompute)
            one = Case(
                spec, layout, case.cluster, seq, samples, case.precision, case.stack, case.device
            ).work  # one dp rank's microbatch: the batch is its own
            block, top, bottom = one.block, one.top, one.bottom
            rows.append(
                [
                    block.forward.total,
                    block.inputs.total + block.weights.total,
                    sum(part.total for part in (*top, *bottom)),
                    kept(spec, layout, case.stack, samples, seq).total,
                    kept(spec, Layout(tp=tp, cp=cp, sp=sp), case.stack, samples, seq).total * (recompute != "none"),
                    (logits_held(spec, layout, case.stack) + 4 * spec.hidden) * one.tokens,
                    2.0 * one.tokens * spec.hidden / (tp if sp else 1),
                ]
            )
            found.append((tp, cp, kind, sp, samples, recompute))
    names = ("forward", "backward", "ends", "kept", "again", "logits", "message")
    table = np.array(rows).reshape(-1, len(names))
    return found, {name: table[:, at] for at, name in enumerate(names)}


MOST_TOKENS = 1 << 18  # of a microbatch on a rank: beyond it nothing becomes more efficient


def _closed_forms(case: Case, costs: dict[str, Array], of: Choices) -> tuple[Array, Array]:
    """Seconds and bytes of every combination, nearly."""
    tp, pp, cp, dp, zero, _, m, shape, pipeline = of
    spec, stack = case.spec, case.stack
    cost = {name: values[shape] if len(values) else shape.astype(float) for name, values in costs.items()}
    alone = pp == 1
    chunks = np.where(alone, 1, np.array([one[1] for one in PIPELINES])[pipeline])
    remains = np.array([one[2] for one in PIPELINES])[pipeline]
    block = cost["forward"] + cost["backward"]
    # Ranks hold whole layers, and the head is worth some: the balanced split's longest.
    most = np.ceil((spec.layers + cost["ends"] / block) / (pp * chunks)) * chunks
    rank = np.maximum(
        (spec.layers * block + cost["ends"]) / pp, np.where(alone, 0, np.minimum(most, spec.layers)) * block
    )
    # ---- collectives over dp and cp, as latency + bytes / bandwidth of a placement
    gather, reduce, latency = _data_links(case, tp, pp, cp, dp)
    parameters = _rank_parameters(spec, pp) / tp
    per_block = sum(p.size for p in spec.block_parameters(0)) / tp
    weights, gradients = stack.weight_bytes, stack.gradient_bytes
    share = stack.hides("zero")
    fetch = latency + per_block * weights * gather
    bring = 2 * latency + per_block * (weights * gather + gradients * reduce)
    exposed = fetch - share * np.minimum(fetch, cost["forward"])
    exposed += bring - share * np.minimum(bring, cost["backward"])
    rank = rank + np.where(zero == 3, exposed * spec.layers / pp, 0.0)
    fill = remains * (pp - 1) * rank / chunks
    send = 2 * (pp - 1) * (case.wires.device.accelerator.across.latency + cost["message"] / _send_rate(case))
    pipe = m * rank + fill + send
    rounds = np.where(zero == 2, m, 1)
    bring = rounds * (latency + parameters * gradients * reduce * np.where(zero == 0, 2, 1))
    fetch = np.where((zero == 1) | (zero == 2), latency + parameters * weights * gather, 0.0)
    hide = stack.hides("dp")
    window = cost["backward"] * spec.layers / pp * np.where(chunks > 1, np.minimum(m, pp), 1) * rounds
    after = bring - hide * np.minimum(bring, window)
    after += fetch - hide * np.minimum(fetch, cost["forward"] * spec.layers / pp)
    after = np.where((zero == 3) | (dp * cp == 1), 0.0, after)
    mine = parameters / np.where(zero > 0, dp * cp, 1)
    moved = (2 * stack.state_bytes + gradients + stack.step_bytes) * mine
    moved += 2 * gradients * (parameters - mine) * (zero < 2)
    seconds = pipe + after + moved / case.on.bandwidth + stack.host_step
    # ---- memory
    held = Accounting(stack.weight_bytes, stack.gradient_bytes, stack.state_bytes)
    shards = dp * cp
    state = np.zeros(len(tp))
    for stage in range(4):
        at = zero == stage
        state[at] = held.state(parameters[at], (parameters / shards)[at], stage, 2).total
    flying = np.zeros(len(tp))
    for index, (name, count, _) in enumerate(PIPELINES):
        at = pipeline == index
        flying[at] = live(name, pp, m, count)[at]
    flying = np.where(alone, 1.0, flying)
    activations = cost["kept"] * flying * spec.layers / pp + np.maximum(0.0, cost["again"] - cost["kept"])
    table = spec.vocab * spec.hidden / tp
    buffers = np.where(zero == 3, 2 * per_block * weights + np.maximum(per_block, table) * (weights + gradients), 0.0)
    # The last stage has the logits and the fewest microbatches, the first the most: whichever is larger.
    last = cost["kept"] * np.minimum(flying, np.where(chunks > 1, flying, 1)) * spec.layers / pp + cost["logits"]
    allocated = state + np.maximum(activations, last) + buffers + stack.bucket_bytes
    return seconds, allocated * (1 + FRAGMENTATION) + CONTEXT


def _rank_parameters(spec: Any, pp: Array) -> Array:
    """Of the fullest pipeline rank, before tp."""
    block = sum(p.size for p in spec.block_parameters(0))
    table = spec.vocab * spec.hidden
    ends = table * (1 if spec.tied else 2)
    return np.where(pp == 1, spec.layers * block + ends, np.ceil(spec.layers / pp) * block + table)


def _send_rate(case: Case) -> float:
    device = case.on
    return device.accelerator.across.bandwidth * device.reached.across


def _data_links(case: Case, tp: Array, pp: Array, cp: Array, dp: Array) -> tuple[Array, Array, Array]:
    """Seconds per byte of a gather and of a reduction over dp x cp, and a collective's latency."""
    keys = np.column_stack([tp, pp, cp, dp])
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    found = []
    for t, p, c, d in unique:
        wires = Case(
            case.spec, Layout(tp=int(t), pp=int(p), cp=int(c), dp=int(d)), case.cluster, case.seq, case.batch,
            stack=case.stack, device=case.device,
        ).wires  # fmt: skip
        small, large = wires.time("all-gather", "zero", 1.0), wires.time("all-gather", "zero", 1e9)
        found.append(((large - small) / 1e9, small))
    rate, latency = np.array(found).reshape(-1, 2).T
    return rate[inverse.ravel()], rate[inverse.ravel()], latency[inverse.ravel()]
