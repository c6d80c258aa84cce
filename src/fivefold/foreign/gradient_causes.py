"""Gradients that differ: the factor, the missing sum, the term of the loss or the weights of samples that explain it.

Every guess is a formula that is held against the numbers, all of them: it is told only if it fits to rounding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fivefold.foreign.evidence import (
    ACCUMULATION,
    AUTOGRAD,
    AXES,
    DDP,
    PRECISION,
    REPORTS,
    Cause,
    Evidence,
    all_of,
    factor_name,
    ranks_text,
    spans,
)
from fivefold.foreign.measurement import Values
from fivefold.support.text import plural

_ROUNDINGS = (("float32", 2.0**-24), ("float16", 2.0**-11), ("bfloat16", 2.0**-8))
OTHER_TOKENS = "replicas that see other tokens, and are in no reduction"
_NOISE = 1e-10  # of the largest gradient: what is less is zero in theory
_SHARES = 1e-5  # samples fit within this: models that cast to float32 inside round the gradient of each alone
_SAMPLED = 20_000  # elements by which the weights of samples are fitted


def gradient_causes(evidence: Evidence) -> list[Cause]:
    if broken := _not_numbers(evidence):  # everything below reads NaN as what a rank does not hold
        return [broken]
    if term := _term(evidence):
        return [term]
    explained, found = _factors(evidence)
    left = [identity for identity in evidence.failing if identity not in explained]
    summed, sums = _sums(evidence, left)
    found += sums
    left = [identity for identity in left if identity not in summed]
    if len(left) == len(evidence.failing) and (rounding := _rounding(evidence)):
        return [rounding]
    if left and (samples := _samples(evidence, left)):
        return [*found, samples]
    if left:
        found.append(_unexplained(evidence, left))
    return found


def _not_numbers(evidence: Evidence) -> Cause | None:
    """Gradients with NaN or infinity, which spread to all that is computed with them."""
    ranks, wrong = [], np.zeros(len(evidence.tensors.names), dtype=bool)
    for rank in evidence.ranks:
        for name, values in rank.gradients[0].items():
            numbers = rank.numbers[name]
            if values is None or len(values) != len(numbers):
                continue
            bad = numbers[~np.isfinite(values) & (numbers >= 0)]
            wrong[np.unique(evidence.tensors.ids(bad))] = True
            ranks += [rank.rank] if len(bad) and rank.rank not in ranks else []
    if not ranks:
        return None
    identities = [int(identity) for identity in np.flatnonzero(wrong)]
    text = f"{all_of(evidence, identities)} ({evidence.names(identities)}) are not numbers on {ranks_text(ranks)}"
    return Cause(
        text, "NaN or infinity: an overflow, 0/0, as a mean over no targets, or memory never written", AUTOGRAD
    )


def _factors(evidence: Evidence) -> tuple[set[int], list[Cause]]:
    """Gradients that are the truth times a number, one number for each rank."""
    everywhere: dict[float, list[int]] = {}  # the same on all ranks that hold it: stages hold unlike parameters
    by_factors: dict[tuple[tuple[int, float], ...], list[int]] = {}
    for identity in evidence.failing:
        if (factors := _factors_of(evidence, identity)) is not None:
            if len(values := {factor for _, factor in factors}) == 1:
                everywhere.setdefault(values.pop(), []).append(identity)
            else:
                by_factors.setdefault(factors, []).append(identity)
    found = []
    for factor, identities in everywhere.items():
        who = f"{all_of(evidence, identities)} ({evidence.names(identities)})"
        found.append(_factor_cause(evidence, factor, who, "on every rank that holds them"))
    for factors, identities in by_factors.items():
        who = f"{all_of(evidence, identities)} ({evidence.names(identities)})"
        wrong = [(rank, factor) for rank, factor in factors if abs(factor - 1) > evidence.fits]
        if len({factor for _, factor in wrong}) == 1:
            ranks = [rank for rank, _ in wrong]
            found.append(_factor_cause(evidence, wrong[0][1], who, f"on {ranks_text(ranks)}, and right on the others"))
        else:
            listed = ", ".join(f"rank {rank} x {factor:.6g}" for rank, factor in factors)
            found.append(Cause(f"{who} are the truth times a number of their rank: {listed}", "", REPORTS))
    groups = [*everywhere.values(), *by_factors.values()]
    return {identity for identities in groups for identity in identities}, found


def _factors_of(evidence: Evidence, identity: int) -> tuple[tuple[int, float], ...] | None:
    part, scale = evidence.part(identity), float(evidence.scale[identity])
    factors = []
    for rank, whole in enumerate(evidence.held):
        here = ~np.isnan(whole[part])
        values, truth = whole[part][here], evidence.truth[part][here]
        if not len(values) or not np.abs(truth).max() > evidence.fits * scale:
            continue
        factor = float(values @ truth / (truth @ truth))
        if not evidence.close(values, factor * truth, scale * max(1.0, abs(factor))):
            return None
        factors.append((rank, 0.0 if abs(factor) < evidence.fits else evidence.rounded(factor)))
    return tuple(factors) or None


def _factor_cause(evidence: Evidence, factor: float, who: str, where: str) -> Cause:
    if factor == 0.0:
        return Cause(
            f"{who}: zero or missing {where}",
            "the backward pass does not reach them there, or a reduction left them out",
            DDP,
        )
    name = evidence.name(factor)
    close = "exactly" if evidence.dtype == "float64" else "about"
    text = f"{who}: {close} x {factor:.8g}{f' = {name}' if name else ''} {where}"
    kinds = dict.fromkeys(_kind(factor, one) for one in name.split(" or "))
    told = [_LIKELY[kind] for kind in kinds if kind in _LIKELY]
    return Cause(text, "; or ".join(likely for likely, _ in told), told[0][1] if told else "")


_LIKELY = {
    "data more": ("a sum over data ranks where a mean was meant: nothing divides by their number", DDP),
    "data less": (
        "divided by the number of data ranks once too often: by the reduction (DDP averages) and by the loss, or twice",
        DDP,
    ),
    "model more": ("summed over ranks that hold the same value already: a reduction that runs twice", REPORTS),
    "model less": ("divided by the size of a group whose ranks were not to share it", REPORTS),
    "sign": ("the sign is turned: a gradient is subtracted, or a loss is negated", AUTOGRAD),
    "known more": ("added once for each of them where a mean was meant", ACCUMULATION),
    "known less": ("divided by their number once too often", ACCUMULATION),
}


def _kind(factor: float, name: str) -> str:
    if factor < 0:
        return "sign"
    axes = set(name.removeprefix("1/").strip("()").split(" x "))
    if not name:
        return ""
    side = "less" if factor < 1 else "more"
    if axes <= {"dp", "dp_replicate", "dp_shard", "fsdp", "cp", "ranks"}:
        return f"data {side}"
    return f"model {side}" if axes <= set(AXES) else f"known {side}"


def _sums(evidence: Evidence, left: Sequence[int]) -> tuple[set[int], list[Cause]]:
    """Gradients whose parts on several ranks add up to the truth: a reduction that did not happen."""
    by_group: dict[tuple[tuple[tuple[int, ...], ...], float], list[int]] = {}
    for identity in left:
        if (fit := sum_of(evidence, identity, evidence.held)) is not None:
            by_group.setdefault(fit, []).append(identity)
    found = []
    for (groups, factor), identities in by_group.items():
        ranks = " and ".join(str(list(group)) for group in groups[:2]) + (" ..." if len(groups) > 2 else "")
        who = f"{all_of(evidence, identities)} ({evidence.names(identities)})"
        size = len(groups[0])
        if math.isclose(factor, 1.0, rel_tol=1e-6):
            text = f"{who}: the parts of ranks {ranks} add up to the truth, and nobody adds them: a missing SUM"
        elif math.isclose(factor, size, rel_tol=1e-6):
            text = f"{who}: the mean of ranks {ranks} is the truth, and nobody takes it: a missing MEAN"
        else:
            name = factor_name(factor, evidence.layout, evidence.known, len(evidence.ranks))
            text = f"{who}: the parts of ranks {ranks} add up to {factor:.6g}{f' = {name}' if name else ''} x the truth"
        found.append(Cause(text, _sum_hint(evidence, identities, groups), REPORTS))
    return {identity for identities in by_group.values() for identity in identities}, found


def _sum_hint(evidence: Evidence, identities: Sequence[int], groups: Sequence[Sequence[int]]) -> str:
    names = [evidence.tensors.names[identity].lower() for identity in identities]
    layout = evidence.layout
    if int(layout.get("pp", 1)) > 1 and all("emb" in name or "head" in name or "output" in name for name in names):
        return "tied embeddings: the first and the last stage each have a copy, and must add their gradients"
    if layout.get("sp", layout.get("sequence_parallel")) and int(layout.get("tp", 1)) > 1:
        return "with sequence parallelism tp ranks see other tokens: what tp does not cut is to be summed over tp"
    if len(evidence.failing) == len(evidence.tensors.names):
        return "no gradient is reduced over data ranks"
    return OTHER_TOKENS


def sum_of(
    evidence: Evidence, identity: int, by_rank: Sequence[Values], least: int = 2
) -> tuple[tuple[tuple[int, ...], ...], float] | None:
    """The groups of `least` or more ranks whose sums are the truth times one factor."""
    part, scale = evidence.part(identity), float(evidence.scale[identity])
    values = np.array([whole[part] for whole in by_rank])
    holders = ~np.isnan(values)
    patterns = np.unique(holders.T, axis=0)
    found: tuple[list[tuple[int, ...]], float] = ([], math.nan)
    for pattern in patterns:
        ranks = np.flatnonzero(pattern)
        elements = (holders == pattern[:, None]).all(axis=0)
        truth, own = evidence.truth[part][elements], values[:, elements]
        if len(ranks) < least:
            return None
        fit = next(
            (
                (groups, factor)
                for groups in _partitions([int(rank) for rank in ranks], least)
                if (factor := _common_factor(evidence, [own[list(g)].sum(axis=0) for g in groups], truth, scale))
            ),
            None,
        )
        if fit is None or (found[0] and not math.isclose(fit[1], found[1], rel_tol=1e-6)):
            return None
        found = (found[0] + [group for group in fit[0] if group not in found[0]], fit[1])
    return (tuple(found[0]), float(f"{found[1]:.8g}")) if found[0] else None


def _partitions(ranks: Sequence[int], least: int) -> Iterator[list[tuple[int, ...]]]:
    """The ranks in groups of one size, of neighbours or of a stride; small groups first."""
    for size in range(least, len(ranks) + 1):
        if len(ranks) % size:
            continue
        count = len(ranks) // size
        yield [tuple(ranks[index * size : (index + 1) * size]) for index in range(count)]
        if count > 1:
            yield [tuple(ranks[index::count]) for index in range(count)]


def _common_factor(evidence: Evidence, sums: Sequence[Values], truth: Values, scale: float) -> float:
    """The one number by which all sums are the truth; 0 if there is none."""
    if not truth @ truth:
        return 0.0
    factor = float(sums[0] @ truth / (truth @ truth))
    fits = all(evidence.close(total, factor * truth, scale * max(1.0, abs(factor))) for total in sums)
    return factor if fits and abs(factor) > evidence.fits else 0.0


def _term(evidence: Evidence) -> Cause | None:
    """A term of the loss that explains the whole difference."""
    for name, without in (evidence.insight.terms if evidence.insight else {}).items():
        along, factors = evidence.truth - without, []
        for whole in evidence.held:
            here = ~np.isnan(whole)
            direction, off = along[here], whole[here] - evidence.truth[here]
            size = float(direction @ direction)
            # A rank whose parameters do not feel the term must have no difference either.
            excess = float(off @ direction) / size if size else 0.0
            if not evidence.close(off, excess * direction, float(np.abs(along).max(initial=0.0))):
                break
            if size > (evidence.fits * float(np.abs(along).max(initial=0.0))) ** 2:
                factors.append(1 + excess)
        else:
            if factors and max(factors) - min(factors) <= 1e-6 and abs(factors[0] - 1) > evidence.fits:
                number = factor_name(factors[0], evidence.layout, evidence.known, len(evidence.ranks))
                count = sum(len(rank.numbers) for rank in evidence.ranks)
                return Cause(
                    f"the whole difference is the term {name}: it entered x {factors[0]:.8g}"
                    f"{f' = {number}' if number else ''} (this fits all {count} local gradients)",
                    "the term is scaled apart from the main loss: by ranks, microbatches or tokens once too often",
                    REPORTS,
                )
    return None


def _samples(evidence: Evidence, left: Sequence[int]) -> Cause | None:
    """Weights of samples that explain the difference: a mean of means, samples left out or counted twice."""
    insight = evidence.insight
    if insight is None or len(insight.samples) < 2:
        return None
    numbers, basis = [*insight.samples], np.array([*insight.samples.values()]).T
    chosen = np.concatenate(
        [np.arange(evidence.part(identity).start, evidence.part(identity).stop) for identity in left]
    )
    if len(chosen) > _SAMPLED:
        chosen = np.random.default_rng(0).choice(chosen, _SAMPLED, replace=False)
    usual = _fit(basis[chosen], evidence.truth[chosen], evidence.fits)
    if usual is None or (np.abs(usual) < 1e-6 * np.abs(usual).max()).any():
        return None
    by_rank: list[Values] = []
    for whole in evidence.held:
        own = chosen[~np.isnan(whole[chosen])]
        if len(own) <= len(insight.samples):
            continue
        if (weights := _fit(basis[own], whole[own], evidence.fits)) is None:
            return None
        by_rank.append(weights / usual)
    if not by_rank:
        return None
    alike = all(np.allclose(ratios, by_rank[0], rtol=1e-5, atol=1e-6) for ratios in by_rank)
    if not alike:
        rows = "; ".join(f"rank {rank} {_weights(ratios)}" for rank, ratios in enumerate(by_rank[:4]))
        return Cause(
            f"ranks weigh the samples of the batch unlike each other: {rows}", "a reduction over data is missing", DDP
        )
    ratios = by_rank[0]
    text = f"the samples of the batch enter {_weights(ratios)}"
    if len(numbers) <= max(numbers):
        text += f" (those with targets: {spans(numbers)})"
    if (out := [number for number, ratio in zip(numbers, ratios, strict=True) if abs(ratio) < 1e-6]) and len(out) < len(
        ratios
    ):
        likely = f"samples {spans(out)} are left out: a microbatch or a rank whose gradients are lost"
        return Cause(text, likely, ACCUMULATION)
    means, truly = _mean_of_means(dict(zip(numbers, ratios, strict=True)), insight.counts)
    if means:
        instead = f", where one process takes one of {truly}" if truly > 1 else ""
        return Cause(
            f"{text}: a mean of {means} means{instead}, each part divided by its own number of targets",
            "the loss is a mean over the rank's (or microbatch's) own targets, and these differ in number",
            ACCUMULATION,
        )
    return Cause(text, "the parts of the batch are not weighed by their targets", ACCUMULATION)


def _fit(basis: Values, values: Values, fits: float) -> Values | None:
    weights: Values = np.asarray(np.linalg.lstsq(basis, values, rcond=None)[0], dtype=np.float64)
    scale = float(np.abs(values).max(initial=0.0))
    off = np.abs(basis @ weights - values).max(initial=0.0)
    return weights if off <= max(_SHARES, fits) * (scale or 1.0) else None


def _mean_of_means(ratios: Mapping[int, float], counts: Sequence[int]) -> tuple[int, int]:
    """How many parts the batch has here and in one process, whose microbatches may be parts, too, if a sample's ratio
    is 1 / (parts x targets of its part) here by the same there. (0, 0) if it is not."""
    if not counts or max(ratios) >= len(counts):
        return 0, 0
    ways = [(parts, weights) for parts in range(1, len(counts) + 1) if len(counts) % parts == 0
            for weights in _shares(parts, counts)]  # fmt: skip
    for truly, usual in ways:
        for parts, weights in ways:
            own = zip(ratios.values(), weights[[*ratios]], usual[[*ratios]], strict=True)
            if parts > truly and all(math.isclose(ratio * there, here, rel_tol=1e-5) for ratio, here, there in own):
                return parts, truly
    return 0, 0


def _shares(parts: int, counts: Sequence[int]) -> Iterator[Values]:
    """What a target of each sample weighs in a mean of the means of parts: neighbours, or every n-th. Parts without a
    target count as parts: their mean is none, or zero."""
    size = len(counts) // parts
    for group_of in (np.arange(len(counts)) // size, np.arange(len(counts)) % parts):
        targets = np.bincount(group_of, weights=np.array(counts, dtype=np.float64), minlength=parts)
        yield 1 / (parts * np.where(targets > 0, targets, math.inf))[group_of]


def _weights(ratios: Values) -> str:
    """`x 1.3 (4 samples), x 0.81 (4 samples)`, in the order of the batch"""
    runs: list[list[float]] = []
    for ratio in ratios:
        if runs and math.isclose(runs[-1][0], ratio, rel_tol=1e-5, abs_tol=1e-6):
            runs[-1][1] += 1
        else:
            runs.append([float(ratio), 1])
    return ", ".join(f"x {round(value, 5) + 0.0:.5g} ({plural(int(count), 'sample')})" for value, count in runs)


def _rounding(evidence: Evidence) -> Cause | None:
    """All gradients a little off, each by about as much of its largest element, as a narrower dtype makes them."""
    largest = evidence.tensors.largest(evidence.truth)
    some = [int(identity) for identity in np.flatnonzero(largest > _NOISE * largest.max(initial=0.0))]
    narrower = {"float64": _ROUNDINGS, "float32": _ROUNDINGS[1:]}.get(evidence.dtype, ())
    if len(some) < 2 or not narrower or set(some) - set(evidence.failing):
        return None
    errors = [_error(evidence, identity) for identity in some]
    usual = float(np.median(errors)) or math.inf
    name, rounding = min(narrower, key=lambda entry: abs(math.log(usual / entry[1])))
    if not rounding / 16 <= min(errors) <= max(errors) <= min(8 * rounding, 32 * min(errors)):
        return None
    text = f"{all_of(evidence, evidence.failing)} are off by about {usual:.0e}, as rounding to {name} gives"
    return Cause(
        text, "something is computed in a narrower dtype in this layout: mixed precision, autocast, a cast", PRECISION
    )


def _error(evidence: Evidence, identity: int) -> float:
    """The largest error on any rank, of the gradient's largest element."""
    part = evidence.part(identity)
    off = np.abs([whole[part] - evidence.truth[part] for whole in evidence.held])
    return float(off[~np.isnan(off)].max(initial=0.0) / evidence.scale[identity])


def _unexplained(evidence: Evidence, left: Sequence[int]) -> Cause:
    disagree = [identity for identity in left if not _replicas_agree(evidence, identity)]
    text = f"{all_of(evidence, left)} ({evidence.names(left)}): no one factor, sum, sample or term explains them"
    if len(disagree) == len(left):
        return Cause(
            f"{text}; ranks that hold the same elements disagree", "a reduction is missing or over other ranks", REPORTS
        )
    if disagree:
        text += f"; ranks that hold the same elements disagree in {evidence.names(disagree)}"
    return Cause(text, "", REPORTS)


def _replicas_agree(evidence: Evidence, identity: int) -> bool:
    part, scale = evidence.part(identity), float(evidence.scale[identity])
    values = np.array([whole[part] for whole in evidence.held])
    held = ~np.isnan(values)
    high = np.where(held, values, -np.inf).max(axis=0)
    low = np.where(held, values, np.inf).min(axis=0)
    some = held.any(axis=0)
    return evidence.close(high[some], low[some], scale)
