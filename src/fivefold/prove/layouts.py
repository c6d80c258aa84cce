"""Every legal layout of a world, the models that make them stumble, and samples that still meet every pair.

"Every" is: all products dp x cp x tp (no pp yet), all kinds of cp where cp > 1, sp on and off where tp > 1, ZeRO 0 to 3
where dp x cp > 1, with every hybrid (replicate) at 3, every recompute, and one and two microbatches. The world's other
settings do not change what is computed. The model asked for runs on all of them. `variants` of it, each a known way to
go wrong, run on the least sample of layouts that meets every pair of settings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import get_args

import msgspec

from fivefold.layout import ContextKind, Layout, Recompute
from fivefold.spec import ModelSpec
from fivefold.train.config import Job

_GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True, "dropout": 0.1}
_MICROBATCHES = (1, 2)
_FACTORS = ("dp", "cp", "tp", "cp_kind", "sp", "zero", "replicate", "recompute", "microbatches")


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    job: Job
    variant: str  # how the model differs from the one asked for; empty: it is that one


def legal_layouts(spec: ModelSpec, world: int, seq: int, batch: int) -> Iterator[Layout]:
    for dp, cp, tp in product(_divisors(world), repeat=3):
        if dp * cp * tp != world:
            continue
        kinds = get_args(ContextKind) if cp > 1 else ("ring",)
        sharded = [(zero, 1) for zero in range(4)] + [(3, copies) for copies in _divisors(dp) if copies > 1]
        for kind, sp, (zero, replicate), recompute, microbatches in product(
            kinds,
            (False, True) if tp > 1 else (False,),
            sharded if dp * cp > 1 else [(0, 1)],
            get_args(Recompute),
            _MICROBATCHES,
        ):
            layout = Layout(
                dp=dp, cp=cp, tp=tp, cp_kind=kind, sp=sp, zero=zero, replicate=replicate,
                recompute=recompute, microbatches=microbatches,
            )  # fmt: skip
            if not layout.problems(spec, world=world, seq=seq, batch=batch):
                yield layout


def variants(spec: ModelSpec) -> dict[str, ModelSpec]:
    """Models that differ from `spec` in one way that layouts have to get right."""
    changes: dict[str, dict[str, object]] = {
        "one kv head": {"kv_heads": 1},  # fewer than tp: shared by ranks, whose gradients add up
        "two kv heads": {"kv_heads": 2},
        "vocab 257": {"vocab": 257},  # a prime: no tp divides it
        "GPT block with dropout": {**_GPT, "kv_heads": spec.heads},
        "q/k norm": {"qk_norm": True},  # one scale for heads on different ranks
        "tied embeddings": {"tied": True},
    }
    made = {name: msgspec.structs.replace(spec, **change) for name, change in changes.items()}
    return {name: variant for name, variant in made.items() if variant != spec and not variant.problems()}


def all_cases(job: Job, world: int) -> list[Case]:
    """The job's model on every layout, and its variants on a pairwise cover of theirs."""

    def legal(spec: ModelSpec, variant: str) -> list[Case]:
        layouts = legal_layouts(spec, world, job.data.seq, job.train.batch)
        return [Case(msgspec.structs.replace(job, model=spec, layout=layout), variant) for layout in layouts]

    cases = legal(job.model, "")
    for name, spec in variants(job.model).items():
        chosen = legal(spec, name)
        if name in ("one kv head", "two kv heads", "vocab 257"):  # these matter to tp alone
            chosen = [case for case in chosen if case.job.layout.tp > 1]
        cases += pairwise(chosen)
    return cases


def pairwise(cases: Sequence[Case], most: int | None = None) -> list[Case]:
    """Few cases in which every pair of settings that occurs in any of them occurs together, or the best `most` of them.

    Greedy: always the case with the most pairs that are still to be met. What is asked for beyond a cover starts a
    second one among the rest.
    """
    left = {number: _pairs(case) for number, case in enumerate(cases)}
    wanted: set[object] = set()
    chosen: list[int] = []
    while left and (most is None or len(chosen) < most):
        if not wanted:
            if most is None and chosen:
                break
            wanted = set().union(*left.values())
        best = max(left, key=lambda number: (len(left[number] & wanted), -number))
        wanted -= left.pop(best)
        chosen.append(best)
        if most is not None and not any(pairs & wanted for pairs in left.values()):
            wanted = set()
    return [cases[number] for number in sorted(chosen)]


def covered(sample: Sequence[Case], cases: Sequence[Case]) -> float:
    """The share of the pairs of settings that a sample meets."""
    met, wanted = (set().union(*map(_pairs, some)) for some in (sample, cases))
    return len(met) / len(wanted) if wanted else 1.0


def _pairs(case: Case) -> set[object]:
    settings = [("model", case.variant), *((name, getattr(case.job.layout, name)) for name in _FACTORS)]
    return set(combinations(settings, 2))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
