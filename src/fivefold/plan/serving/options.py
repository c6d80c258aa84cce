"""The ways to serve a model on a cluster: tp inside the node, pp across, replicas of that, and sequences in each.

options(Service(spec, cluster, prompt=1024, output=256))       # every one that fits, with what it gives
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.hardware.cluster import Cluster, Group
from fivefold.plan.cost.kernels import Device
from fivefold.plan.serving.memory import Held, held, largest, room, whole_weights
from fivefold.plan.serving.step import Parts, Replica, legal_tp
from fivefold.spec.model import ModelSpec

DEEPER = 4  # times the least pp that fits: more stages only make room, and soon there is enough


@dataclass(frozen=True)
class Service:
    """What is to be served, and on what."""

    spec: ModelSpec
    cluster: Cluster
    prompt: int = 1024  # tokens in
    output: int = 256  # tokens out
    sequences: int | None = None  # at once, on the whole cluster; None: as many as are best
    precision: str = "bf16"  # of the weights
    cache_bytes: int = 2
    ttft: float | None = None  # wanted at most: seconds to the first token
    tpot: float | None = None  # and for each one after it
    graphs: bool = True

    @property
    def tokens(self) -> int:
        """Of a sequence at its end."""
        return self.prompt + self.output

    @property
    def context(self) -> float:
        """Tokens behind a sequence in its mean step."""
        return self.prompt + self.output / 2

    @property
    def group(self) -> Group:
        return self.cluster.groups[0]

    @cached_property
    def device(self) -> Device:
        return Device.of(self.group.accelerator)

    def replica(self, tp: int, pp: int, gpus: int | None = None) -> Replica:
        gpus = gpus or self.group.gpus
        return Replica(self.spec, self.device, gpus, tp, pp, self.precision, self.cache_bytes, self.graphs)

    def to_dict(self) -> dict[str, Any]:
        plain = ("prompt", "output", "sequences", "precision", "cache_bytes", "ttft", "tpot", "graphs")
        return {"model": self.spec.name, "cluster": str(self.cluster)} | {key: getattr(self, key) for key in plain}


@dataclass(frozen=True)
class Option:
    """A layout with so many sequences, and what it gives. Seconds, bytes, tokens a second."""

    layout: str  # of a replica
    tp: int
    pp: int
    replicas: int
    batch: int  # sequences of a replica
    sequences: int  # of all
    idle: int  # GPUs that no replica has
    crosses: bool  # tp leaves the node
    ttft: float  # of a prompt that finds no queue
    step: float  # a decode step by itself
    token: float  # from one token of a sequence to its next, the prefills of the others counted in
    tokens_per_second: float  # out, of the cluster
    per_gpu: float  # likewise, over all GPUs, idle ones too
    parts: Parts  # of the step
    held: Held  # of a GPU

    @property
    def bound(self) -> str:
        return self.parts.bound

    def meets(self, service: Service) -> bool:
        """The targets, as far as there are any."""
        return self.ttft <= (service.ttft or self.ttft) and self.token <= (service.tpot or self.token)

    def to_dict(self) -> dict[str, Any]:
        plain = [name for name in self.__dataclass_fields__ if name not in ("parts", "held")]
        nested = {"bound": self.bound, "parts": self.parts._asdict(), "held": self.held.to_dict()}
        return {name: getattr(self, name) for name in plain} | nested


def evaluate(service: Service, replica: Replica, batch: int, replicas: int = 0) -> Option:
    """Steady state: whenever a sequence ends, the next prompt takes its place.

    In the time of one sequence every other place of the replica has one prefill, which all of them wait for.
    """
    world = service.group.world
    replicas = replicas or world // replica.world
    sequences = min(service.sequences or batch * replicas, batch * replicas)
    parts = replica.step(batch, service.context)
    prefill = replica.prefill(service.prompt, batch)
    after = service.output - 1  # the first token is the prefill's
    token = parts.total + (batch - 1) * prefill.busy / after if after else parts.total
    rate = sequences * service.output / (batch * prefill.busy + after * parts.total)
    return Option(
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
    """Every layout that the cluster has GPUs for and that fits, and the most sequences that it takes.

    A replica fills a node, or an equal part of it, or whole nodes: no two replicas share a link by accident.
    """
    gpus, world = service.group.gpus, service.group.world
    for tp in range(1, min(world, 2 * gpus, service.spec.heads) + 1):
        if not legal_tp(service.spec, tp) or not (gpus % tp == 0 or tp % gpus == 0):
            continue
        least = last = 0
        for pp in _depths(service, tp):
            # Beyond the least that fits: twice as deep, or such that no GPU is idle.
            if least and pp < 2 * last and world % (tp * pp):
                continue
            if least and pp > DEEPER * least:
                break
            replica = service.replica(tp, pp)
            if most := largest(replica, service.tokens, service.prompt):
                least, last = least or pp, pp
                yield replica, most


def _depths(service: Service, tp: int) -> Iterator[int]:
    """Pipeline ranks that make whole replicas, and among which the weights alone would fit."""
    spec, gpus = service.spec, service.group.gpus
    weights = whole_weights(spec, service.precision)
    for pp in range(1, min(spec.layers, service.group.world // tp) + 1):
        if (gpus % (tp * pp) == 0 or (tp * pp) % gpus == 0) and weights < tp * pp * room(service.device):
            yield pp


def options(service: Service) -> list[Option]:
    """All that fit, with the sequences that are asked for, or powers of two of them up to what memory takes."""
    return [option for replica, most in replicas(service) for option in _of_replica(service, replica, most)]


def _of_replica(service: Service, replica: Replica, most: int) -> list[Option]:
    count = service.group.world // replica.world
    if service.sequences:
        batch = -(-service.sequences // count)
        batches = [batch] if batch <= most else []
    else:
        batches = sorted({1 << power for power in range(most.bit_length())} | {most} - {0})
    return [evaluate(service, replica, batch, min(count, service.sequences or count)) for batch in batches]


def fullest(service: Service, replica: Replica) -> Option | None:
    """The most tokens a second that a layout gives, where it fits."""
    found = _of_replica(service, replica, largest(replica, service.tokens, service.prompt))
    return max(found, key=lambda one: one.tokens_per_second, default=None)


def frontier(found: list[Option]) -> tuple[Option, ...]:
    """Those that no other one beats in both latency and throughput, the fastest first."""
    kept: list[Option] = []
    for option in sorted(found, key=lambda one: (one.token, -one.tokens_per_second)):
        if not kept or option.tokens_per_second > kept[-1].tokens_per_second:
            kept.append(option)
    return tuple(kept)
