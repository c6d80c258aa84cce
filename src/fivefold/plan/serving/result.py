"""A plan for serving: tables and sentences for people, the same figures as JSON."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.plan.serving.options import Service, ServingOption
from fivefold.plan.serving.sentences import BOUNDS, milliseconds, rate
from fivefold.report import Block, Result, Table, Text

MOST = 12  # rows of the frontier
CACHES = {1: "fp8", 2: "bf16"}


@dataclass(frozen=True)
class ServePlan(Result):
    """How to serve a model. `crossing` is what tp across nodes would give; the other options keep it inside."""

    service: Service
    latency: ServingOption  # the lowest per token
    throughput: ServingOption  # the most tokens per second
    meeting: tuple[ServingOption, ...]  # those that meet the targets, most tokens per second first; empty without any
    frontier: tuple[ServingOption, ...]  # from the lowest latency to the highest throughput
    crossing: ServingOption | None  # the lowest per token with tp across nodes, where the cluster is that large
    options: tuple[ServingOption, ...]
    explanation: tuple[str, ...]

    @property
    def best(self) -> ServingOption:
        """What to run: the best that meets the targets, or without targets the most tokens per second."""
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

    def blocks(self) -> Iterator[Block]:
        service = self.service
        yield Text(
            f"{service.spec.name} on {service.cluster}: prompts of {service.prompt:,} tokens, answers of "
            f"{service.output:,}, weights in {service.precision}, cache in {CACHES[service.cache_bytes]}",
            "bold",
        )
        yield self._choices()
        if len(self.frontier) > 1:
            rows = [_row(option) for option in self._thinned()]
            yield Table(HEADS, rows, title="From low latency to high throughput", caption=SEQUENCES)
        yield self._parts()
        for sentence in self.explanation:
            yield Text(f"\n{sentence}")

    def _choices(self) -> Table:
        """A column for each choice."""
        named = {
            "meets the targets": self.meeting[0] if self.meeting else None,
            "lowest latency": self.latency,
            "highest throughput": self.throughput,
            "tp across nodes": self.crossing,
        }
        chosen = {name: option for name, option in named.items() if option}
        rows = [[what, *(show(option) for option in chosen.values())] for what, show in FIGURES.items()]
        return Table(["", *(f">~{name}" for name in chosen)], rows)

    def _thinned(self) -> list[ServingOption]:
        """The frontier, in evenly spaced rows where it is long."""
        every = self.frontier
        if len(every) <= MOST:
            return list(every)
        return [every[round(at * (len(every) - 1) / (MOST - 1))] for at in range(MOST)]

    def _parts(self) -> Table:
        chosen = (self.latency, self.throughput)
        rows = [
            [words, *(cell for one in chosen for cell in _share(getattr(one.parts, field), one.step))]
            for field, words in BOUNDS.items()
            if any(getattr(one.parts, field) > 0 for one in chosen)
        ]
        return Table(
            ["cause", ">lowest latency", ">share", ">highest throughput", ">share"],
            rows,
            title="Where a step's time goes",
            totals=[("a step", milliseconds(self.latency.step), "", milliseconds(self.throughput.step))],
        )


def _sequences(one: ServingOption) -> str:
    return f"{one.replicas} x {one.batch:,}" if one.replicas > 1 else f"{one.batch:,}"


FIGURES: dict[str, Callable[[ServingOption], str]] = {
    "layout": lambda one: one.layout,
    "replicas": lambda one: str(one.replicas),
    "sequences each": lambda one: f"{one.batch:,}",
    "to first token": lambda one: milliseconds(one.ttft),
    "per token": lambda one: milliseconds(one.token),
    "tokens/s": lambda one: rate(one.tokens_per_second),
    "tokens/s per GPU": lambda one: rate(one.per_gpu),
    "KV cache per GPU": lambda one: f"{one.held.cache / 1e9:.1f} GB",
    "memory per GPU": lambda one: f"{one.held.total / 1e9:.1f} GB",
    "bound by": lambda one: BOUNDS[one.bound],
}
HEADS = ("layout", ">sequences", ">first token", ">per token", ">tokens/s", ">per GPU", ">cache GB", "~bound by")
SEQUENCES = "sequences: replicas x sequences of each"


def _row(one: ServingOption) -> list[str]:
    rates = rate(one.tokens_per_second), rate(one.per_gpu)
    times = milliseconds(one.ttft), milliseconds(one.token)
    return [one.layout, _sequences(one), *times, *rates, f"{one.held.cache / 1e9:.1f}", BOUNDS[one.bound]]


def _share(value: float, step: float) -> tuple[str, str]:
    return milliseconds(value), f"{value / step:.0%}"
