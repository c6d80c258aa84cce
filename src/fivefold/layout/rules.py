"""What makes a layout legal for a model, a number of ranks, a sequence and a batch: every rule once, in one table.

    problems(layout, Given(spec, world=8, seq=4096))    # a sentence for each rule that is broken, with what would do
    legal(layouts, Given(spec, seq=4096, batch=64))     # whether all of them hold: of one layout, or of arrays of many

`holds` is arithmetic that works on one layout's numbers and on arrays of them (`Layouts`), so that `Layout.problems`
and the planner's search cannot disagree. Whether a legal layout is worth trying is the planner's own business
(planner/space.py).
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any, ClassVar, NamedTuple

from fivefold.layout.axes import Axes
from fivefold.schedules.actions import COLLECTIVES
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import MAX_SIZE, RECORDS, size_problem
from fivefold.schedules.schedule import Schedule
from fivefold.spec.kinds import MLP, BlockKind
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem
from fivefold.support.plugins import is_plugin
from fivefold.support.text import divisors, either


class Given(NamedTuple):
    """What a layout is held against; what is None is not checked."""

    spec: ModelSpec
    world: int | None = None  # ranks that there are
    seq: int | None = None
    batch: int | None = None  # global, in sequences
    ranks_by: str = "--nproc"  # how the reader gives a number of ranks


class Layouts(Axes, frozen=True, kw_only=True):
    """Many layouts of one schedule: the fields of `Layout`, each an array, or the value that all of them have."""

    record: ScheduleInfo
    dp: Any = 1
    tp: Any = 1
    pp: Any = 1
    cp: Any = 1
    cp_kind: Any = "ring"
    zero: Any = 0
    replicate: Any = 1
    sp: Any = False
    ep: Any = 1
    dispatch: Any = "alltoall"
    chunks: Any = 1
    microbatches: Any = 1

    schedule_problems: ClassVar[list[str]] = []  # it has a record
    split: ClassVar[tuple[int, ...]] = ()

    @property
    def schedule(self) -> str:
        return self.record.name

    @property
    def stages(self) -> Any:
        return self.pp * self.chunks


# ---- arithmetic of one number or of many ----------------------------------------------------------------------------
# With & and | for `and` and `or`, which arrays do not have.


def implies(condition: Any, then: Any) -> Any:
    return (condition == 0) | then


def heads_fit(spec: ModelSpec, tp: Any) -> Any:
    return reduce(operator.and_, (heads % tp == 0 for heads, _ in spec.attention_heads), True)


def _heads(spec: ModelSpec) -> list[int]:
    return [heads for heads, _ in spec.attention_heads] or [spec.heads]


def kv_heads_fit(spec: ModelSpec, tp: Any) -> Any:
    """Dealt out evenly, or each to several ranks."""
    return reduce(operator.and_, ((kv % tp == 0) | (tp % kv == 0) for _, kv in spec.attention_heads), True)


def ffn_fits(spec: ModelSpec, tp: Any) -> Any:
    return reduce(operator.and_, (width % tp == 0 for width in spec.tensor_widths), True)


def tp_fits(spec: ModelSpec, tp: Any) -> Any:
    """Whether tp divides all that it must of a model."""
    return heads_fit(spec, tp) & kv_heads_fit(spec, tp) & ffn_fits(spec, tp)


def whole_sequences(spec: ModelSpec) -> list[BlockKind]:
    """The kinds whose tokens of a sequence cp cannot divide."""
    return [kind for kind in spec.branches if not kind.cp]


def is_ulysses(of: Any) -> Any:
    """Whether cp ranks divide the heads for attention."""
    return (of.cp > 1) & (of.cp_kind == "ulysses")


def is_zigzag(of: Any) -> Any:
    """Whether each cp rank holds one early and one late piece of a sequence."""
    return (of.cp > 1) & (of.cp_kind != "ulysses")


def sequence_pieces(of: Any) -> Any:
    """The equal pieces that a sequence is cut into: over cp, and under sp a cp rank's share over tp."""
    return of.cp * (1 + is_zigzag(of)) * (1 + of.sp * (of.tp - 1))


def most_stages(spec: ModelSpec) -> int:
    """The embedding and the head may each be a stage without layers, as in Llama 3's 405B run."""
    return spec.layers + 2


def both_ends(of: Any) -> Any:
    """Whether one rank has the first stage and the last, as two of its stages."""
    return (of.chunks > 1) & ((of.pp == 1) | of.record.bent)


def has_copies(of: Any, spec: ModelSpec) -> Any:
    """Whether ranks hold the same parameters, dense or of experts, which ZeRO can shard."""
    dense = of.size("dp_cp") > 1
    return dense if spec.experts is None else dense | (of.size("expert_dp") > 1)


def cuts_stages(of: Any, spec: ModelSpec) -> Any:
    """Whether ZeRO gathers weights, or reduces gradients, stage by stage."""
    return ((of.zero == 3) & has_copies(of, spec)) | ((of.zero == 2) & (of.size("dp_cp") > 1))


def expert_ranks(of: Any) -> Any:
    """The number of ranks that experts can be sharded over."""
    return of.size("stage") // of.replicate


def expert_count(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.count


# ---- the table ------------------------------------------------------------------------------------------------------


def _in_file(holds: Callable[[Layouts, Schedule], Any]) -> Callable[[Layouts, Given], Any]:
    """The rules of a schedule in a file, which fits one p and m only, and may contain what the trainer does not run."""
    return lambda of, given: of.record.schedule is None or holds(of, of.record.schedule)


# By code (docs/problems.md), in the order in which problems are said.
RULES: dict[str, Callable[[Layouts, Given], Any]] = {
    "layout.tp.heads": lambda of, given: heads_fit(given.spec, of.tp),
    "layout.tp.kv_heads": lambda of, given: kv_heads_fit(given.spec, of.tp),
    "layout.tp.ffn": lambda of, given: ffn_fits(given.spec, of.tp),
    "layout.sp.tp": lambda of, given: implies(of.sp, of.tp > 1),
    "layout.cp.heads": lambda of, given: implies(is_ulysses(of), heads_fit(given.spec, of.cp * of.tp)),
    "layout.cp.kind": lambda of, given: not whole_sequences(given.spec) or of.cp == 1,
    "layout.seq.pieces": lambda of, given: given.seq is None or given.seq % sequence_pieces(of) == 0,
    "layout.schedule.unknown": lambda of, given: not of.schedule_problems,
    "layout.schedule.degree": _in_file(lambda of, file: (of.pp == file.p) & (of.microbatches == file.m)),
    "layout.schedule.stages": _in_file(lambda of, file: len(set(map(len, file.placement.of_rank))) == 1),
    "layout.schedule.first": _in_file(lambda of, file: file.placement.owner[0] == 0),
    "layout.schedule.collectives": _in_file(lambda of, file: not file.count(*COLLECTIVES)),
    "layout.chunks.schedule": lambda of, given: of.record.any_chunks | (of.chunks == of.record.chunks),
    "layout.schedule.size": lambda of, given: of.stages * of.microbatches <= MAX_SIZE,
    "layout.microbatches.schedule": lambda of, given: of.microbatches >= of.record.least * of.pp,
    "layout.split.negative": lambda of, given: min(of.split, default=0) >= 0,
    "layout.split.stages": lambda of, given: not of.split or len(of.split) == of.stages,
    "layout.split.layers": lambda of, given: not of.split or sum(of.split) == given.spec.layers,
    "layout.pp.layers": lambda of, given: bool(of.split) | (of.stages <= most_stages(given.spec)),
    "layout.zero.tied": lambda of, given: (
        not given.spec.tied or implies(both_ends(of), cuts_stages(of, given.spec) == 0)
    ),
    "layout.zero.stage": lambda of, given: (of.zero >= 0) & (of.zero <= 3),
    "layout.replicate.zero": lambda of, given: (of.replicate == 1) | (of.zero == 3),
    "layout.replicate.dp": lambda of, given: of.dp % of.replicate == 0,
    "layout.batch.share": lambda of, given: given.batch is None or given.batch % (of.dp * of.microbatches) == 0,
    "layout.ep.dense": lambda of, given: given.spec.experts is not None or of.ep == 1,
    "layout.dispatch.dense": lambda of, given: given.spec.experts is not None or of.dispatch == "alltoall",
    "layout.dispatch.ep": lambda of, given: (of.ep > 1) | (of.dispatch == "alltoall"),
    "layout.ep.ranks": lambda of, given: expert_ranks(of) % of.ep == 0,
    "layout.ep.experts": lambda of, given: expert_count(given.spec) % of.ep == 0,
    "layout.ranks.given": lambda of, given: given.world is None or given.world == of.world,
}

# Rules that are not asked where a problem was said before whose code begins so: theirs would only follow from it, or
# there is no schedule to ask.
CHECKED_AFTER: dict[str, str | tuple[str, ...]] = {
    "layout.tp.kv_heads": "layout.tp.heads",
    **dict.fromkeys((f"layout.schedule.{what}" for what in ("degree", "stages", "first", "collectives")),
                    "layout.schedule.unknown"),
    **dict.fromkeys(("layout.chunks.schedule", "layout.schedule.size", "layout.microbatches.schedule",
                     "layout.split.negative", "layout.split.stages", "layout.split.layers", "layout.pp.layers",
                     "layout.zero.tied"), "layout.schedule."),
    "layout.dispatch.dense": "layout.ep.dense",
    "layout.dispatch.ep": "layout.dispatch.dense",
    "layout.ep.ranks": ("layout.ep.dense", "layout.replicate.dp"),
    "layout.ep.experts": "layout.replicate.dp",
}  # fmt: skip

# Those that read ep or dispatch: who tries many of these asks the others once for all of them.
OF_EXPERTS = [code for code in RULES if code.startswith(("layout.ep.", "layout.dispatch.", "layout.zero.tied"))]
OF_THE_REST = [code for code in RULES if code not in OF_EXPERTS]


def legal(of: Any, given: Given, codes: Iterable[str] = RULES) -> Any:
    """Whether every rule (or these) holds for a `Layout` or `Layouts` whose schedule exists."""
    return reduce(operator.and_, (RULES[code](of, given) for code in codes), True)


def problems(layout: Any, given: Given) -> list[Problem]:
    """What is wrong with one layout whose numbers are in the ranges of their fields."""
    said: list[Problem] = []
    for code, holds in RULES.items():
        asked = not any(problem.code.startswith(CHECKED_AFTER.get(code, ())) for problem in said)
        if asked and not holds(layout, given):
            said += [Problem(code, sentence) for sentence in _SENTENCES[code.split(".")[1]](code, layout, given)]
    return said


# ---- sentences ------------------------------------------------------------------------------------------------------


Sentences = Callable[[str, Layouts, Given], Iterator[str]]


def _of_heads(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """tp, and sp, which is of the same ranks."""
    spec = given.spec
    match code:
        case "layout.tp.heads":
            heads = next(heads for heads, _ in spec.attention_heads if heads % of.tp)
            why = f"does not divide the {heads} attention heads of {spec.name}"
            yield f"layout.tp={of.tp} {why}; {_near_tp(of.tp, spec)}"
        case "layout.tp.kv_heads":
            kv_heads = next(kv for _, kv in spec.attention_heads if kv % of.tp and of.tp % kv)
            why = f"neither divides the {kv_heads} kv heads of {spec.name} nor is a multiple"
            yield f"layout.tp={of.tp} {why}; {_near_tp(of.tp, spec)}"
        case "layout.tp.ffn":
            for width, kind in ((width, kind) for width, kind in spec.tensor_widths.items() if width % of.tp):
                what = "feed-forward width" if isinstance(kind, MLP) else "width"
                of_kind = f" in {kind.name}" if is_plugin(kind.name) else ""
                why = f"does not divide the {what} {width}{of_kind} of {spec.name}"
                yield f"layout.tp={of.tp} {why}; {_near_tp(of.tp, spec)}"
        case "layout.sp.tp":
            yield "layout.sp shards the sequence over tp, and tp=1; nearest: sp=false, or tp=2"


def _of_sequences(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """cp, and the pieces of a sequence."""
    spec = given.spec
    match code:
        case "layout.cp.heads":
            heads = next(heads for heads, _ in spec.attention_heads if heads % (of.cp * of.tp))
            fitting = [n for n in divisors(heads) if heads_fit(spec, n * of.tp)]
            near = f"{_around('cp', of.cp, fitting)}, or cp_kind=ring" if fitting else "cp_kind=ring"
            yield (
                f"cp_kind=ulysses deals the heads out over cp x tp = {of.cp * of.tp} ranks, which does not divide the "
                f"{heads} heads of {spec.name}; nearest: {near}"
            )
        case "layout.cp.kind":
            kind = whole_sequences(spec)[0]
            yield f"layout.cp={of.cp} divides sequences, and {kind.name} of {spec.name} reads whole ones; nearest: cp=1"
        case "layout.seq.pieces":
            seq, pieces = given.seq or 0, sequence_pieces(of)
            near = either([f"seq={n}" for n in _multiples(seq, pieces)])
            why = f"does not divide into the {pieces} equal pieces that {of} needs"
            yield f"a sequence of {seq} tokens {why}; nearest: {near}"


def _of_schedule(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """The schedule, and the numbers that it takes."""
    match code:
        case "layout.schedule.unknown":
            yield from of.schedule_problems
        case "layout.schedule.degree":
            file = of.record.schedule
            assert file is not None
            for field, asked, own in (("pp", of.pp, file.p), ("microbatches", of.microbatches, file.m)):
                if asked != own:
                    why = f"and {of.schedule} is a schedule for {field}={own}"
                    yield f"layout.{field}={asked}, {why}; nearest: {field}={own}"
        case "layout.schedule.stages":
            ranks = enumerate(of.record.placement(of.pp).of_rank)
            counts = ", ".join(f"{len(stages)} on rank {rank}" for rank, stages in ranks)
            yield f"{of.schedule} has {counts}: training needs the same number of stages on every pipeline rank"
        case "layout.schedule.first":
            first = of.record.placement(of.pp).owner[0]
            yield f"{of.schedule} has stage 0 on rank {first}: training reads its input on pipeline rank 0"
        case "layout.schedule.collectives":
            why = "training does these by layout.zero; leave them out of the file"
            yield f"{of.schedule} places GATHER, REDUCE or STEP: {why}"
        case "layout.schedule.size":
            yield size_problem(of.stages, of.microbatches) or ""
        case "layout.chunks.schedule":
            own, others = of.record.chunks, either([record.name for record in RECORDS if record.any_chunks])
            why = f"and schedule={of.schedule} has {own} per rank"
            yield f"layout.chunks={of.chunks}, {why}; nearest: chunks={own}, or schedule={others}"
        case "layout.microbatches.schedule":
            least, other = of.record.least * of.pp, "zb-v" if of.chunks == 2 else "1f1b"
            why = f"and schedule={of.schedule} and pp={of.pp} need at least {least}"
            yield f"layout.microbatches={of.microbatches}, {why}; nearest: microbatches={least}, or schedule={other}"


def _of_stages(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """The layers of stages."""
    spec = given.spec
    made = f"pp={of.pp} x chunks={of.chunks} makes {of.stages}"
    split = f"layout.split={','.join(map(str, of.split))}"
    match code:
        case "layout.split.negative":
            yield f"{split} has a negative number of layers; the least is 0"
        case "layout.split.stages":
            yield f"{split} names {len(of.split)} stages, and {made}"
        case "layout.split.layers":
            yield f"{split} adds up to {sum(of.split)} layers, and {spec.name} has {spec.layers}"
        case "layout.pp.layers":
            most = most_stages(spec)
            near = f"pp={most // of.chunks}" if most >= of.chunks else f"chunks={most // of.pp}"
            why = f"and {spec.name} has {spec.layers} layers, an embedding and a head to fill them"
            yield f"{made} stages, {why}; nearest: {near}"


def _of_data(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """ZeRO, and what dp ranks share."""
    spec = given.spec
    match code:
        case "layout.zero.tied":
            why = "gathers the weights of each stage by itself"
            if of.zero == 2:
                why = "keeps no whole gradient between two stages' passes"
            yield (
                f"zero={of.zero} {why}, and schedule={of.schedule} has the tied embedding of {spec.name} in two "
                "stages of one rank; nearest: zero=1, or schedule=zb-h1"
            )
        case "layout.zero.stage":
            yield f"layout.zero={of.zero} is not a ZeRO stage; nearest: zero={min(max(of.zero, 0), 3)}"
        case "layout.replicate.zero":
            why = f"copies the shards of zero=3, and zero={of.zero}"
            yield f"layout.replicate={of.replicate} {why}; nearest: replicate=1, or zero=3"
        case "layout.replicate.dp":
            near = _around("replicate", of.replicate, divisors(of.dp))
            yield f"layout.replicate={of.replicate} does not divide dp={of.dp}; nearest: {near}"
        case "layout.batch.share":
            batch = given.batch or 0
            each, rest = divmod(batch, of.dp)
            fewer = [n for n in divisors(each) if n < of.microbatches] if each and not rest else []
            near = f"batch={either(_multiples(batch, of.dp * of.microbatches))}"
            near += f", or layout.microbatches={max(fewer)}" if fewer else ""
            why = f"does not divide over dp={of.dp} x microbatches={of.microbatches}"
            yield f"a global batch of {batch} sequences {why}; nearest: {near}"


def _of_experts(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """ep, and how tokens travel."""
    spec = given.spec
    match code:
        case "layout.ep.dense":
            yield f"layout.ep={of.ep} deals out experts, and {spec.name} has none; nearest: ep=1"
        case "layout.ep.ranks":
            ranks, shared = expert_ranks(of), "dp/replicate x cp x tp" if of.replicate > 1 else "dp x cp x tp"
            why = f"does not divide the {shared} = {ranks} ranks that have the same layers"
            alone = ranks == 1 and expert_count(spec) % of.ep == 0
            more = f", or dp={of.ep} or tp={of.ep}: ep adds no ranks, it shares theirs" if alone else ""
            yield f"layout.ep={of.ep} {why}; {_near_ep(of, spec)}{more}"
        case "layout.ep.experts":
            why = f"does not divide the {expert_count(spec)} experts of {spec.name}: each rank has as many"
            yield f"layout.ep={of.ep} {why}; {_near_ep(of, spec)}"
        case "layout.dispatch.dense":
            yield f"layout.dispatch={of.dispatch} sends tokens to experts, and {spec.name} has none; leave it out"
        case "layout.dispatch.ep":
            yield f"layout.dispatch={of.dispatch} is how tokens reach other ranks of ep, and ep=1; leave it out"


def _of_ranks(code: str, of: Layouts, given: Given) -> Iterator[str]:
    """The number of ranks."""
    world, inner = given.world or 0, of.world // of.dp
    fewer, shared = world // inner, world // of.pp  # ranks that have the same layers
    near = f"dp={fewer}" + (f",ep={math.gcd(of.ep, shared)}" if shared % of.ep else "")
    near = (f"{near}, or " if world % inner == 0 else "") + f"{given.ranks_by} {of.world}"
    needs = f"needs {of.world} rank{'s' * (of.world > 1)} ({' x '.join(of.degrees)})"
    yield f"layout {of} {needs}, and there {'is' if world == 1 else 'are'} {world}; nearest: {near}"


# By the second word of a code: what is said of a layout that breaks the rule, the values and the nearest that would do.
_SENTENCES: dict[str, Sentences] = {
    **dict.fromkeys(("tp", "sp"), _of_heads),
    **dict.fromkeys(("cp", "seq"), _of_sequences),
    **dict.fromkeys(("schedule", "chunks", "microbatches"), _of_schedule),
    **dict.fromkeys(("split", "pp"), _of_stages),
    **dict.fromkeys(("zero", "replicate", "batch"), _of_data),
    **dict.fromkeys(("ep", "dispatch"), _of_experts),
    "ranks": _of_ranks,
}


def _near_tp(tp: int, spec: ModelSpec) -> str:
    return f"nearest: {_around('tp', tp, [n for n in divisors(math.lcm(*_heads(spec))) if tp_fits(spec, n)])}"


def _near_ep(of: Layouts, spec: ModelSpec) -> str:
    return f"nearest: {_around('ep', of.ep, [n for n in divisors(expert_ranks(of)) if expert_count(spec) % n == 0])}"


def _around(field: str, value: int, fitting: list[int]) -> str:
    """The values on either side that fit: 'tp=2 or tp=4'."""
    below, above = [n for n in fitting if n < value], [n for n in fitting if n > value]
    return either([f"{field}={n}" for n in (*below[-1:], *above[:1])] or [f"{field}=1"])


def _multiples(number: int, of: int) -> list[int]:
    """Those next to a number; 0 is none."""
    return [n for n in (number // of * of, -(-number // of) * of) if n]
