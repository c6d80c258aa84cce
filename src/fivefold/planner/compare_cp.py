"""Compares ring, all-gather and Ulysses for one layer: the fastest, and where another becomes the fastest.

It asks `cost/attention.py` at many lengths and degrees. Lengths double from one tile per piece upwards, and where the
answer changes between two of them the change is bisected. Attention grows with the square of the length and traffic
with its first power, so there is usually one change between two neighbours. Kernels that fill their last wave badly
can add more, which may be missed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fivefold.cost.attention import LayerAttention, Method, allgather, compare, possible, ring, splits
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import ATTENTION_TILE, Device
from fivefold.cost.systems import software_of
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import ContextKind, Layout
from fivefold.layout.rules import tp_fits
from fivefold.layout.sharding import kv_head
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import Problem, UserError
from fivefold.support.ranges import MAX_RANKS, MAX_TOKENS, check_range, misfit, within
from fivefold.support.text import either, plural

MAX_SEQ = 1 << 24  # tokens; longer sequences are not asked about

T = TypeVar("T")


class AnswerFrom(NamedTuple, Generic[T]):
    """An answer, and the least number that has it."""

    start: int
    answer: T


def find_changes(ask: Callable[[int], T], numbers: Sequence[int], step: int) -> list[AnswerFrom[T]]:
    """The answers over ascending multiples of `step`: the first, and every other one where it begins."""
    answers = [AnswerFrom(numbers[0], ask(numbers[0]))]
    for low, high in pairwise(numbers):
        at, last = low, ask(high)
        while answers[-1].answer != last:
            end, answer = high, last
            while end - at > step:
                middle = (at + end) // 2 // step * step
                if ask(middle) == answers[-1].answer:
                    at = middle
                else:
                    end, answer = middle, ask(middle)
            answers.append(AnswerFrom(end, answer))
            at = end
    return answers


def _over_lengths(case: LayerAttention, ask: Callable[[LayerAttention], T]) -> list[AnswerFrom[T]]:
    step = 2 * case.ranks * ATTENTION_TILE  # pieces are whole tiles
    doubled = [step << power for power in range(64) if step << power <= max(MAX_SEQ, step)]
    return find_changes(lambda seq: ask(replace(case, seq=seq)), doubled, step)


def best_by_length(case: LayerAttention) -> list[AnswerFrom[ContextKind]]:
    """The fastest kind, by the length of the sequence."""
    return _over_lengths(case, lambda at_length: possible(at_length)[0].kind)


def ring_or_gather_by_length(case: LayerAttention) -> list[AnswerFrom[ContextKind]]:
    """The faster of the two kinds that do not divide heads."""
    return _over_lengths(case, lambda c: min(ring(c), allgather(c), key=lambda method: method.seconds).kind)


def ring_hidden_by_length(case: LayerAttention) -> list[AnswerFrom[bool]]:
    """Whether attention hides every send of a ring except the last gradient's."""
    return _over_lengths(case, lambda at_length: ring(at_length).ring_wait == 0)


class Degree(NamedTuple):
    """One sequence over a number of ranks."""

    ranks: int
    seconds: dict[ContextKind, float | None]  # None: it cannot run

    @property
    def best(self) -> ContextKind:
        return min((time, kind) for kind, time in self.seconds.items() if time is not None)[1]


def by_degree(case: LayerAttention, max_ranks: int) -> list[Degree]:
    """The same sequence over 2, 4, 8, ... ranks, up to `max_ranks` and as far as it divides; and over `case.ranks`."""
    doubled = {1 << power for power in range(1, max_ranks.bit_length())}
    fits = sorted(c for c in doubled | {case.ranks} if c <= max_ranks and case.seq % (2 * c) == 0)
    return [
        Degree(ranks, {kind: getattr(method, "seconds", None) for kind, method in compare(case.over(ranks)).items()})
        for ranks in fits
    ]


TIE_RATIO = 1.03  # the model of kernels and links is not more exact than that


@dataclass(frozen=True)
class ContextResult(Result):
    model: str
    cluster: str
    case: LayerAttention
    max_cp: int  # cp ranks that the cluster has

    @cached_property
    def methods(self) -> dict[ContextKind, Method | UserError]:
        """By kind: what it costs, or why it cannot run."""
        return compare(self.case)

    @cached_property
    def splits(self) -> list[dict[str, Any]]:
        """The ways to divide the tokens over ranks, with their balance and a layer's time."""
        return [
            {
                "split": split.name,
                "piece": split.piece,
                "balance": split.balance,
                "worst_step": split.worst_step,
                "tiles": split.waste,
                "calls_ring_step": max(len(split.calls("earlier")), len(split.calls("later"))),
                "calls_gathered": max(len(split.gathered(rank)) for rank in range(self.case.ranks)),
                "ring_seconds": ring(self.case, split).seconds,
                "allgather_seconds": allgather(self.case, split).seconds,
            }
            for split in splits(self.case.seq, self.case.ranks)
        ]

    def to_dict(self) -> dict[str, Any]:
        case, degrees = self.case, by_degree(self.case, self.max_cp)
        shape = {"seq": case.seq, "tp": case.topology.layout.tp, "cp": case.ranks}
        heads = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
        faster, free = ring_or_gather_by_length(case), ring_hidden_by_length(case)
        return {"model": self.model, "cluster": self.cluster, **shape, **heads} | {
            "splits": self.splits,
            "methods": [
                {"kind": kind, "refused": str(method)} if isinstance(method, UserError) else _method_to_dict(method)
                for kind, method in self.methods.items()
            ],
            "best": possible(case)[0].kind,
            "best_by_seq": [{"from": start, "best": kind} for start, kind in best_by_length(case)],
            "ring_or_allgather_by_seq": [{"from": start, "faster": kind} for start, kind in faster],
            "ring_free_by_seq": [{"from": start, "free": answer} for start, answer in free],
            "by_cp": [{"cp": degree.ranks, "best": degree.best, "seconds": degree.seconds} for degree in degrees],
        }

    def blocks(self) -> Iterator[Block]:
        case = self.case
        layout, accelerator = case.topology.layout, case.device.accelerator
        link, where = accelerator.inside, "within a node"
        if case.topology.across("cp"):
            link, where = accelerator.across, f"{case.topology.reaches['cp'].together} per node"
        yield Text(
            f"one layer of {self.model} on {self.cluster}: {case.seq:,} tokens, tp={layout.tp}, cp={layout.cp}\n"
            f"a rank has {case.tokens:,} tokens, {plural(case.heads, 'head')} and {plural(case.kv_heads, 'kv head')} "
            f"of {case.head_dim}; cp ranks are {where}, joined by {link.name}"
        )
        yield from (self._split_table(), self._method_table(), Text(""))
        yield from map(Text, self._sentences())

    def _split_table(self) -> Table:
        rows = []
        for row in self.splits:
            name, _, *ratios, calls, gathered, around, at_once = row.values()
            ratios = [f"{ratio:.3f}" for ratio in ratios]
            rows.append([name, *ratios, str(calls), str(gathered), _ms_text(around), _ms_text(at_once)])
        return Table(
            ["split", ">busiest rank", ">worst step", ">tiles", ">calls", ">gathered", ">ring ms", ">allgather ms"],
            rows,
            title="How tokens are divided",
            caption="busiest rank: its scores over the mean; worst step: the same within one step of a ring; "
            "tiles: scores in whole tiles over scores that count; calls: kernels of a ring's step, and of a rank with "
            "all keys gathered",
        )

    def _method_table(self) -> Table:
        rows = []
        for kind, method in self.methods.items():
            if isinstance(method, UserError):
                rows.append([kind, *["-"] * 8])
                continue
            times = (method.work.attention.total, method.work.merging.total, method.exposed.total, method.seconds)
            sent = (method.wire_bytes(backward) for backward in (False, True))
            rows.append(
                [kind, *map(_mib_text, sent), *map(_ms_text, times), *map(_mib_text, (method.kept, method.buffers))]
            )
        return Table(
            ["kind", ">MiB sent", ">back", ">ms attend", ">merge", ">exposed", ">layer", ">MiB kept", ">buffers"],
            rows,
            title="How keys are exchanged",
            caption="one layer: MiB that a rank sends forward and backward; milliseconds of both passes: attention, "
            "merging, exposed communication, total; memory kept until backward, and buffers beside it",
        )

    def _sentences(self) -> Iterator[str]:
        case = self.case
        yield f"best: {self._best()}"
        yield f"why: {self._why()}"
        yield f"tokens: {self._tokens()}"
        if isinstance(refusal := self.methods["ulysses"], UserError):
            yield f"ulysses cannot run: {refusal}"
        elif case.lcm > case.kv_heads:
            yield (
                f"ulysses repeats the {plural(case.kv_heads, 'kv head')} of a rank {case.lcm // case.kv_heads} times, "
                "and sends and keeps the copies"
            )
        yield f"by length, cp={case.ranks}: {_ranges_text(best_by_length(case))}"
        yield f"  of ring and allgather: {_ranges_text(ring_or_gather_by_length(case))}"
        free = [since.start for since in ring_hidden_by_length(case) if since.answer]
        hides = f"from {free[-1]:,} tokens" if free else f"at no length up to {MAX_SEQ:,}"
        yield f"  attention hides a ring's sends, all but the last: {hides}"
        yield f"by cp, {case.seq:,} tokens: {_degrees_text(by_degree(case, self.max_cp))}"
        yield "with documents the balance of ring and allgather depends on where they end; ulysses is always balanced"

    def _best(self) -> str:
        first, *others = possible(self.case)
        rest = ", ".join(f"{method.kind} takes {method.seconds / first.seconds:.2f} times as long" for method in others)
        tie = [method.kind for method in others if method.seconds < TIE_RATIO * first.seconds]
        close = f"; {either(tie)} is as good, within the error of this model" if tie else ""
        return f"{first.kind}, {first.split.name}: {_ms_text(first.seconds)} ms per layer; {rest}{close}"

    def _why(self) -> str:
        """What each kind costs besides attention itself."""
        reasons = []
        for kind, method in self.methods.items():
            if isinstance(method, UserError):
                continue
            sent = _mib_text(sum(map(method.wire_bytes, (False, True))))
            paid = f"{kind} waits {_ms_text(method.exposed.total)} ms for its {sent} MiB"
            if method.work.merging.total:
                paid += f" and merges for {_ms_text(method.work.merging.total)} ms"
            if method.spare:
                paid += f" (a rank's own tile can hide up to {_ms_text(method.spare)} ms of the gather)"
            reasons.append(paid)
        return "; ".join(reasons)

    def _tokens(self) -> str:
        """The best split of each kind. Zigzag is what runs, so another must be clearly better to be named."""
        parts = []
        for kind in ("ring", "allgather"):
            times = {row["split"]: row[f"{kind}_seconds"] for row in self.splits}
            best = min(times, key=lambda name: times[name])
            parts.append(f"{'zigzag' if times['zigzag'] < TIE_RATIO * times[best] else best} for {kind}")
        return ", ".join(parts)


def _method_to_dict(method: Method) -> dict[str, Any]:
    return {
        "kind": method.kind,
        "split": method.split.name,
        "sent_forward": method.wire_bytes(backward=False),
        "sent_backward": method.wire_bytes(backward=True),
        "attention_seconds": method.work.attention.total,
        "merging_seconds": method.work.merging.total,
        "exposed_seconds": method.exposed.total,
        "seconds": method.seconds,
        "kept": method.kept,
        "buffers": method.buffers,
    }


def _ranges_text(answers: list[AnswerFrom[Any]]) -> str:
    """'ulysses, then ring from 20,480 tokens'."""
    if len(answers) == 1:
        return f"{answers[0].answer} at every length"
    return f"{answers[0].answer}, then " + ", then ".join(
        f"{since.answer} from {since.start:,} tokens" for since in answers[1:]
    )


def _degrees_text(degrees: list[Degree]) -> str:
    """'ring at cp=2 to 64; ulysses is possible up to cp=16'."""
    parts = []
    for kind, group in groupby(degrees, key=lambda degree: degree.best):
        ranks = [degree.ranks for degree in group]
        parts.append(f"{kind} at cp={ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else ""))
    able = [degree.ranks for degree in degrees if degree.seconds["ulysses"] is not None]
    return ", ".join(parts) + (f"; ulysses is possible up to cp={able[-1]}" if able else "; ulysses is never possible")


def _ms_text(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 1 else 2}f}"


def _mib_text(count: float) -> str:
    return f"{count / (1 << 20):,.{0 if count >= 100 << 20 else 1}f}"


def compare_cp(
    seq: int,
    cp: int,
    *,
    model: str | ModelSpec | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tp: int | None = None,
    cluster: str | Path | Cluster = "16x8xH100",
    software: str = "fivefold",
) -> ContextResult:
    """Compare the kinds of context parallelism for a sequence of `seq` tokens over `cp` ranks.

    The heads are a model's, or given one by one. `tp` ranks share them; by default as many as a node has, if heads and
    cluster allow.
    """
    spec, machines, profile = (
        _model_with_heads(model, heads, kv_heads, head_dim),
        Cluster.read(cluster),
        software_of(software),
    )
    group = machines.groups[0]
    problems = spec.problems()
    if len(machines.groups) > 1:
        problems.append(
            f"{machines} has mixed nodes, and a cp group runs on nodes of one kind; nearest: cluster={group}"
        )
    sizes = (
        misfit("seq", seq, within(1, MAX_TOKENS)),
        misfit("cp", cp, within(2, MAX_RANKS, "one rank divides nothing")),
    )
    problems += [Problem("option.range", sentence) for sentence in sizes if sentence]
    if problems:
        raise UserError(problems, "compare.cp")
    if tp is None:
        legal = [n for n in range(1, group.gpus + 1) if group.gpus % n == 0 and tp_fits(spec, n)]
        tp = max(n for n in legal if n == 1 or n * cp <= machines.world)
    layout = Layout(tp=tp, cp=cp)
    problems = layout.problems(spec, seq=seq)
    if layout.world > machines.world:
        fits = [n for n in range(2, min(cp, machines.world // max(1, tp) + 1)) if seq % (2 * n) == 0]
        larger = f"cluster={-(-layout.world // group.gpus)}x{group.gpus}x{group.accelerator.name}"
        problems.append(
            f"tp={tp} x cp={cp} needs {layout.world} GPUs, and {machines} has {machines.world}; nearest: "
            + either([*(f"cp={n}" for n in fits[-1:]), larger])
        )
    if problems:
        raise UserError(problems, "compare.cp")
    device = Device.of(group.accelerator)
    case = LayerAttention(
        seq=seq,
        heads=spec.heads // tp,
        kv_heads=len(kv_head(spec, layout, 0)),
        head_dim=spec.head_dim,
        device=device,
        topology=Topology(device, group.gpus, layout),
        full_kernel=profile.attention,
        partial_kernel=profile.cp_attention or profile.attention,
    )
    return ContextResult(spec.name, str(machines), case, machines.world // tp)


def _model_with_heads(
    model: str | ModelSpec | None, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> ModelSpec:
    """The model, or one with the given heads."""
    if heads is None:
        parts = {"kv_heads": kv_heads, "head_dim": head_dim}
        if loose := [f"{name}={value}" for name, value in parts.items() if value is not None]:
            raise UserError(f"{', '.join(loose)} needs heads; give heads too, or only a model", "option.missing")
        return model if isinstance(model, ModelSpec) else preset(model or "llama3-405b")
    if model is not None:
        raise UserError(
            f"model={model} already has heads, and heads={heads} is given; leave one of them out", "option.conflict"
        )
    kv, width = heads if kv_heads is None else kv_heads, 128 if head_dim is None else head_dim
    for name, value in {"heads": heads, "kv_heads": kv, "head_dim": width}.items():
        check_range(name, value, within(1, 100_000))
    # The feed-forward width is one that every tp divides which divides the heads.
    name, hidden = f"a model of {heads} heads", heads * width
    return ModelSpec(name=name, layers=1, hidden=hidden, heads=heads, kv_heads=kv, head_dim=width, ffn=heads, vocab=2)
