"""Why a plan for serving is what it is: sentences with numbers."""

from dataclasses import replace

from fivefold.layout.layout import tp_fits
from fivefold.plan.serving.memory import held, largest
from fivefold.plan.serving.options import Service, ServingOption, fullest
from fivefold.plan.serving.step import Replica

NODE = 8  # GPUs of a usual node, where the given one is smaller

BOUNDS = {
    "weights": "reading weights",
    "cache": "reading the KV cache",
    "compute": "tensor cores",
    "pointwise": "norms, activation functions and logits",
    "launch": "kernel launches",
    "tp": "all-reduces",
    "pp": "pipeline sends and waits",
    "host": "host",
}


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f} GB"


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def explain(service: Service, quick: ServingOption, heavy: ServingOption) -> tuple[str, ...]:
    """Sentences about the option with the lowest latency and the one with the highest throughput."""
    sentences = [
        _bound(quick),
        _wider(service, quick, heavy),
        _deeper(service, quick if quick.pp > 1 or heavy.pp == 1 else heavy),
        _turn(service, heavy),
        _copies(service, max(quick, heavy, key=lambda one: one.tp)),
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
    more = [tp for tp in more if gpus % tp == 0 or tp % gpus == 0]
    if not more:
        return f"tp={quick.tp} is the most that {spec.heads} heads and {spec.kv_heads} kv heads allow here."
    tp, before = more[0], quick.tp * quick.pp
    pp = before // tp if quick.pp > 1 and before % tp == 0 else quick.pp
    wide = service.replica(tp, pp)
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
    return (
        f"Why not tp={tp}: {where}all-reduces are {share:.0%} of its step instead of {was:.0%}, and a token takes "
        f"{milliseconds(step.total)} instead of {milliseconds(quick.step)}, {verdict} {cost}{there}."
    )


def _deeper(service: Service, chosen: ServingOption) -> str:
    """What pp gives, and what it costs."""
    tp = chosen.tp
    pp = chosen.pp if chosen.pp > 1 else 2
    if pp > service.spec.layers:
        return ""
    flat, deep = service.replica(tp, 1), service.replica(tp, pp)
    short, long = (one.step(1, service.context).total for one in (flat, deep))
    fit, fits = (largest(one, service.tokens, service.prompt) for one in (flat, deep))
    weights, less = (held(one, 1, service.tokens, service.prompt).weights for one in (flat, deep))
    more = f"{fits:,} sequences instead of {fit:,}" if fit else f"{sequences(fits)}, where tp={tp} alone holds none"
    world = service.group.world
    there = "" if deep.world <= world else f"; it takes {deep.world} GPUs, and the cluster has {world}"
    return (
        f"pp={pp} gives memory, not speed: a GPU holds {gigabytes(less)} of weights instead of {gigabytes(weights)}, "
        f"and a replica holds {more}; but a token still passes every layer, {milliseconds(long)} with the sends "
        f"instead of {milliseconds(short)}{there}."
    )


def turning(replica: Replica) -> int | None:
    """Rows of a step from which the matmuls wait for the tensor cores rather than for the weights."""
    rows = 1
    while rows <= 8192:
        parts = replica.rows(rows)
        if parts.compute > parts.weights:
            break
        rows *= 2
    else:
        return None
    low, high = rows // 2, rows
    while high - low > 1:
        middle = (low + high) // 2
        parts = replica.rows(middle)
        low, high = (low, middle) if parts.compute > parts.weights else (middle, high)
    return high


def _turn(service: Service, heavy: ServingOption) -> str:
    replica = service.replica(heavy.tp, heavy.pp)
    rows = turning(replica)
    if rows is None:
        return ""
    most = largest(replica, service.tokens, service.prompt)
    turn = rows * replica.pp
    reach = "more than" if turn > most else "fewer than"
    share = heavy.parts.cache / heavy.step
    cache = f"; reading the cache is {share:.0%} of that step, and grows with every sequence" if share > 0.05 else ""
    return (
        f"At {heavy.layout} the matmuls turn from memory-bound to compute-bound at about {_about(turn)} per "
        f"replica, {reach} the {most:,} that fit{cache}."
    )


def _about(count: int) -> str:
    """Two digits: tiles make the third one look more certain than it is."""
    return sequences(int(float(f"{count:.2g}")))


def _copies(service: Service, widest: ServingOption) -> str:
    kv = service.spec.kv_heads
    if widest.tp <= kv:
        return ""
    return (
        f"tp={widest.tp} is more than the {kv} kv heads: each is held {widest.tp // kv} times, and the cache with it."
    )


def _graphs(service: Service, quick: ServingOption) -> str:
    other = replace(service.replica(quick.tp, quick.pp), graphs=not service.graphs)
    step = other.step(quick.batch, service.context).total
    took = milliseconds(step)
    if service.graphs:
        return f"This is with CUDA graphs: if the host launches plain PyTorch instead, a step takes {took}."
    return f"This is without CUDA graphs; with them a step takes {took} instead of {milliseconds(quick.step)}."


def missed(service: Service, found: list[ServingOption]) -> str:
    """For targets that no option meets: the nearest option."""
    targets = [("ttft", service.ttft), ("token", service.tpot)]

    def excess(option: ServingOption) -> float:
        return max(getattr(option, name) / wanted for name, wanted in targets if wanted)

    near = min(found, key=excess)
    names = {"ttft": "to the first token", "token": "for each token after it"}
    wanted = " and ".join(f"{milliseconds(value)} {names[name]}" for name, value in targets if value)
    has = " and ".join(f"{milliseconds(getattr(near, name))} {names[name]}" for name, value in targets if value)
    return (
        f"Nothing meets {wanted}: the nearest is {near.layout} with {sequences(near.batch)} per replica, {has}; "
        f"most of its step is {BOUNDS[near.bound]}."
    )


def sequences(count: int) -> str:
    return f"{count:,} sequence{'s' * (count != 1)}"
