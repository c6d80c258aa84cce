"""What the ranks measured, and the verdict on it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.cost.collective_time import Traffic
from fivefold.job.config import Job
from fivefold.layout.axes import shown_order
from fivefold.verifier.compare import Error, bound_of, replays, router_name, strays_allowed, worst

_KINDS = ("loss", "norm", "gradient", "parameter")
_OF_EXPERTS = ("routing", "load", "bias")


@dataclass(frozen=True)
class RoutedLayer:
    """What one rank routed in one layer, in one step."""

    step: int  # from 1
    name: str  # of the router
    visits: NDArray[np.int64]  # [B, S] how often it routed each token
    strays: int  # tokens for which its scores chose other experts than one process did
    first: int  # the number of the batch's first sample
    note: str = ""  # the first of those tokens, and both choices


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured. Pairs are (the layout's, the reference's), one a step; tensors are of its stages."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)  # of all steps
    digests: dict[str, str] = field(default_factory=dict)  # of the parameters after the last step
    graphs: list[tuple[int, dict[str, int]]] = field(default_factory=list)  # compiled ones, and the breaks between them
    memory: dict[str, float] = field(default_factory=dict)  # bytes by component, microbatches in flight, FLOPs
    routed: list[RoutedLayer] = field(default_factory=list)
    strays: dict[str, int] = field(default_factory=dict)  # by router: the most that the reference's own runs had


@dataclass(frozen=True)
class TrafficCheck:
    """What a rank sent in all steps along one axis, by one kind of collective, and what the closed form says."""

    rank: int  # the first that differs, or 0
    expected: Traffic
    counted: Traffic

    @property
    def holds(self) -> bool:
        return self.expected == self.counted

    def to_dict(self, steps: int) -> dict[str, Any]:
        """For one step of `steps`."""

        def numbers(row: Traffic) -> dict[str, float]:
            values = {name: float(getattr(row, name)) / steps for name in ("calls", "payload", "wire")}
            return {name: int(value) if value == int(value) else value for name, value in values.items()}

        both = {"counted": numbers(self.counted), "expected": numbers(self.expected)}
        return {"axis": self.counted.axis, "kind": self.counted.kind, **both, "holds": self.holds}

    def __str__(self) -> str:
        e, c = self.expected, self.counted
        return (
            f"rank {self.rank} made {c.calls} {c.kind} calls over {c.axis} with {c.payload} bytes in all steps, and "
            f"the closed form has {e.calls} with {e.payload}"
        )


@dataclass(frozen=True)
class MemoryCheck:
    """What a rank holds of something, and what the closed form says."""

    rank: int  # the first that differs, or 0
    name: str  # "parameters", "gradients", "optimizer": bytes; "microbatches in flight"
    expected: float
    counted: float

    @property
    def holds(self) -> bool:
        return self.expected == self.counted

    def __str__(self) -> str:
        what = self.name if self.name == "microbatches in flight" else f"bytes of {self.name}"
        return f"rank {self.rank} holds {self.counted:.0f} {what}, and the closed form has {self.expected:.0f}"


C = TypeVar("C", TrafficCheck, MemoryCheck)


@dataclass(frozen=True)
class Verdict:
    job: Job
    seconds: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)  # of every comparison, the worst over ranks
    traffic: list[TrafficCheck] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)  # replicas of a parameter that differ in bits
    memory: list[MemoryCheck] = field(default_factory=list)
    peak: float = 0.0  # bytes, of the rank that holds most in the first step
    flops: float = 0.0  # of all ranks, in the first step
    graphs: tuple[int, dict[str, int]] | None = None  # of the first rank, where blocks are compiled
    replayed: tuple[int, int] | None = None  # tokens that went where the reference's did, and how many would not have
    broken: str = ""  # why there is nothing to compare: a rank died, hung or raised
    details: str = ""  # its stack

    @classmethod
    def of(
        cls,
        job: Job,
        measured: list[RankMeasurement],
        expected: list[list[Traffic]],
        expected_memory: list[dict[str, float]],
        seconds: float,
    ) -> "Verdict":
        """`expected` has the traffic of each rank in all steps, `expected_memory` what it should hold."""
        return cls(
            job,
            seconds,
            losses=measured[0].losses,
            norms=measured[0].norms,
            errors=[*_worst_over_ranks(job, measured), *_routing_errors(job, measured), *_not_routed_once(measured)],
            traffic=_traffic_checks(measured, expected),
            diverged=_diverged(measured),
            memory=_first_that_differs(
                (name, MemoryCheck(number, name, size, rank.memory[name]))
                for number, (rank, sizes) in enumerate(zip(measured, expected_memory, strict=True))
                for name, size in sizes.items()
            ),
            peak=max(rank.memory["peak"] for rank in measured),
            flops=sum(rank.memory["flops"] for rank in measured),
            graphs=measured[0].graphs[0] if measured[0].graphs else None,
            replayed=_replayed(job, measured),
        )

    def worst(self, what: str) -> Error | None:
        return worst(error for error in self.errors if error.what == what)

    @property
    def problems(self) -> list[str]:
        """What broke; else failed comparisons, the worst of each kind by name; copies that differ; traffic; memory."""
        if self.broken:
            return [self.broken]
        failed = [error for error in self.errors if not error.holds]
        kinds = [worst(error for error in failed if error.what == what) for what in (*_KINDS, *_OF_EXPERTS)]
        firsts = [error for error in kinds if error is not None]
        more = [f"{count} more comparisons fail"] if (count := len(failed) - len(firsts)) else []
        others = [f"{len(self.diverged) - 1} more parameters differ so"] if len(self.diverged) > 1 else []
        traffic = [str(check) for check in self.traffic if not check.holds]
        memory = [str(check) for check in self.memory if not check.holds]
        return [*map(str, firsts), *more, *self.diverged[:1], *others, *traffic, *memory]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of comparisons."""
        return _KINDS if self.job.model.experts is None else (*_KINDS, *_OF_EXPERTS)

    @property
    def passed(self) -> bool:
        return bool(self.errors) and not self.problems

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
            "bound": bound_of(job),
            "losses": [{"layout": _finite(actual), "reference": _finite(expected)} for actual, expected in self.losses],
            "norms": [{"layout": _finite(actual), "reference": _finite(expected)} for actual, expected in self.norms],
            **{f"worst_{what}": _error(self.worst(what)) for what in self.kinds},
            "routing_replayed": self.replayed is not None,
            "traffic_per_step": [count.to_dict(job.train.steps) for count in in_axis_order(self.traffic)],
            "held": [asdict(check) | {"holds": check.holds} for check in self.memory],
            "peak_bytes": self.peak,
            "flops": self.flops,
            "graphs": None if self.graphs is None else self.graphs[0],
            "graph_breaks": None if self.graphs is None else self.graphs[1],
            "seconds": round(self.seconds, 3),
        }


def in_axis_order(checks: Sequence[TrafficCheck]) -> list[TrafficCheck]:
    return sorted(checks, key=lambda check: (shown_order(check.counted.axis), check.counted.kind))


def _error(error: Error | None) -> dict[str, Any] | None:
    if error is None:
        return None
    value = _finite(error.value)
    return {"name": error.name, "step": error.step, "error": value, "note": error.note, "holds": error.holds}


def _finite(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None


def _worst_over_ranks(job: Job, measured: list[RankMeasurement]) -> list[Error]:
    """The worst of each comparison over ranks; a parameter or load that no rank compared fails."""
    errors: dict[tuple[str, str, int], Error] = {}
    for error in (error for rank in measured for error in rank.errors):
        key = error.what, error.name, error.step
        errors[key] = max(errors.get(key, error), error, key=lambda e: math.inf if math.isnan(e.value) else e.value)
    last, bound = job.train.steps, bound_of(job)
    steps, names = range(1, last + 1), [parameter.name for parameter in job.model.parameters()]
    required = [("gradient", name, step) for name in names for step in steps]
    required += [("parameter", name, last) for name in names]
    required += [("bias", name, step) for name in job.model.buffers() for step in steps]
    required += [("load", name, step) for name in _routers(job) for step in steps]
    for key in required:
        note = f"is {'counted' if key[0] == 'load' else 'held'} by no rank"
        errors.setdefault(key, Error(*key, math.inf, bound, note))
    return list(errors.values())


def _routers(job: Job) -> list[str]:
    spec = job.model
    return [router_name(layer) for layer in spec.routed_layers]


def _routing_errors(job: Job, measured: list[RankMeasurement]) -> list[Error]:
    """Tokens of a layer and step that went to other experts than the reference's, or under replay would have gone, over
    all ranks; a router that no rank has seen fails."""
    errors = []
    for name, step in product(_routers(job), range(1, job.train.steps + 1)):
        layers = [layer for layer in _all_routed(measured) if (layer.name, layer.step) == (name, step)]
        strays, allowed = sum(layer.strays for layer in layers), strays_allowed(job, measured[0].strays.get(name, 0))
        note = next((layer.note for layer in layers if layer.note), "")
        note += f"; {strays - 1} more tokens differ" if strays > 1 else ""
        note += f", and rounding explains {allowed:.0f}" if allowed and note else ""
        value, note = (float(strays), note) if layers else (math.inf, "was seen by no rank")
        errors.append(Error("routing", name, step, value, allowed, note))
    return errors


def _all_routed(measured: list[RankMeasurement]) -> list[RoutedLayer]:
    return [layer for rank in measured for layer in rank.routed]


def _not_routed_once(measured: list[RankMeasurement]) -> list[Error]:
    """Over all ranks every token has to be routed once in every layer."""
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    first: dict[int, int] = {}
    for layer in _all_routed(measured):
        sums[layer.step, layer.name] = sums.get((layer.step, layer.name), 0) + layer.visits
        first[layer.step] = layer.first
    errors = []
    for (step, name), visits in sums.items():
        if (wrong := np.argwhere(visits != 1)).size:
            row, position = wrong[0].tolist()
            by = f"by {visits[row, position]} ranks" if visits[row, position] else "by no rank"
            note = f"has sample {first[step] + row}, position {position} routed {by}"
            errors.append(Error("routing", name, step, float(len(wrong)), 0.0, note))
    return errors


def _replayed(job: Job, measured: list[RankMeasurement]) -> tuple[int, int] | None:
    if job.model.experts is None or not replays(job):
        return None
    layers = _all_routed(measured)
    return sum(int(layer.visits.sum()) for layer in layers), sum(layer.strays for layer in layers)


def _diverged(measured: list[RankMeasurement]) -> list[str]:
    """Replicas of a parameter that differ after the last step: unless equal to the bit, they drift apart."""
    firsts: dict[str, tuple[int, str]] = {}
    problems: dict[str, str] = {}
    for number, rank in enumerate(measured):
        for name, digest in rank.digests.items():
            first, known = firsts.setdefault(name, (number, digest))
            if known != digest:
                problems.setdefault(name, f"ranks {first} and {number} hold {name}, and not the same bits of it")
    return list(problems.values())


def _traffic_checks(measured: list[RankMeasurement], expected: list[list[Traffic]]) -> list[TrafficCheck]:
    """For each axis and kind the first rank that differs from the closed form, or what all agree on."""
    checks = []
    for number, rank in enumerate(measured):
        formula = {row[:2]: row for row in expected[number]}
        counted = {row[:2]: row for row in rank.traffic}
        for key in {**formula, **counted}:
            nothing = Traffic(*key, 0, 0, Fraction())
            checks.append((key, TrafficCheck(number, formula.get(key, nothing), counted.get(key, nothing))))
    return _first_that_differs(checks)


def _first_that_differs(checks: Iterable[tuple[object, C]]) -> list[C]:
    """For each key the first that differs from the closed form, or else the first."""
    chosen: dict[object, C] = {}
    for key, check in checks:
        if key not in chosen or (chosen[key].holds and not check.holds):
            chosen[key] = check
    return list(chosen.values())
