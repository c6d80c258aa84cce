"""The ways to serve a model on a cluster: tp inside the node, pp across nodes, replicas, and sequences in each.

A GPU holds weights, the cache of its sequences, a chunk of a prefill, and a margin.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from fivefold.hardware.cluster import Cluster, Group
from fivefold.layout.layout import tp_fits
from fivefold.layout.stages import Stage
from fivefold.plan.cost.footprint import CONTEXT, FRAGMENTATION, HEADROOM
from fivefold.plan.cost.kernels import Device
from fivefold.plan.serving.step import CHUNK, Parts, Replica
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block, head

MOST = 1 << 20  # sequences; nobody has more


class Held(NamedTuple):
    """Bytes of one GPU."""

    weights: float
    cache: float
    activations: float
    margin: float  # context, and holes between what is allocated; the cache is one pool and has none

    @property
    def total(self) -> float:
        return sum(self)


def held(replica: Replica, batch: int, tokens: int, prompt: int) -> Held:
    """On the stage that needs the most. Every sequence has the memory that it needs at its end."""
    spec, attention, down = replica.spec, replica.block.attention, replica.block.matmuls[-1]
    own = attention.width + 2 * attention.kv_width + 3 * down.inputs
    rows = max(min(CHUNK, prompt * batch), -(-batch // replica.pp))
    stream = 2.0 * rows * (3 * spec.hidden + own)  # stream, normed stream, sum; q k v; gate, up and their product
    logits = 6.0 * -(-batch // replica.pp) * spec.vocab  # in bf16 and float32
    found = []
    for stage in replica.stages:
        weights, activations = stage_weights(replica, stage), stream + logits * stage.last
        cache = batch * tokens * len(stage.layers) * replica.cache_read(1)
        found.append(Held(weights, cache, activations, CONTEXT + FRAGMENTATION * (weights + activations)))
    return max(found, key=lambda one: one.total)


def stage_weights(replica: Replica, stage: Stage) -> float:
    """Bytes of one tp rank."""
    spec, table = replica.spec, 2.0 * head(replica.spec, replica.tp).size
    rest = spec.block_parameter_count - block(spec).weights  # norms are whole on every rank; biases hardly count
    layer = linear_bytes(replica.precision) * replica.block.weights + 2 * rest
    tables = stage.first + stage.last - (stage.first and stage.last and spec.tied)
    learned = 2.0 * spec.context * spec.hidden * (stage.first and spec.positions == "learned")
    return len(stage.layers) * layer + tables * table + learned + 2.0 * spec.hidden * stage.last


def whole_weights(spec: ModelSpec, precision: str) -> float:
    """Bytes of the model, once."""
    linears = block(spec).weights * spec.layers
    return linear_bytes(precision) * linears + 2.0 * (spec.parameter_count - linears)


def whole_cache(spec: ModelSpec, cache_bytes: int) -> int:
    """Bytes that a token leaves in the cache, over all layers."""
    return spec.layers * block(spec).attention.cached * cache_bytes


def linear_bytes(precision: str) -> int:
    return 1 if precision == "fp8" else 2


def memory_limit(device: Device) -> float:
    """Bytes of a GPU that a plan may fill."""
    return HEADROOM * device.accelerator.memory


def largest(replica: Replica, tokens: int, prompt: int) -> int:
    """Sequences that a replica has memory for; 0 where not even one."""
    space = memory_limit(replica.device)

    def too_many(batch: int) -> bool:
        return held(replica, batch, tokens, prompt).total > space

    high = 1
    while high < MOST and not too_many(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2 + 1, key=too_many) - 1


DEEPER = 4  # times the least pp that fits: more stages only make room for sequences, and soon there is enough


@dataclass(frozen=True)
class Service:
    """A model to serve, on a cluster, for prompts and answers of one length."""

    spec: ModelSpec
    cluster: Cluster
    prompt: int = 1024  # tokens in
    output: int = 256  # tokens out
    sequences: int | None = None  # at once, on the whole cluster; None: several numbers are tried
    precision: str = "bf16"  # of the weights
    cache_bytes: int = 2
    ttft: float | None = None  # target: seconds to the first token, at most
    tpot: float | None = None  # target: seconds for each token after it, at most
    graphs: bool = True

    @property
    def tokens(self) -> int:
        """Length of a sequence at its end."""
        return self.prompt + self.output

    @property
    def context(self) -> float:
        """Length of a sequence in its mean step."""
        return self.prompt + self.output / 2

    @property
    def group(self) -> Group:
        return self.cluster.groups[0]

    @cached_property
    def device(self) -> Device:
        return Device.of(self.group.accelerator)

    def replica(self, tp: int, pp: int, gpus: int = 0) -> Replica:
        gpus = gpus or self.group.gpus
        return Replica(self.spec, self.device, gpus, tp, pp, self.precision, self.cache_bytes, self.graphs)

    def to_dict(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {"model": self.spec.name, "cluster": str(self.cluster)} | plain


@dataclass(frozen=True)
class ServingOption:
    """A layout with a number of sequences, and what it gives, in seconds, bytes and tokens per second."""

    layout: str  # of a replica
    tp: int
    pp: int
    replicas: int
    batch: int  # sequences of a replica
    sequences: int  # of all replicas
    idle: int  # GPUs without a replica
    crosses: bool  # tp leaves the node
    ttft: float  # of a prompt that finds no queue
    step: float  # a decode step by itself
    token: float  # from one token of a sequence to its next, with the prefills of the others
    tokens_per_second: float  # generated by the cluster
    per_gpu: float  # the same over all GPUs, idle ones too
    parts: Parts  # of the step
    held: Held  # of a GPU

    @property
    def bound(self) -> str:
        return self.parts.bound

    def meets(self, service: Service) -> bool:
        """Whether it meets the targets that there are."""
        return self.ttft <= (service.ttft or self.ttft) and self.token <= (service.tpot or self.token)

    def to_dict(self) -> dict[str, Any]:
        held = self.held._asdict() | {"total": self.held.total}
        nested: dict[str, Any] = {"bound": self.bound, "parts": self.parts._asdict(), "held": held}
        return {name: value for name, value in vars(self).items() if name not in nested} | nested


def evaluate(service: Service, replica: Replica, batch: int, replicas: int = 0) -> ServingOption:
    """Steady state: when a sequence ends, the next prompt takes its place.

    In the time of one sequence each other sequence of the replica has one prefill, which all of them wait for.
    """
    world = service.group.world
    replicas = replicas or world // replica.world
    sequences = min(service.sequences or batch * replicas, batch * replicas)
    parts, prefill = replica.step(batch, service.context), replica.prefill(service.prompt, batch)
    after = service.output - 1  # the first token is the prefill's
    token = parts.total + (batch - 1) * prefill.busy / after if after else parts.total
    rate = sequences * service.output / (batch * prefill.busy + after * parts.total)
    return ServingOption(
        layout=replica.name,
        tp=replica.tp,
        pp=replica.pp,
        replicas=replicas,
        batch=batch,
        sequences=sequences,
        idle=world - replicas * replica.world,
        crosses=replica.crosses,
        ttft=prefill.latency,
        step=parts.total,
        token=token,
        tokens_per_second=rate,
        per_gpu=rate / world,
        parts=parts,
        held=held(replica, batch, service.tokens, service.prompt),
    )


def replicas(service: Service) -> Iterator[tuple[Replica, int]]:
    """Every layout that fits on the cluster, and the most sequences that it takes.

    A replica fills a node, an equal part of it, or whole nodes: no two replicas share a link by accident.
    """
    spec, gpus, world = service.spec, service.group.gpus, service.group.world
    # As many devices as could hold the weights.
    fewest = whole_weights(spec, service.precision) / memory_limit(service.device)
    for tp in range(1, min(world, 2 * gpus, spec.heads) + 1):
        if not tp_fits(spec, tp) or not (gpus % tp == 0 or tp % gpus == 0):
            continue
        least = last = 0
        for pp in range(1, min(spec.layers, world // tp) + 1):
            if (gpus % (tp * pp) and (tp * pp) % gpus) or tp * pp <= fewest:
                continue
            # Beyond the least that fits: twice as deep, or such that no GPU is idle.
            if least and pp < 2 * last and world % (tp * pp):
                continue
            if least and pp > DEEPER * least:
                break
            replica = service.replica(tp, pp)
            if most := largest(replica, service.tokens, service.prompt):
                least, last = least or pp, pp
                yield replica, most


def options(service: Service) -> list[ServingOption]:
    """Every option that fits, with the sequences that are asked for, or with powers of two up to what memory takes."""
    return [option for replica, most in replicas(service) for option in _of_replica(service, replica, most)]


def _of_replica(service: Service, replica: Replica, most: int) -> list[ServingOption]:
    count = service.group.world // replica.world
    if service.sequences:
        batch = -(-service.sequences // count)
        batches = [batch] if batch <= most else []
    else:
        batches = sorted({1 << power for power in range(most.bit_length())} | {most} - {0})
    return [evaluate(service, replica, batch, min(count, service.sequences or count)) for batch in batches]


def fullest(service: Service, replica: Replica) -> ServingOption | None:
    """The option with the most tokens per second that a layout gives; None where it does not fit."""
    found = _of_replica(service, replica, largest(replica, service.tokens, service.prompt))
    return max(found, key=lambda one: one.tokens_per_second, default=None)


def frontier(found: list[ServingOption]) -> tuple[ServingOption, ...]:
    """The options that no other one beats in both latency and throughput, the fastest first."""
    kept: list[ServingOption] = []
    for option in sorted(found, key=lambda one: (one.token, -one.tokens_per_second)):
        if not kept or option.tokens_per_second > kept[-1].tokens_per_second:
            kept.append(option)
    return tuple(kept)
