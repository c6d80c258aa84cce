"""Why a plan for serving is what it is, or why a model cannot be served as asked: sentences with numbers."""

from bisect import bisect_left
from dataclasses import replace

from fivefold.layout.layout import tp_fits
from fivefold.plan.serving.expert_sentences import about_experts
from fivefold.plan.serving.memory import held, largest, memory_limit, whole_cache, whole_weights
from fivefold.plan.serving.mixture import degrees
from fivefold.plan.serving.options import Service, ServingOption, fullest, replicas
from fivefold.plan.serving.step import Replica
from fivefold.plan.serving.wording import BOUNDS, gigabytes, milliseconds, rate, sequences
from fivefold.support.ranges import TOKENS, misfit, within

NODE = 8  # GPUs of a usual node, where the given one is smaller


def explain(service: Service, quick: ServingOption, heavy: ServingOption) -> tuple[str, ...]:
    """Sentences about the option with the lowest latency and the one with the highest throughput."""
    sentences = [
        _bound(quick),
        _wider(service, quick, heavy),
        _deeper(service, quick if quick.pp > 1 or heavy.pp == 1 else heavy),
        _turn(service, heavy),
        _copies(service, max(quick, heavy, key=lambda one: one.tp)),
        *about_experts(service, quick, heavy),
        _graphs(service, quick),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _bound(quick: ServingOption) -> str:
    parts = sorted(quick.parts._asdict().items(), key=lambda item: -item[1])
    shares = [f"{BOUNDS[name]} {value / quick.step:.0%}" for name, value in parts if value > 0.05 * quick.step]
    return f"A step of {milliseconds(quick.step)} at {quick.layout} and {sequences(quick.batch)}: {', '.join(shares)}."


def _wider(service: Service, quick: ServingOption, heavy: ServingOption) -> str:
    """Why not more tp: on the same GPUs with less pp where that is possible, or else on more of them."""
    spec, gpus, world = service.spec, service.group.gpus, service.group.world
    more = [tp for tp in range(quick.tp + 1, max(8 * gpus, NODE) + 1) if tp_fits(spec, tp)]
    more = [tp for tp in more if (gpus % tp == 0 or tp % gpus == 0) and degrees(spec, tp)]
    if not more:
        return f"tp={quick.tp} is the most that {spec.heads} heads and {spec.kv_heads} kv heads allow here."
    wide, before = _widened(service, quick, more[0]), quick.tp * quick.dp * quick.pp
    tp = wide.tp
    step = wide.step(quick.batch, service.context)
    where = f"it leaves the node of {gpus}; " if wide.crosses else ""
    share, was = step.tp / step.total, quick.parts.tp / quick.step
    gain = quick.step / step.total
    verdict = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
    cost = "on the same GPUs" if wide.world == before else f"for {wide.world / before:.3g} times the GPUs"
    there = "" if wide.world <= world else f"; it takes {wide.world} GPUs, and the cluster has {world}"
    if not there and gain >= 1 and (full := fullest(service, wide)):
        less = rate(full.per_gpu), rate(heavy.per_gpu)
        there = f"; but it gives at most {less[0]} tokens/s per GPU instead of {less[1]}"
    named = f"tp={tp}" if wide.dp == quick.dp else wide.name
    return (
        f"Why not {named}: {where}all-reduces are {share:.0%} of its step instead of {was:.0%}, and a token takes "
        f"{milliseconds(step.total)} instead of {milliseconds(quick.step)}, {verdict} {cost}{there}."
    )


def _widened(service: Service, quick: ServingOption, tp: int) -> Replica:
    """With more tp, and as much dp as there are experts for."""
    spec, before = service.spec, quick.tp * quick.dp * quick.pp
    dp = next(dp for dp in (quick.dp, max(1, quick.tp * quick.dp // tp), 1) if degrees(spec, tp, dp))
    pp = before // (tp * dp) if quick.pp > 1 and before % (tp * dp) == 0 else quick.pp
    every = degrees(spec, tp, dp)
    return service.like(quick, tp=tp, dp=dp, pp=pp, ep=quick.ep if quick.ep == 1 and 1 in every else every[-1])


def _deeper(service: Service, chosen: ServingOption) -> str:
    """What pp gives, and what it costs."""
    pp = chosen.pp if chosen.pp > 1 else 2
    if pp > service.spec.layers:
        return ""
    flat, deep = service.like(chosen, pp=1), service.like(chosen, pp=pp)
    short, long = (one.step(1, service.context).total for one in (flat, deep))
    fit, fits = (largest(one, service.tokens, service.prompt) for one in (flat, deep))
    weights, less = (held(one, 1, service.tokens, service.prompt).weights for one in (flat, deep))
    more = f"{fits:,} sequences instead of {fit:,}" if fit else f"{sequences(fits)}, where {flat.name} alone holds none"
    world = service.group.world
    there = "" if deep.world <= world else f"; it takes {deep.world} GPUs, and the cluster has {world}"
    return (
        f"pp={pp} gives memory, not speed: a GPU holds {gigabytes(less)} of weights instead of {gigabytes(weights)}, "
        f"and a replica holds {more}; but a token still passes every layer, {milliseconds(long)} with the sends "
        f"instead of {milliseconds(short)}{there}."
    )


def turning(replica: Replica) -> int | None:
    """Rows of a step from which the matmuls wait for the tensor cores rather than for the weights."""

    def waits(rows: int) -> bool:
        parts = replica.rows(rows)
        return parts.compute > parts.weights

    rows = next((1 << power for power in range(14) if waits(1 << power)), None)
    return rows and bisect_left(range(rows), True, lo=rows // 2 + 1, key=waits)


def _turn(service: Service, heavy: ServingOption) -> str:
    replica = service.like(heavy)
    rows = turning(replica)
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


def _copies(service: Service, widest: ServingOption) -> str:
    kv = service.spec.kv_heads
    if widest.tp <= kv or service.spec.mla:
        return ""
    times = widest.tp // kv
    return f"tp={widest.tp} is more than the {kv} kv heads: each is held {times} times, and the cache with it."


def _graphs(service: Service, quick: ServingOption) -> str:
    other = replace(service.like(quick), graphs=not service.graphs)
    took = milliseconds(other.step(quick.batch, service.context).total)
    if service.graphs:
        return f"This is with CUDA graphs: if the host launches plain PyTorch instead, a step takes {took}."
    return f"This is without CUDA graphs; with them a step takes {took} instead of {milliseconds(quick.step)}."


def missed(service: Service, found: list[ServingOption]) -> str:
    """For targets that no option meets: the nearest option."""
    every = [("ttft", service.ttft, "to the first token"), ("token", service.tpot, "for each token after it")]
    targets = [(name, value, words) for name, value, words in every if value]
    near = min(found, key=lambda option: max(getattr(option, name) / value for name, value, _ in targets))
    wanted = " and ".join(f"{milliseconds(value)} {words}" for _, value, words in targets)
    has = " and ".join(f"{milliseconds(getattr(near, name))} {words}" for name, _, words in targets)
    return (
        f"Nothing meets {wanted}: the nearest is {near.layout} with {sequences(near.batch)} per replica, {has}; "
        f"most of its step is {BOUNDS[near.bound]}."
    )


def problems(service: Service) -> list[str]:
    """Everything that is wrong with the request, before any search."""
    spec, cluster = service.spec, service.cluster
    found = spec.problems()
    given = {name: value for name, value in vars(service).items() if value is not None}
    counts = [misfit(name, given.get(name), within(1, TOKENS)) for name in ("prompt", "output", "sequences")]
    targets = [name for name in ("ttft", "tpot") if not given.get(name, 1) > 0]
    found += filter(None, counts)
    found += [f"the target {name}={given[name]} must be more than 0 seconds" for name in targets]
    if service.precision not in ("bf16", "fp8"):
        found.append(f"precision={service.precision!r} of the weights must be 'bf16' or 'fp8'")
    elif len(cluster.groups) and getattr(service.group.accelerator.peak, service.precision) is None:
        found.append(f"{service.group.accelerator.name} has no {service.precision} matmuls; serve in bf16")
    if service.cache_bytes not in (1, 2):
        found.append(f"cache_bytes={service.cache_bytes} must be 2 (bf16) or 1 (fp8)")
    if not any(counts[:2]) and service.tokens > spec.context:
        left = spec.context - service.prompt
        hint = f"nearest: output={left}" if left > 0 else f"prompt and output share {spec.context:,}"
        found.append(
            f"prompt={service.prompt:,} and output={service.output:,} are {service.tokens:,} tokens, and the context "
            f"of {spec.name} is {spec.context:,}; {hint}"
        )
    if len(cluster.groups) > 1:
        each = " and ".join(f"'{group}'" for group in cluster.groups)
        found.append(
            f"{cluster} has mixed nodes, and a replica would wait for its slowest device; plan {each} separately"
        )
    return found


def needed(service: Service) -> Replica | None:
    """The smallest replica that holds the model and one sequence, on as many of these GPUs as it takes."""
    spec, gpus = service.spec, max(service.group.gpus, NODE)
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


def no_room(service: Service) -> str:
    """For a cluster where not one sequence fits: what would be needed."""
    spec, accelerator = service.spec, service.group.accelerator
    weights, cache = whole_weights(spec, service.precision), whole_cache(spec, service.cache_bytes, service.tokens)
    remedy = f"no number of {accelerator.name} holds it in equal parts"
    if enough := needed(service):
        remedy = f"it takes {enough.world} {accelerator.name} ({enough.name})"
    smaller = replace(service, precision="fp8")
    if service.precision == "bf16" and accelerator.peak.fp8 and next(replicas(smaller), None):
        remedy += f", or fp8 weights ({gigabytes(whole_weights(spec, 'fp8'))}), which fit here"
    return (
        f"{spec.name} in {service.precision} fits nowhere on {service.cluster}: its weights are {gigabytes(weights)}, "
        f"the cache of one sequence of {service.tokens:,} tokens is {gigabytes(cache)}, and {service.group.world} x "
        f"{gigabytes(memory_limit(service.device))} is the limit of a plan; {remedy}"
    )


def too_many(service: Service) -> str:
    """For a model that fits, but not with so many sequences."""
    found = [(service.group.world // one.world * most, one) for one, most in replicas(service)]
    most, best = max(found, key=lambda pair: pair[0])
    each = whole_cache(service.spec, service.cache_bytes, service.tokens)
    remedy = f"at most {most:,} fit, on {service.group.world // best.world} x {best.name}"
    if service.cache_bytes == 2:
        remedy += "; a cache in fp8 (1 byte) takes about twice as many"
    return (
        f"{service.sequences:,} sequences at once do not fit on {service.cluster}: each has {gigabytes(each)} of cache "
        f"at its end; {remedy}"
    )
