"""Ring, all-gather and Ulysses compared for one layer: the best kind, and where another overtakes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import ContextKind, Layout, tp_fits
from fivefold.layout.sharding import kv_head
from fivefold.plan.context import crossing
from fivefold.plan.context.crossing import Degree, Since
from fivefold.plan.context.methods import LayerAttention, Method, allgather, compare, possible, ring
from fivefold.plan.context.splits import splits
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires
from fivefold.plan.cost.systems import software_of
from fivefold.report import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted, either
from fivefold.support.ranges import RANKS, TOKENS, misfit, within

TIE = 1.03  # the model of kernels and links is not more exact than that


@dataclass(frozen=True)
class ContextResult(Result):
    model: str
    cluster: str
    case: LayerAttention
    most: int  # cp ranks that the cluster has

    @cached_property
    def methods(self) -> dict[ContextKind, Method | UserError]:
        """By kind: what it costs, or why it cannot run."""
        return compare(self.case)

    @cached_property
    def splits(self) -> list[dict[str, Any]]:
        """The ways to divide the tokens, with their balance and the time of a layer."""
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
        case, degrees = self.case, crossing.by_degree(self.case, self.most)
        shape = {"seq": case.seq, "tp": case.wires.layout.tp, "cp": case.ranks}
        heads = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
        faster, free = crossing.ring_or_gather(case), crossing.ring_is_free(case)
        return {"model": self.model, "cluster": self.cluster, **shape, **heads} | {
            "splits": self.splits,
            "methods": [
                {"kind": kind, "refused": str(one)} if isinstance(one, UserError) else _figures(one)
                for kind, one in self.methods.items()
            ],
            "best": possible(case)[0].kind,
            "best_by_seq": [{"from": start, "best": kind} for start, kind in crossing.by_length(case)],
            "ring_or_allgather_by_seq": [{"from": start, "faster": kind} for start, kind in faster],
            "ring_free_by_seq": [{"from": start, "free": answer} for start, answer in free],
            "by_cp": [{"cp": one.ranks, "best": one.best, "seconds": one.seconds} for one in degrees],
        }

    def blocks(self) -> Iterator[Block]:
        case = self.case
        layout, accelerator = case.wires.layout, case.device.accelerator
        link, where = accelerator.inside, "within a node"
        if case.wires.across("cp"):
            link, where = accelerator.across, f"{case.wires.reaches['cp'].together} per node"
        yield Text(
            f"one layer of {self.model} on {self.cluster}: {case.seq:,} tokens, tp={layout.tp}, cp={layout.cp}\n"
            f"a rank has {case.tokens:,} tokens, {counted(case.heads, 'head')} and {counted(case.kv_heads, 'kv head')} "
            f"of {case.head_dim}; cp ranks are {where}, joined by {link.name}"
        )
        yield from (self._split_table(), self._method_table(), Text(""))
        yield from map(Text, self._sentences())

    def _split_table(self) -> Table:
        rows = []
        for row in self.splits:
            name, _, *ratios, calls, gathered, around, at_once = row.values()
            ratios = [f"{ratio:.3f}" for ratio in ratios]
            rows.append([name, *ratios, str(calls), str(gathered), _ms(around), _ms(at_once)])
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
        for kind, one in self.methods.items():
            if isinstance(one, UserError):
                rows.append([kind, *["-"] * 8])
                continue
            times = (one.work.attention.total, one.work.merging.total, one.exposed.total, one.seconds)
            sent = (one.wire_bytes(backward) for backward in (False, True))
            rows.append([kind, *map(_mib, sent), *map(_ms, times), *map(_mib, (one.kept, one.buffers))])
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
                f"ulysses repeats the {counted(case.kv_heads, 'kv head')} of a rank {case.lcm // case.kv_heads} times, "
                "and sends and keeps the copies"
            )
        yield f"by length, cp={case.ranks}: {_ranges(crossing.by_length(case))}"
        yield f"  of ring and allgather: {_ranges(crossing.ring_or_gather(case))}"
        free = [one.start for one in crossing.ring_is_free(case) if one.answer]
        hides = f"from {free[-1]:,} tokens" if free else f"at no length up to {crossing.LONGEST:,}"
        yield f"  attention hides a ring's sends, all but the last: {hides}"
        yield f"by cp, {case.seq:,} tokens: {_degrees(crossing.by_degree(case, self.most))}"
        yield "with documents the balance of ring and allgather depends on where they end; ulysses is always balanced"

    def _best(self) -> str:
        first, *others = possible(self.case)
        rest = ", ".join(f"{one.kind} takes {one.seconds / first.seconds:.2f} times as long" for one in others)
        tie = [one.kind for one in others if one.seconds < TIE * first.seconds]
        close = f"; {either(tie)} is as good, within the error of this model" if tie else ""
        return f"{first.kind}, {first.split.name}: {_ms(first.seconds)} ms per layer; {rest}{close}"

    def _why(self) -> str:
        """What each kind pays beside attention itself."""
        reasons = []
        for kind, one in self.methods.items():
            if isinstance(one, UserError):
                continue
            sent = _mib(sum(map(one.wire_bytes, (False, True))))
            paid = f"{kind} waits {_ms(one.exposed.total)} ms for its {sent} MiB"
            if one.work.merging.total:
                paid += f" and merges for {_ms(one.work.merging.total)} ms"
            if one.spare:
                paid += f" (a rank's own tile can hide up to {_ms(one.spare)} ms of the gather)"
            reasons.append(paid)
        return "; ".join(reasons)

    def _tokens(self) -> str:
        """The zigzag is what runs: another split must be clearly better to be named."""
        parts = []
        for kind in ("ring", "allgather"):
            times = {row["split"]: row[f"{kind}_seconds"] for row in self.splits}
            best = min(times, key=lambda name: times[name])
            parts.append(f"{'zigzag' if times['zigzag'] < TIE * times[best] else best} for {kind}")
        return ", ".join(parts)


def _figures(one: Method) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "split": one.split.name,
        "sent_forward": one.wire_bytes(backward=False),
        "sent_backward": one.wire_bytes(backward=True),
        "attention_seconds": one.work.attention.total,
        "merging_seconds": one.work.merging.total,
        "exposed_seconds": one.exposed.total,
        "seconds": one.seconds,
        "kept": one.kept,
        "buffers": one.buffers,
    }


def _ranges(found: list[Since[Any]]) -> str:
    """'ulysses, then ring from 20,480 tokens'."""
    if len(found) == 1:
        return f"{found[0].answer} at every length"
    return f"{found[0].answer}, then " + ", then ".join(f"{one.answer} from {one.start:,} tokens" for one in found[1:])


def _degrees(found: list[Degree]) -> str:
    """'ring at cp=2 to 64; ulysses is possible up to cp=16'."""
    parts = []
    for kind, group in groupby(found, key=lambda one: one.best):
        ranks = [one.ranks for one in group]
        parts.append(f"{kind} at cp={ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else ""))
    able = [one.ranks for one in found if one.seconds["ulysses"] is not None]
    return ", ".join(parts) + (f"; ulysses is possible up to cp={able[-1]}" if able else "; ulysses is never possible")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 1 else 2}f}"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.{0 if count >= 100 << 20 else 1}f}"


def context(
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
    spec, machines, stack = _spec(model, heads, kv_heads, head_dim), Cluster.read(cluster), software_of(software)
    group = machines.groups[0]
    found = spec.problems()
    if len(machines.groups) > 1:
        found.append(f"{machines} has mixed nodes, and a cp group runs on nodes of one kind; nearest: cluster={group}")
    if cp < 2:
        found.append(f"cp={cp} does not divide a sequence; nearest: cp=2")
    found += filter(None, (misfit("seq", seq, within(1, TOKENS)), misfit("cp", max(cp, 2), within(2, RANKS))))
    if found:
        raise UserError(found)
    if tp is None:
        legal = [n for n in range(1, group.gpus + 1) if group.gpus % n == 0 and tp_fits(spec, n)]
        tp = max(n for n in legal if n == 1 or n * cp <= machines.world)
    layout = Layout(tp=tp, cp=cp)
    found = layout.problems(spec, seq=seq)
    if layout.world > machines.world:
        fits = [n for n in range(2, min(cp, machines.world // max(1, tp) + 1)) if seq % (2 * n) == 0]
        larger = f"cluster={-(-layout.world // group.gpus)}x{group.gpus}x{group.accelerator.name}"
        found.append(
            f"tp={tp} x cp={cp} needs {layout.world} GPUs, and {machines} has {machines.world}; nearest: "
            + either([*(f"cp={n}" for n in fits[-1:]), larger])
        )
    if found:
        raise UserError(found)
    device = Device.of(group.accelerator)
    case = LayerAttention(
        seq,
        spec.heads // tp,
        len(kv_head(spec, layout, 0)),
        spec.head_dim,
        device,
        Wires(device, group.gpus, layout),
        kernel=stack.attention,
        partial=stack.cp_attention or stack.attention,
    )
    return ContextResult(spec.name, str(machines), case, machines.world // tp)


def _spec(model: str | ModelSpec | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> ModelSpec:
    """The model, or one with the given heads."""
    if heads is None:
        parts = {"kv_heads": kv_heads, "head_dim": head_dim}
        if loose := [f"{name}={value}" for name, value in parts.items() if value is not None]:
            raise UserError(f"{', '.join(loose)} needs heads; give heads too, or only a model")
        return model if isinstance(model, ModelSpec) else preset(model or "llama3-405b")
    if model is not None:
        raise UserError(f"model={model} has heads of its own, and heads={heads} is given; leave one of them out")
    kv, width = heads if kv_heads is None else kv_heads, 128 if head_dim is None else head_dim
    given = {"heads": heads, "kv_heads": kv, "head_dim": width}
    if small := [f"{name}={value} must be at least 1" for name, value in given.items() if value < 1]:
        raise UserError(small)
    # The feed-forward width is one that every tp divides which divides the heads.
    name, hidden = f"a model of {heads} heads", heads * width
    return ModelSpec(name=name, layers=1, hidden=hidden, heads=heads, kv_heads=kv, head_dim=width, ffn=heads, vocab=2)
