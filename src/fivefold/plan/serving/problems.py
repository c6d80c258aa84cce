"""Why a model cannot be served as asked, and what it would need: sentences with numbers."""

from dataclasses import replace

from fivefold.layout.layout import tp_fits
from fivefold.plan.serving.memory import largest, memory_limit, whole_cache, whole_weights
from fivefold.plan.serving.options import Service, replicas
from fivefold.plan.serving.sentences import NODE, gigabytes
from fivefold.plan.serving.step import Replica


def problems(service: Service) -> list[str]:
    """Everything that is wrong with the request, before any search."""
    spec, cluster = service.spec, service.cluster
    found = spec.problems()
    for name in ("prompt", "output", "sequences"):
        value = getattr(service, name)
        if value is not None and value < 1:
            found.append(f"{name}={value} must be at least 1")
    for name in ("ttft", "tpot"):
        value = getattr(service, name)
        if value is not None and not value > 0:
            found.append(f"the target {name}={value} must be more than 0 seconds")
    if service.precision not in ("bf16", "fp8"):
        found.append(f"precision={service.precision!r} of the weights must be 'bf16' or 'fp8'")
    elif len(cluster.groups) and getattr(service.group.accelerator.peak, service.precision) is None:
        found.append(f"{service.group.accelerator.name} has no {service.precision} matmuls; serve in bf16")
    if service.cache_bytes not in (1, 2):
        found.append(f"cache_bytes={service.cache_bytes} must be 2 (bf16) or 1 (fp8)")
    if service.tokens > spec.context:
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
        if gpus % tp == 0 and tp_fits(spec, tp)
        for pp in range(1, spec.layers + 1)
        if (gpus % (tp * pp) == 0 or (tp * pp) % gpus == 0) and weights < tp * pp * space
    ]
    for world, minus in sorted(sizes):
        replica = service.replica(-minus, world // -minus, gpus)
        if largest(replica, service.tokens, service.prompt):
            return replica
    return None


def no_room(service: Service) -> str:
    """For a cluster where not one sequence fits: what would be needed."""
    spec, accelerator = service.spec, service.group.accelerator
    weights, cache = whole_weights(spec, service.precision), whole_cache(spec, service.cache_bytes) * service.tokens
    enough = needed(service)
    if enough is None:
        remedy = f"no number of {accelerator.name} holds it in equal parts"
    else:
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
    each = whole_cache(service.spec, service.cache_bytes) * service.tokens
    remedy = f"at most {most:,} fit, on {service.group.world // best.world} x {best.name}"
    if service.cache_bytes == 2:
        remedy += "; a cache in fp8 (1 byte) takes about twice as many"
    return (
        f"{service.sequences:,} sequences at once do not fit on {service.cluster}: each has {gigabytes(each)} of cache "
        f"at its end; {remedy}"
    )
