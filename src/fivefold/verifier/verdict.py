"""The measurements of the ranks of one layout, and the verdict on them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.cost.collective_time import Traffic
from fivefold.job.config import Job
from fivefold.layout.axes import shown_order
from fivefold.verifier.compare import (
    ValueComparison,
    mismatch_tolerance,
    replays_routing,
    tolerance_of,
    worst_comparison,
)

_DENSE_QUANTITIES = ("loss", "norm", "gradient", "parameter")
_MOE_QUANTITIES = ("routing", "load", "bias")


@dataclass(frozen=True)
class RoutedLayer:
    """The tokens that one rank routed in one layer, in one step."""

    step: int  # from 1
    name: str  # of the router
    visits: NDArray[np.int64]  # [B, S] how often it routed each token
    mismatched: int  # tokens for which its scores chose other experts than one process did
    first_sample: int  # the number of the batch's first sample
    note: str = ""  # a sentence on the first mismatched token: both choices


class ReplayedRouting(NamedTuple):
    """Token counts of all layers and steps, where tokens went to the experts of the reference."""

    tokens: int
    mismatched: int  # those that the layout's own scores would have sent to other experts


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank. Pairs are (the layout's, the reference's), one for each step."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    comparisons: list[ValueComparison] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)  # of all steps
    digests: dict[str, str] = field(default_factory=dict)  # of the parameters after the last step
    graphs: list[tuple[int, dict[str, int]]] = field(default_factory=list)  # of `compilation()`; empty: not compiled
    memory: dict[str, float] = field(default_factory=dict)  # bytes by component, microbatches in flight, FLOPs
    routed: list[RoutedLayer] = field(default_factory=list)
    # By router, the most mismatched tokens in a step between the reference's own runs, which differ by rounding.
    reference_mismatches: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TrafficCheck:
    """The bytes that a rank sent in all steps along one axis, by one kind of collective: counted, and by formula."""

    rank: int  # the first that differs, or 0
    expected: Traffic
    counted: Traffic

    @property
    def passed(self) -> bool:
        return self.expected == self.counted

    def to_dict(self, steps: int) -> dict[str, Any]:
        """The average of one of the `steps`."""

        def numbers(row: Traffic) -> dict[str, float]:
            values = {name: float(getattr(row, name)) / steps for name in ("calls", "payload", "wire")}
            return {name: int(value) if value == int(value) else value for name, value in values.items()}

        both = {"counted": numbers(self.counted), "expected": numbers(self.expected)}
        return {"axis": self.counted.axis, "kind": self.counted.kind, **both, "holds": self.passed}

    def __str__(self) -> str:
        expected, counted = self.expected, self.counted
        sizes = [f"{row.payload} bytes, {float(row.wire):.0f} of them for others" for row in (counted, expected)]
        return (
            f"rank {self.rank} made {counted.calls} {counted.kind} calls over {counted.axis} with {sizes[0]}, "
            f"in all steps, and the closed form has {expected.calls} with {sizes[1]}"
        )


@dataclass(frozen=True)
class MemoryCheck:
    """The size of one part of a rank's memory: counted, and by formula."""

    rank: int  # the first that differs, or 0
    name: str  # "parameters", "gradients", "optimizer": bytes; "microbatches in flight"
    expected: float
    counted: float

    @property
    def passed(self) -> bool:
        return self.expected == self.counted

    def __str__(self) -> str:
        unit = self.name if self.name == "microbatches in flight" else f"bytes of {self.name}"
        return f"rank {self.rank} holds {self.counted:.0f} {unit}, and the closed form has {self.expected:.0f}"


CheckT = TypeVar("CheckT", TrafficCheck, MemoryCheck)


@dataclass(frozen=True)
class Verdict:
    """The comparison of one layout with one process, over all its ranks."""

    job: Job
    seconds: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    comparisons: list[ValueComparison] = field(default_factory=list)  # of each the worst over ranks
    traffic: list[TrafficCheck] = field(default_factory=list)
    diverged_replicas: list[str] = field(default_factory=list)  # a sentence for each parameter whose replicas differ
    memory: list[MemoryCheck] = field(default_factory=list)
    peak: float = 0.0  # bytes in the first step, of the rank that holds most
    flops: float = 0.0  # of all ranks, in the first step
    graphs: tuple[int, dict[str, int]] | None = None  # `compilation()` of the first rank, where blocks are compiled
    replayed: ReplayedRouting | None = None  # None: no experts, or ranks routed by their own scores
    broken: str = ""  # why there is nothing to compare: a rank died, hung or raised
    details: str = ""  # that rank's stack trace

    @classmethod
    def of(
        cls,
        job: Job,
        measured: list[RankMeasurement],
        expected_traffic: list[list[Traffic]],
        expected_memory: list[dict[str, float]],
        seconds: float,
    ) -> "Verdict":
        """The verdict on the measurements of all ranks. What is expected of each rank is of all steps."""
        return cls(
            job,
            seconds,
            losses=measured[0].losses,
            norms=measured[0].norms,
            comparisons=[
                *_worst_over_ranks(job, measured),
                *_routing_comparisons(job, measured),
                *_not_routed_once(measured),
            ],
            traffic=_traffic_checks(measured, expected_traffic),
            diverged_replicas=_diverged_replicas(measured),
            memory=_first_failing(
                (name, MemoryCheck(number, name, size, rank.memory[name]))
                for number, (rank, sizes) in enumerate(zip(measured, expected_memory, strict=True))
                for name, size in sizes.items()
            ),
            peak=max(rank.memory["peak"] for rank in measured),
            flops=sum(rank.memory["flops"] for rank in measured),
            graphs=measured[0].graphs[0] if measured[0].graphs else None,
            replayed=_replayed_routing(job, measured),
        )

    def worst(self, quantity: str) -> ValueComparison | None:
        return worst_comparison(comparison for comparison in self.comparisons if comparison.quantity == quantity)

    @property
    def problems(self) -> list[str]:
        """A sentence on each failure: the worst comparison of each quantity, replicas that differ, traffic, memory."""
        if self.broken:
            return [self.broken]
        failed = [comparison for comparison in self.comparisons if not comparison.passed]
        worst = [
            worst_comparison(comparison for comparison in failed if comparison.quantity == quantity)
            for quantity in (*_DENSE_QUANTITIES, *_MOE_QUANTITIES)
        ]
        problems = [str(comparison) for comparison in worst if comparison is not None]
        if len(failed) > len(problems):
            problems.append(f"{len(failed) - len(problems)} more comparisons fail")
        problems += self.diverged_replicas[:1]
        if len(self.diverged_replicas) > 1:
            problems.append(f"{len(self.diverged_replicas) - 1} more parameters differ so")
        problems += [str(check) for check in self.traffic if not check.passed]
        problems += [str(check) for check in self.memory if not check.passed]
        return problems

    @property
    def quantities(self) -> tuple[str, ...]:
        return _DENSE_QUANTITIES + (() if self.job.model.experts is None else _MOE_QUANTITIES)

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and not self.problems

    def to_dict(self) -> dict[str, Any]:
        job = self.job
        return {
            "layout": str(job.layout),
            "model": job.model.name,
            "variant": "",
            "dtype": job.train.dtype,
            "passed": self.passed,
            "problems": self.problems,
            "details": self.details,
            "bound": tolerance_of(job),
            "losses": [{"layout": _finite(actual), "reference": _finite(expected)} for actual, expected in self.losses],
            "norms": [{"layout": _finite(actual), "reference": _finite(expected)} for actual, expected in self.norms],
            **{f"worst_{quantity}": _comparison_dict(self.worst(quantity)) for quantity in self.quantities},
            "routing_replayed": self.replayed is not None,
            "traffic_per_step": [check.to_dict(job.train.steps) for check in in_axis_order(self.traffic)],
            "held": [asdict(check) | {"holds": check.passed} for check in self.memory],
            "peak_bytes": self.peak,
            "flops": self.flops,
            "graphs": None if self.graphs is None else self.graphs[0],
            "graph_breaks": None if self.graphs is None else self.graphs[1],
            "seconds": round(self.seconds, 3),
        }


def in_axis_order(checks: Sequence[TrafficCheck]) -> list[TrafficCheck]:
    return sorted(checks, key=lambda check: (shown_order(check.counted.axis), check.counted.kind))


def _comparison_dict(comparison: ValueComparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "name": comparison.name,
        "step": comparison.step,
        "error": _finite(comparison.error),
        "note": comparison.note,
        "holds": comparison.passed,
    }


def _finite(number: float) -> float | None:
    """The number, or None where JSON has none: for infinity and NaN."""
    return number if math.isfinite(number) else None


def _worst_over_ranks(job: Job, measured: list[RankMeasurement]) -> list[ValueComparison]:
    """The worst of each comparison over ranks; a parameter or load that no rank compared fails."""
    worst: dict[tuple[str, str, int], ValueComparison] = {}
    for comparison in (comparison for rank in measured for comparison in rank.comparisons):
        key = comparison.quantity, comparison.name, comparison.step
        worst[key] = max(
            worst.get(key, comparison), comparison, key=lambda c: math.inf if math.isnan(c.error) else c.error
        )
    last, tolerance = job.train.steps, tolerance_of(job)
    steps, names = range(1, last + 1), [parameter.name for parameter in job.model.parameters()]
    required = [("gradient", name, step) for name in names for step in steps]
    required += [("parameter", name, last) for name in names]
    required += [("bias", name, step) for name in job.model.buffers() for step in steps]
    required += [("load", name, step) for name in _router_names(job) for step in steps]
    for key in required:
        note = f"is {'counted' if key[0] == 'load' else 'held'} by no rank"
        worst.setdefault(key, ValueComparison(*key, math.inf, tolerance, note))
    return list(worst.values())


def _router_names(job: Job) -> list[str]:
    spec = job.model
    return [spec.router(layer) for layer in spec.routed_layers]


def _routing_comparisons(job: Job, measured: list[RankMeasurement]) -> list[ValueComparison]:
    """Compares where the tokens of each layer and step went, over all ranks, or under replay would have gone.

    The error is the number of mismatched tokens; a router that no rank has seen fails.
    """
    comparisons = []
    for name, step in product(_router_names(job), range(1, job.train.steps + 1)):
        layers = [layer for layer in _routed_layers(measured) if (layer.name, layer.step) == (name, step)]
        mismatched = sum(layer.mismatched for layer in layers)
        tolerance = mismatch_tolerance(job, measured[0].reference_mismatches.get(name, 0))
        if layers:
            note = next((layer.note for layer in layers if layer.note), "")
            note += f"; {mismatched - 1} more tokens differ" if mismatched > 1 else ""
            note += f", and rounding explains {tolerance:.0f}" if tolerance and note else ""
            comparisons.append(ValueComparison("routing", name, step, float(mismatched), tolerance, note))
        else:
            comparisons.append(ValueComparison("routing", name, step, math.inf, tolerance, "was seen by no rank"))
    return comparisons


def _routed_layers(measured: list[RankMeasurement]) -> list[RoutedLayer]:
    return [layer for rank in measured for layer in rank.routed]


def _not_routed_once(measured: list[RankMeasurement]) -> list[ValueComparison]:
    """A failed comparison for each layer and step in which a token was not routed exactly once, over all ranks."""
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    first_samples: dict[int, int] = {}  # by step
    for layer in _routed_layers(measured):
        sums[layer.step, layer.name] = sums.get((layer.step, layer.name), 0) + layer.visits
        first_samples[layer.step] = layer.first_sample
    comparisons = []
    for (step, name), visits in sums.items():
        if (wrong := np.argwhere(visits != 1)).size:
            row, position = wrong[0].tolist()
            by = f"by {visits[row, position]} ranks" if visits[row, position] else "by no rank"
            note = f"has sample {first_samples[step] + row}, position {position} routed {by}"
            comparisons.append(ValueComparison("routing", name, step, float(len(wrong)), 0.0, note))
    return comparisons


def _replayed_routing(job: Job, measured: list[RankMeasurement]) -> ReplayedRouting | None:
    if job.model.experts is None or not replays_routing(job):
        return None
    layers = _routed_layers(measured)
    tokens = sum(int(layer.visits.sum()) for layer in layers)
    return ReplayedRouting(tokens, sum(layer.mismatched for layer in layers))


def _diverged_replicas(measured: list[RankMeasurement]) -> list[str]:
    """A sentence for each parameter whose replicas differ after the last step: unless equal to the bit, they drift."""
    firsts: dict[str, tuple[int, str]] = {}  # by parameter, the first rank that holds it and its digest
    problems: dict[str, str] = {}
    for number, rank in enumerate(measured):
        for name, digest in rank.digests.items():
            first, first_digest = firsts.setdefault(name, (number, digest))
            if first_digest != digest:
                problems.setdefault(name, f"ranks {first} and {number} hold {name}, and not the same bits of it")
    return list(problems.values())


def _traffic_checks(measured: list[RankMeasurement], expected: list[list[Traffic]]) -> list[TrafficCheck]:
    """A check for each axis and kind of collective: of the first rank that fails it, or of rank 0."""
    checks = []
    for number, rank in enumerate(measured):
        formula = {row[:2]: row for row in expected[number]}  # by (axis, kind)
        counted = {row[:2]: row for row in rank.traffic}
        for key in {**formula, **counted}:
            no_traffic = Traffic(*key, 0, 0, Fraction())
            checks.append((key, TrafficCheck(number, formula.get(key, no_traffic), counted.get(key, no_traffic))))
    return _first_failing(checks)


def _first_failing(checks: Iterable[tuple[object, CheckT]]) -> list[CheckT]:
    """For each key the first check that fails, or the first if none does."""
    chosen: dict[object, CheckT] = {}
    for key, check in checks:
        if key not in chosen or (chosen[key].passed and not check.passed):
            chosen[key] = check
    return list(chosen.values())
