"""Sentences about experts and latents in a plan for serving: what a step touches, and why not another ep, tp or dp."""

from collections.abc import Iterator
from dataclasses import replace

from fivefold.plan.imbalance import IMBALANCE, SOURCE, more_even
from fivefold.plan.serving.memory import held, memory_limit, whole_cache
from fivefold.plan.serving.mixture import degrees, most_touched, touched
from fivefold.plan.serving.options import Service, ServingOption, fullest
from fivefold.plan.serving.step import Replica
from fivefold.plan.serving.wording import BOUNDS, gigabytes, milliseconds, rate, sequences


def about_experts(service: Service, quick: ServingOption, heavy: ServingOption) -> Iterator[str]:
    """None for dense models with keys and values of their own."""
    if service.spec.mla is not None:
        yield _latents(service, heavy)
    if service.spec.experts is None:
        return
    yield _touched(service, heavy)
    yield from _whole_experts(service, quick)
    for other in _neighbours(service, heavy):
        yield why_not(service, heavy, other)
    if heavy.ep > 1:
        yield _uneven(service, heavy)


def _latents(service: Service, heavy: ServingOption) -> str:
    mla = service.spec.mla
    assert mla is not None
    each = whole_cache(service.spec, service.cache_bytes)
    told = (
        f"A token leaves {mla.kv_rank} + {mla.rope_dim} numbers a layer in the cache, {each:,.0f} bytes in all, from "
        f"which every head works: tp divides the heads and not these"
    )
    if heavy.tp > 1:
        return f"{told}, so tp={heavy.tp} holds them {heavy.tp} times."
    return f"{told}, so tp=2 would hold them twice."


def _touched(service: Service, heavy: ServingOption) -> str:
    own = service.spec.experts
    assert own is not None
    tokens = -(-heavy.batch // heavy.pp)
    here = most_touched(own, heavy.ep, tokens)
    groups = f", at most {here:.1f} of the {own.count // heavy.ep} of a GPU" if heavy.ep > 1 else ""
    return (
        f"A token visits {own.top_k} of {own.count} experts of a layer; the {tokens:,} of a step at {heavy.layout} "
        f"visit {touched(own, tokens):.1f} of them, {own.count} x (1 - (1 - {own.top_k}/{own.count})^{tokens}), if all "
        f"are chosen equally often{groups}. Only these are read."
    )


def _whole_experts(service: Service, quick: ServingOption) -> Iterator[str]:
    """At the lowest latency: whether ranks divide experts, or have whole ones."""
    every = degrees(service.spec, quick.tp, quick.dp)
    if len(every) < 2:
        return
    ep = every[-1] if quick.ep == 1 else 1
    step = service.like(quick, ep=ep).step(quick.batch, service.context)
    reason = "GPUs without a chosen expert wait for those that read one" if quick.ep == 1 else "each has a part of all"
    yield (
        f"Why not ep={ep} at {sequences(quick.batch)}: {reason}, and a token takes {milliseconds(step.total)} instead "
        f"of {milliseconds(quick.step)}."
    )


def _neighbours(service: Service, one: ServingOption) -> Iterator[Replica]:
    """On the same GPUs: the next ep; half and twice the tp, or half the pp, with as much more or less dp. On others:
    half and twice the dp."""
    spec, world = service.spec, service.group.world
    every = degrees(spec, one.tp, one.dp)
    at = every.index(one.ep)
    for ep in (*every[max(0, at - 1) : at], *every[at + 1 : at + 2]):
        yield service.like(one, ep=ep)
    sizes = [(one.tp / 2, 2 * one.dp, one.pp), (2 * one.tp, one.dp / 2, one.pp), (one.tp, 2 * one.dp, one.pp / 2)]
    sizes += [(one.tp, one.dp / 2, one.pp), (one.tp, 2 * one.dp, one.pp)]
    for tp, dp, pp in [tuple(map(int, size)) for size in sizes if all(float(part).is_integer() for part in size)]:
        if service.fits_heads(tp) and tp * dp * pp <= world and (found := degrees(spec, tp, dp)):
            yield service.like(one, tp=tp, dp=dp, pp=pp, ep=found[-1])


def why_not(service: Service, heavy: ServingOption, other: Replica) -> str:
    """Why another layout is not the one with the most tokens per second."""
    start = f"Why not {other.name}: "
    full = fullest(service, other)
    if full is None:
        needs = held(other, 1, service.tokens, service.prompt)
        return (
            f"{start}one sequence needs {gigabytes(needs.total)} of a GPU, {gigabytes(needs.weights)} of it weights, "
            f"and {gigabytes(memory_limit(service.device))} is the limit."
        )
    replica = service.like(heavy)
    batch = max(1, heavy.batch * other.world // replica.world)  # as many for each GPU
    was, step = heavy.parts, other.step(batch, service.context)
    more = {name: getattr(step, name) - getattr(was, name) for name in step._fields}
    worst = max(more, key=lambda name: more[name])
    cause = f", {milliseconds(more[worst])} more of it {BOUNDS[worst]}" if more[worst] > 0.02 * step.total else ""
    return (
        f"{start}it gives at most {rate(full.per_gpu)} tokens/s per GPU instead of {rate(heavy.per_gpu)}; a step of "
        f"{sequences(batch)} takes {milliseconds(step.total)} instead of {milliseconds(heavy.step)} "
        f"with {heavy.batch:,}{cause}."
    )


def _uneven(service: Service, heavy: ServingOption) -> str:
    even = replace(service.like(heavy), imbalance=1.0).step(heavy.batch, service.context).total
    source = f" ({SOURCE})" if service.imbalance == IMBALANCE else ""
    less = more_even(service.spec, heavy.ep, service.imbalance)
    source += f"; {less}" if less else ""
    return (
        f"The fullest of {heavy.ep} groups is taken to get {service.imbalance:g} times the mean{source}; with the same "
        f"load on all a step at {heavy.layout} would take {milliseconds(even)} instead of {milliseconds(heavy.step)}."
    )
