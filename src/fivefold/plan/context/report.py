"""What `fivefold context` says: two tables, and sentences about the best way and where it stops being that."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from fivefold.plan.context import crossing
from fivefold.plan.context.crossing import Since
from fivefold.plan.context.methods import Case, Method, allgather, compare, possible, ring
from fivefold.plan.context.splits import splits
from fivefold.support.errors import UserError
from fivefold.support.formatting import either

TIE = 1.03  # the model of kernels and links is not more exact than that


def answer(case: Case, most: int) -> dict[str, Any]:
    """For scripts; `most` is how many cp ranks there are at all."""

    def told(found: list[Since[Any]], name: str) -> list[dict[str, Any]]:
        return [{"from": one.start, name: one.answer} for one in found]

    return {
        "seq": case.seq,
        "tp": case.wires.layout.tp,
        "cp": case.ranks,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "splits": split_rows(case),
        "methods": method_rows(case),
        "best": possible(case)[0].kind,
        "best_by_seq": told(crossing.by_length(case), "best"),
        "ring_or_allgather_by_seq": told(crossing.ring_or_gather(case), "faster"),
        "ring_free_by_seq": told(crossing.ring_is_free(case), "free"),
        "by_cp": [
            {"cp": one.ranks, "best": one.best, "seconds": one.seconds} for one in crossing.by_degree(case, most)
        ],
    }


def split_rows(case: Case) -> list[dict[str, Any]]:
    return [
        {
            "split": split.name,
            "piece": split.piece,
            "balance": split.balance,
            "worst_step": split.worst_step,
            "tiles": split.waste,
            "calls_ring_step": max(len(split.calls("earlier")), len(split.calls("later"))),
            "calls_gathered": max(len(split.gathered(rank)) for rank in range(case.ranks)),
            "ring_seconds": ring(case, split).seconds,
            "allgather_seconds": allgather(case, split).seconds,
        }
        for split in splits(case.seq, case.ranks)
    ]


def method_rows(case: Case) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "refused": str(one)} if isinstance(one, UserError) else _figures(one)
        for kind, one in compare(case).items()
    ]


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


# ---- tables ----------------------------------------------------------------------------------------------------------


def summary(case: Case) -> str:
    layout, accelerator = case.wires.layout, case.device.accelerator
    link, where = accelerator.inside, "within a node"
    if case.wires.across("cp"):
        link, where = accelerator.across, f"{case.wires.reaches['cp'].together} a node"
    return (
        f"{case.seq:,} tokens, tp={layout.tp}, cp={layout.cp}\n"
        f"a rank has {case.tokens:,} tokens, {_count(case.heads, 'head')} and {_count(case.kv_heads, 'kv head')} of "
        f"{case.head_dim}; cp ranks are {where}, joined by {link.name}"
    )


SPLITS = (
    "busiest: the busiest rank's scores over the mean; step: the same within a ring's worst step; tiles: scores in "
    "whole tiles over those that are seen; calls: kernels of a ring's step, and of a rank with all keys gathered"
)
METHODS = (
    "one layer: what a rank sends forward and backward; milliseconds of both; memory until backward, and beside it"
)


def split_table(case: Case) -> Table:
    table = _table("tokens", "busiest", "step", "tiles", "calls", "gathered", "ring ms", "allgather")
    for row in split_rows(case):
        ratios = (f"{row[key]:.3f}" for key in ("balance", "worst_step", "tiles"))
        counts = (str(row[key]) for key in ("calls_ring_step", "calls_gathered"))
        times = (_ms(row[key]) for key in ("ring_seconds", "allgather_seconds"))
        table.add_row(row["split"], *ratios, *counts, *times)
    return table


def method_table(case: Case) -> Table:
    table = _table("keys", "MiB sent", "back", "ms attend", "merge", "exposed", "layer", "MiB kept", "buffers")
    for row in method_rows(case):
        if "refused" in row:
            table.add_row(row["kind"], *["-"] * 8)
            continue
        times = (_ms(row[key]) for key in ("attention_seconds", "merging_seconds", "exposed_seconds", "seconds"))
        sent = (_mib(row[key]) for key in ("sent_forward", "sent_backward"))
        table.add_row(row["kind"], *sent, *times, *(_mib(row[key]) for key in ("kept", "buffers")))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", no_wrap=True)
    return table


# ---- sentences -------------------------------------------------------------------------------------------------------


def sentences(case: Case, most: int) -> Iterator[str]:
    found = compare(case)
    first, *others = possible(case)
    yield f"best: {_best(first, others)}"
    yield f"why: {_why(found)}"
    yield f"tokens: {_tokens(case)}"
    if isinstance(refusal := found["ulysses"], UserError):
        yield f"ulysses cannot: {refusal}"
    elif case.lcm > case.kv_heads:
        yield (
            f"ulysses repeats the {_count(case.kv_heads, 'kv head')} of a rank {case.lcm // case.kv_heads} times, and "
            "sends and keeps the copies"
        )
    yield f"by length, cp={case.ranks}: {_ranges(crossing.by_length(case))}"
    yield f"  of ring and allgather: {_ranges(crossing.ring_or_gather(case))}"
    free = [one.start for one in crossing.ring_is_free(case) if one.answer]
    hides = f"from {free[-1]:,} tokens" if free else f"at no length up to {crossing.LONGEST:,}"
    yield f"  attention hides a ring's sends, all but the last: {hides}"
    yield f"by cp, {case.seq:,} tokens: {_degrees(crossing.by_degree(case, most))}"
    yield "with documents the balance of ring and allgather depends on where they end; ulysses is always balanced"


def _best(first: Method, others: Sequence[Method]) -> str:
    rest = ", ".join(f"{one.kind} takes {one.seconds / first.seconds:.2f} times that" for one in others)
    tie = [one.kind for one in others if one.seconds < TIE * first.seconds]
    close = f"; {either(tie)} is as good, as far as this can tell" if tie else ""
    return f"{first.kind}, {first.split.name}: {_ms(first.seconds)} ms a layer; {rest}{close}"


def _why(found: dict[Any, Method | UserError]) -> str:
    """What each pays beside attention itself."""
    reasons = []
    for kind, one in found.items():
        if isinstance(one, UserError):
            continue
        paid = f"{kind} waits {_ms(one.exposed.total)} ms for its {_mib(sum(map(one.wire_bytes, (False, True))))} MiB"
        if one.work.merging.total:
            paid += f" and merges for {_ms(one.work.merging.total)}"
        if one.spare:
            paid += f" (a rank's own tile, run under the gather, takes up to {_ms(one.spare)} off)"
        reasons.append(paid)
    return "; ".join(reasons)


def _tokens(case: Case) -> str:
    """'zigzag for ring, zigzag for allgather'. The zigzag is what runs: another must be clearly better to be named."""
    rows, parts = split_rows(case), []
    for kind in ("ring", "allgather"):
        times = {row["split"]: row[f"{kind}_seconds"] for row in rows}
        best = min(times, key=lambda name: times[name])
        parts.append(f"{'zigzag' if times['zigzag'] < TIE * times[best] else best} for {kind}")
    return ", ".join(parts)


def _ranges(found: list[Since[Any]]) -> str:
    """'ulysses, then ring from 20,480 tokens'."""
    if len(found) == 1:
        return f"{found[0].answer} at every length"
    return f"{found[0].answer}, then " + ", then ".join(f"{one.answer} from {one.start:,} tokens" for one in found[1:])


def _degrees(found: list[crossing.Degree]) -> str:
    """'ring at cp=2 to 64; ulysses is possible up to cp=16'."""
    parts = []
    for kind, group in groupby(found, key=lambda one: one.best):
        ranks = [one.ranks for one in group]
        parts.append(f"{kind} at cp={ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else ""))
    able = [one.ranks for one in found if one.seconds["ulysses"] is not None]
    return ", ".join(parts) + (f"; ulysses is possible up to cp={able[-1]}" if able else "; ulysses never")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 1 else 2}f}"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.{0 if count >= 100 << 20 else 1}f}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
