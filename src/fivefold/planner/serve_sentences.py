"""Why a plan for serving is what it is, or why a model cannot be served as asked: sentences with numbers."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from fivefold.cost.moe import IMBALANCE, IMBALANCE_SOURCE, imbalance_caveat
from fivefold.layout.rules import tp_fits
from fivefold.planner.serve_cost import (
    Replica,
    degrees,
    experts_touched,
    largest,
    memory_limit,
    memory_needed,
    most_touched,
    whole_cache,
    whole_weights,
)
from fivefold.planner.serve_options import (
    BOUND_NAMES,
    Service,
    ServingOption,
    gigabytes,
    highest_throughput,
    milliseconds,
    rate,
    replicas,
    sequences,
)
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem
from fivefold.support.plugins import is_plugin
from fivefold.support.ranges import MAX_SECONDS, MAX_TOKENS, misfit, within

USUAL_NODE_GPUS = 8  # GPUs of a usual node, where the given one is smaller


def explain(service: Service, quick: ServingOption, heavy: ServingOption) -> tuple[str, ...]:
    """Sentences about the option with the lowest latency and the one with the highest throughput."""
    sentences = [
        _bound_sentence(quick),
        _why_not_more_tp(service, quick, heavy),
        _what_pp_gives(service, quick if quick.pp > 1 or heavy.pp == 1 else heavy),
        _compute_bound_at(service, heavy),
        _copies_sentence(service, max(quick, heavy, key=lambda option: option.tp)),
        *about_experts(service, quick, heavy),
        _graphs_sentence(service, quick),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _bound_sentence(quick: ServingOption) -> str:
    parts = sorted(quick.parts._asdict().items(), key=lambda item: -item[1])
    shares = [f"{BOUND_NAMES[name]} {value / quick.step:.0%}" for name, value in parts if value > 0.05 * quick.step]
    return f"A step of {milliseconds(quick.step)} at {quick.layout} and {sequences(quick.batch)}: {', '.join(shares)}."


def _why_not_more_tp(service: Service, quick: ServingOption, heavy: ServingOption) -> str:
    """Why not more tp: on the same GPUs with less pp where that is possible, or else on more of them."""
    spec, gpus, world = service.spec, service.group.gpus, service.group.world
    more = [tp for tp in range(quick.tp + 1, max(8 * gpus, USUAL_NODE_GPUS) + 1) if tp_fits(spec, tp)]
    more = [tp for tp in more if (gpus % tp == 0 or tp % gpus == 0) and degrees(spec, tp)]
    if not more:
        return f"tp={quick.tp} is the most that {spec.heads} heads and {spec.kv_heads} kv heads allow here."
    wide, before = _with_tp(service, quick, more[0]), quick.tp * quick.dp * quick.pp
    tp = wide.tp
    step = wide.step(quick.batch, service.context)
    where = f"it leaves the node of {gpus}; " if wide.crosses else ""
    share, was = step.tp / step.total, quick.parts.tp / quick.step
    gain = quick.step / step.total
    verdict = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
    cost = "on the same GPUs" if wide.world == before else f"for {wide.world / before:.3g} times the GPUs"
    remark = "" if wide.world <= world else f"; it takes {wide.world} GPUs, and the cluster has {world}"
    if not remark and gain >= 1 and (fastest := highest_throughput(service, wide)):
        less = rate(fastest.per_gpu), rate(heavy.per_gpu)
        remark = f"; but it gives at most {less[0]} tokens/s per GPU instead of {less[1]}"
    named = f"tp={tp}" if wide.dp == quick.dp else wide.name
    return (
        f"Why not {named}: {where}all-reduces are {share:.0%} of its step instead of {was:.0%}, and a token takes "
        f"{milliseconds(step.total)} instead of {milliseconds(quick.step)}, {verdict} {cost}{remark}."
    )


def _with_tp(service: Service, quick: ServingOption, tp: int) -> Replica:
    """The replica with this tp, and as much dp as there are experts for."""
    spec, before = service.spec, quick.tp * quick.dp * quick.pp
    dp = next(dp for dp in (quick.dp, max(1, quick.tp * quick.dp // tp), 1) if degrees(spec, tp, dp))
    pp = before // (tp * dp) if quick.pp > 1 and before % (tp * dp) == 0 else quick.pp
    possible = degrees(spec, tp, dp)
    return service.like(quick, tp=tp, dp=dp, pp=pp, ep=quick.ep if quick.ep == 1 and 1 in possible else possible[-1])


def _what_pp_gives(service: Service, chosen: ServingOption) -> str:
    """What pp gives, and what it costs."""
    pp = chosen.pp if chosen.pp > 1 else 2
    if pp > service.spec.layers:
        return ""
    flat, deep = service.like(chosen, pp=1), service.like(chosen, pp=pp)
    short, long = (replica.step(1, service.context).total for replica in (flat, deep))
    fit, fits = (largest(replica, service.tokens, service.prompt) for replica in (flat, deep))
    weights, less = (memory_needed(replica, 1, service.tokens, service.prompt).weights for replica in (flat, deep))
    more = f"{fits:,} sequences instead of {fit:,}" if fit else f"{sequences(fits)}, where {flat.name} alone holds none"
    world = service.group.world
    remark = "" if deep.world <= world else f"; it takes {deep.world} GPUs, and the cluster has {world}"
    return (
        f"pp={pp} gives memory, not speed: a GPU holds {gigabytes(less)} of weights instead of {gigabytes(weights)}, "
        f"and a replica holds {more}; but a token still passes every layer, {milliseconds(long)} with the sends "
        f"instead of {milliseconds(short)}{remark}."
    )


def compute_bound_rows(replica: Replica) -> int | None:
    """Rows of a step from which the matmuls wait for the tensor cores rather than for the weights."""

    def waits(rows: int) -> bool:
        parts = replica.rows(rows)
        return parts.compute > parts.weights

    rows = next((1 << power for power in range(14) if waits(1 << power)), None)
    return rows and bisect_left(range(rows), True, lo=rows // 2 + 1, key=waits)


def _compute_bound_at(service: Service, heavy: ServingOption) -> str:
    replica = service.like(heavy)
    rows = compute_bound_rows(replica)
    if rows is None:
        return ""
    most = largest(replica, service.tokens, service.prompt)
    turn = rows * replica.pp * replica.dp
    about = sequences(int(float(f"{turn:.2g}")))  # tiles make the third digit look more certain than it is
    reach = "more than" if turn > most else "fewer than"
    share = heavy.parts.cache / heavy.step
    cache = f"; reading the cache is {share:.0%} of that step, and grows with every sequence" if share > 0.05 else ""
    return (
        f"At {heavy.layout} the matmuls turn from memory-bound to compute-bound at about {about} per "
        f"replica, {reach} the {most:,} that fit{cache}."
    )


def _copies_sentence(service: Service, widest: ServingOption) -> str:
    kv = service.spec.kv_heads
    if widest.tp <= kv or service.spec.mla:
        return ""
    times = widest.tp // kv
    return f"tp={widest.tp} is more than the {kv} kv heads: each is held {times} times, and the cache with it."


def _graphs_sentence(service: Service, quick: ServingOption) -> str:
    other = replace(service.like(quick), graphs=not service.graphs)
    took = milliseconds(other.step(quick.batch, service.context).total)
    if service.graphs:
        return f"This is with CUDA graphs: if the host launches plain PyTorch instead, a step takes {took}."
    return f"This is without CUDA graphs; with them a step takes {took} instead of {milliseconds(quick.step)}."


def missed_targets(service: Service, options: list[ServingOption]) -> str:
    """The sentence for targets that no option meets, with the nearest option."""
    known = [("ttft", service.ttft, "to the first token"), ("token", service.tpot, "for each token after it")]
    targets = [(name, value, words) for name, value, words in known if value]
    near = min(options, key=lambda option: max(getattr(option, name) / value for name, value, _ in targets))
    asked_for = " and ".join(f"{milliseconds(value)} {words}" for _, value, words in targets)
    has = " and ".join(f"{milliseconds(getattr(near, name))} {words}" for name, _, words in targets)
    return (
        f"Nothing meets {asked_for}: the nearest is {near.layout} with {sequences(near.batch)} per replica, {has}; "
        f"most of its step is {BOUND_NAMES[near.bound]}."
    )


def unknown_blocks(spec: ModelSpec) -> list[str]:
    """A sentence if the model has blocks whose serving cost is not known: other than attention and an MLP."""
    if all(layer.attends and layer.mlp and not is_plugin(layer.mlp.name) for layer in spec.counted()):
        return []
    return [f"{spec.name} has layers that are not attention and an MLP, and only these can be planned for serving"]


def request_problems(service: Service) -> list[str]:
    """Everything that is wrong with the request, before any search."""
    spec, cluster = service.spec, service.cluster
    wrong = spec.problems() or unknown_blocks(spec)
    given = {name: value for name, value in vars(service).items() if value is not None}
    counts = [misfit(name, given.get(name), within(1, MAX_TOKENS)) for name in ("prompt", "output", "sequences")]
    targets = [misfit(name, given.get(name), within(1e-6, MAX_SECONDS)) for name in ("ttft", "tpot")]
    wrong += [Problem("option.range", sentence) for sentence in (*counts, *targets) if sentence]
    if service.precision not in ("bf16", "fp8"):
        wrong.append(f"precision={service.precision!r} of the weights must be 'bf16' or 'fp8'")
    elif len(cluster.groups) and getattr(service.group.accelerator.peak, service.precision) is None:
        wrong.append(f"{service.group.accelerator.name} has no {service.precision} matmuls; serve in bf16")
    if service.cache_bytes not in (1, 2):
        wrong.append(f"cache_bytes={service.cache_bytes} must be 2 (bf16) or 1 (fp8)")
    if not any(counts[:2]) and service.tokens > spec.context:
        left = spec.context - service.prompt
        hint = f"nearest: output={left}" if left > 0 else f"prompt and output share {spec.context:,}"
        wrong.append(
            f"prompt={service.prompt:,} and output={service.output:,} are {service.tokens:,} tokens, and the context "
            f"of {spec.name} is {spec.context:,}; {hint}"
        )
    if len(cluster.groups) > 1:
        each = " and ".join(f"'{group}'" for group in cluster.groups)
        wrong.append(
            f"{cluster} has mixed nodes, and a replica would wait for its slowest device; plan {each} separately"
        )
    return wrong


def smallest_replica(service: Service) -> Replica | None:
    """The smallest replica that holds the model and one sequence, on as many of these GPUs as it takes."""
    spec, gpus = service.spec, max(service.group.gpus, USUAL_NODE_GPUS)
    weights, space = whole_weights(spec, service.precision), memory_limit(service.device)
    sizes = [
        (tp * pp, -tp)
        for tp in range(1, gpus + 1)
        if gpus % tp == 0 and tp_fits(spec, tp) and degrees(spec, tp)
        for pp in range(1, spec.layers + 1)
        if (gpus % (tp * pp) == 0 or (tp * pp) % gpus == 0) and weights < tp * pp * space
    ]
    for world, minus in sorted(sizes):
        replica = service.replica(-minus, world // -minus, gpus, ep=degrees(spec, -minus)[-1])
        if largest(replica, service.tokens, service.prompt):
            return replica
    return None


def why_nothing_fits(service: Service) -> str:
    """The sentence for a cluster where not one sequence fits, with what is needed."""
    spec, accelerator = service.spec, service.group.accelerator
    weights, cache = whole_weights(spec, service.precision), whole_cache(spec, service.cache_bytes, service.tokens)
    remedy = f"no number of {accelerator.name} holds it in equal parts"
    if enough := smallest_replica(service):
        remedy = f"it takes {enough.world} {accelerator.name} ({enough.name})"
    smaller = replace(service, precision="fp8")
    if service.precision == "bf16" and accelerator.peak.fp8 and next(replicas(smaller), None):
        remedy += f", or fp8 weights ({gigabytes(whole_weights(spec, 'fp8'))}), which fit here"
    return (
        f"{spec.name} in {service.precision} fits nowhere on {service.cluster}: its weights are {gigabytes(weights)}, "
        f"the cache of one sequence of {service.tokens:,} tokens is {gigabytes(cache)}, and {service.group.world} x "
        f"{gigabytes(memory_limit(service.device))} is the limit of a plan; {remedy}"
    )


def why_too_many(service: Service) -> str:
    """The sentence for a model that fits, but not with so many sequences."""
    fitting = [(service.group.world // replica.world * most, replica) for replica, most in replicas(service)]
    most, best = max(fitting, key=lambda pair: pair[0])
    each = whole_cache(service.spec, service.cache_bytes, service.tokens)
    remedy = f"at most {most:,} fit, on {service.group.world // best.world} x {best.name}"
    if service.cache_bytes == 2:
        remedy += "; a cache in fp8 (1 byte) takes about twice as many"
    return (
        f"{service.sequences:,} sequences at once do not fit on {service.cluster}: each has {gigabytes(each)} of cache "
        f"at its end; {remedy}"
    )


def about_experts(service: Service, quick: ServingOption, heavy: ServingOption) -> Iterator[str]:
    """Sentences about experts and latents; none for a dense model without latents."""
    if service.spec.mla is not None:
        yield _latents_sentence(service, heavy)
    if service.spec.experts is None:
        return
    yield _touched_sentence(service, heavy)
    yield from _whole_experts(service, quick)
    for other in _neighbours(service, heavy):
        yield why_not(service, heavy, other)
    if heavy.ep > 1:
        yield _imbalance_sentence(service, heavy)


def _latents_sentence(service: Service, heavy: ServingOption) -> str:
    mla = service.spec.mla
    assert mla is not None
    each = whole_cache(service.spec, service.cache_bytes)
    sentence = (
        f"A token leaves {mla.kv_rank} + {mla.rope_dim} numbers a layer in the cache, {each:,.0f} bytes in all, from "
        f"which every head works: tp divides the heads and not these"
    )
    if heavy.tp > 1:
        return f"{sentence}, so tp={heavy.tp} holds them {heavy.tp} times."
    return f"{sentence}, so tp=2 would hold them twice."


def _touched_sentence(service: Service, heavy: ServingOption) -> str:
    experts = service.spec.experts
    assert experts is not None
    tokens = -(-heavy.batch // heavy.pp)
    k, count, most_on_one = experts.top_k, experts.count, most_touched(experts, heavy.ep, tokens)
    groups = f", at most {most_on_one:.1f} of the {count // heavy.ep} of a GPU" if heavy.ep > 1 else ""
    return (
        f"A token visits {k} of {count} experts of a layer; the {tokens:,} of a step at {heavy.layout} visit "
        f"{experts_touched(experts, tokens):.1f} of them, {count} x (1 - (1 - {k}/{count})^{tokens}), if all are "
        f"chosen equally often{groups}. Only these are read."
    )


def _whole_experts(service: Service, quick: ServingOption) -> Iterator[str]:
    """Why not to divide (or not to divide) experts over ranks, at the lowest latency."""
    degrees_of_ep = degrees(service.spec, quick.tp, quick.dp)
    if len(degrees_of_ep) < 2:
        return
    ep = degrees_of_ep[-1] if quick.ep == 1 else 1
    step = service.like(quick, ep=ep).step(quick.batch, service.context)
    reason = "GPUs without a chosen expert wait for those that read one" if quick.ep == 1 else "each has a part of all"
    yield (
        f"Why not ep={ep} at {sequences(quick.batch)}: {reason}, and a token takes {milliseconds(step.total)} instead "
        f"of {milliseconds(quick.step)}."
    )


def _neighbours(service: Service, chosen: ServingOption) -> Iterator[Replica]:
    """On the same GPUs: the next ep; half and twice the tp, or half the pp, with as much more or less dp. On others:
    half and twice the dp."""
    spec, world = service.spec, service.group.world
    degrees_of_ep = degrees(spec, chosen.tp, chosen.dp)
    at = degrees_of_ep.index(chosen.ep)
    for ep in (*degrees_of_ep[max(0, at - 1) : at], *degrees_of_ep[at + 1 : at + 2]):
        yield service.like(chosen, ep=ep)
    sizes = [
        (chosen.tp / 2, 2 * chosen.dp, chosen.pp),
        (2 * chosen.tp, chosen.dp / 2, chosen.pp),
        (chosen.tp, 2 * chosen.dp, chosen.pp / 2),
    ]
    sizes += [(chosen.tp, chosen.dp / 2, chosen.pp), (chosen.tp, 2 * chosen.dp, chosen.pp)]
    for tp, dp, pp in [tuple(map(int, size)) for size in sizes if all(float(part).is_integer() for part in size)]:
        if service.fits_heads(tp) and tp * dp * pp <= world and (possible := degrees(spec, tp, dp)):
            yield service.like(chosen, tp=tp, dp=dp, pp=pp, ep=possible[-1])


def why_not(service: Service, heavy: ServingOption, other: Replica) -> str:
    """Why another layout is not the one with the most tokens per second."""
    start = f"Why not {other.name}: "
    fastest = highest_throughput(service, other)
    if fastest is None:
        needs = memory_needed(other, 1, service.tokens, service.prompt)
        return (
            f"{start}one sequence needs {gigabytes(needs.total)} of a GPU, {gigabytes(needs.weights)} of it weights, "
            f"and {gigabytes(memory_limit(service.device))} is the limit."
        )
    replica = service.like(heavy)
    batch = max(1, heavy.batch * other.world // replica.world)  # as many for each GPU
    was, step = heavy.parts, other.step(batch, service.context)
    more = {name: getattr(step, name) - getattr(was, name) for name in step._fields}
    worst = max(more, key=lambda name: more[name])
    cause = f", {milliseconds(more[worst])} more of it {BOUND_NAMES[worst]}" if more[worst] > 0.02 * step.total else ""
    return (
        f"{start}it gives at most {rate(fastest.per_gpu)} tokens/s per GPU instead of {rate(heavy.per_gpu)}; a step of "
        f"{sequences(batch)} takes {milliseconds(step.total)} instead of {milliseconds(heavy.step)} "
        f"with {heavy.batch:,}{cause}."
    )


def _imbalance_sentence(service: Service, heavy: ServingOption) -> str:
    even = replace(service.like(heavy), imbalance=1.0).step(heavy.batch, service.context).total
    source = f" ({IMBALANCE_SOURCE})" if service.imbalance == IMBALANCE else ""
    less = imbalance_caveat(service.spec, heavy.ep, service.imbalance)
    source += f"; {less}" if less else ""
    return (
        f"The fullest of {heavy.ep} groups is taken to get {service.imbalance:g} times the mean{source}; with the same "
        f"load on all a step at {heavy.layout} would take {milliseconds(even)} instead of {milliseconds(heavy.step)}."
    )
