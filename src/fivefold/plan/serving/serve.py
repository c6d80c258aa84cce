"""Planning for serving: how to spread a model that only answers, how fast each answer comes, and how many at once.

    plan = serve(preset("llama3-70b"), Cluster.parse("8xH100"), prompt=1024, output=256)
    plan.latency.token             # seconds for a token, at its fastest
    plan.throughput.per_gpu        # tokens a second, at its most
    plan.explanation               # why, in sentences

`serve_options.py` has the ways to do it, `serve_step.py` their time, `serve_memory.py` what they hold, `serve_words.py`
why, `serve_problems.py` why not, `serve_tables.py` all of it for a terminal.
"""

from dataclasses import dataclass
from typing import Any

from fivefold.hardware.cluster import Cluster, Group
from fivefold.plan.serving.options import Option, Service, frontier, options, replicas
from fivefold.plan.serving.problems import no_room, problems, too_many
from fivefold.plan.serving.sentences import explain, missed
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

__all__ = ["Option", "Service", "Serving", "serve"]


@dataclass(frozen=True)
class Serving:
    """The answer. tp stays inside the node, unless nothing fits so; `crossing` is what leaving it would give."""

    service: Service
    latency: Option  # the lowest time per token
    throughput: Option  # the most tokens a second
    meeting: tuple[Option, ...]  # the targets, most tokens a second first; empty without targets
    frontier: tuple[Option, ...]  # from the lowest latency to the highest throughput
    crossing: Option | None  # the lowest time per token with tp across nodes, where the cluster has room for that
    options: tuple[Option, ...]
    explanation: tuple[str, ...]

    @property
    def best(self) -> Option:
        """What to run: what meets the targets, or without any the most tokens a second."""
        return self.meeting[0] if self.meeting else self.throughput

    def to_dict(self) -> dict[str, Any]:
        return {
            "service": self.service.to_dict(),
            "latency": self.latency.to_dict(),
            "throughput": self.throughput.to_dict(),
            "meeting": [option.to_dict() for option in self.meeting],
            "frontier": [option.to_dict() for option in self.frontier],
            "crossing": self.crossing.to_dict() if self.crossing else None,
            "options": [option.to_dict() for option in self.options],
            "explanation": list(self.explanation),
        }


def serve(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    prompt: int = 1024,
    output: int = 256,
    sequences: int | None = None,
    precision: str = "bf16",
    cache_bytes: int = 2,
    ttft: float | None = None,
    tpot: float | None = None,
    graphs: bool = True,
) -> Serving:
    """Plan serving. `ttft` and `tpot` are targets in seconds: to the first token, and for each one after it."""
    service = Service(
        spec, _like(cluster), prompt, output, sequences, precision, cache_bytes, ttft=ttft, tpot=tpot, graphs=graphs
    )
    if found := problems(service):
        raise UserError(found)
    every = options(service)
    if not every:
        raise UserError(too_many(service) if next(replicas(service), None) else no_room(service))
    inside = [option for option in every if not option.crosses] or every
    quick = min(inside, key=lambda one: (one.token, one.tp * one.pp))
    heavy = max(inside, key=lambda one: (one.tokens_per_second, -one.token))
    wished = ttft is not None or tpot is not None
    meeting = (
        sorted((one for one in inside if one.meets(service)), key=lambda one: -one.tokens_per_second) if wished else []
    )
    sentences = explain(service, quick, heavy)
    if wished and not meeting:
        sentences = (missed(service, inside), *sentences)
    across = min((one for one in every if one.crosses), key=lambda one: one.token, default=None)
    return Serving(service, quick, heavy, tuple(meeting), frontier(inside), across, tuple(every), sentences)


def _like(cluster: Cluster) -> Cluster:
    """Groups of the same nodes as one."""
    first = cluster.groups[0]
    if any((group.gpus, group.accelerator) != (first.gpus, first.accelerator) for group in cluster.groups):
        return cluster
    return Cluster((Group(sum(group.nodes for group in cluster.groups), first.gpus, first.accelerator),))
