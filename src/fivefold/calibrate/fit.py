"""The constants with which the planner's formulas (`plan.cost.kernels.Device`) give measured seconds, and how well."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import cast

from msgspec import structs

from fivefold.calibrate.block import BlockTiming
from fivefold.calibrate.kernels import AttentionTiming, Matmul
from fivefold.calibrate.links import Timing
from fivefold.calibrate.result import Row
from fivefold.hardware.accelerators import Accelerator, Link
from fivefold.hardware.cluster import SHARE
from fivefold.hardware.efficiency import Achieved
from fivefold.plan.cost.kernels import BACKWARD, NARROW_HEAD, Device
from fivefold.plan.cost.stack import Attention

RAMPS = (0, 25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 650, 800, 1000, 1300, 1700, 2200, 3000)
NO_SHARES = ("ramp", "units", "launch", "host", "update", "source")
ATTENTION = {"flash2": "torch's flash kernel", "flash3": "cuDNN's"}


def row_of(what: str, measured: str, share: float, ratios: Iterable[float], note: str) -> Row:
    """With the errors of the planned times; `ratios` are planned / measured."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return Row(what, measured, share, median(errors), errors[-1], note)


def settled(shares: Achieved, name: str, ratios: Callable[[Achieved], Iterable[float]]) -> Achieved:
    """The share with which the median of planned / measured is 1. Where something else bounds a time the share does
    nothing: a few rounds settle it."""
    for _ in range(4):
        off = median(ratios(shares))
        shares = structs.replace(shares, **{name: short(max(1e-6, getattr(shares, name) * off))})
    return shares


def fit_products(base: Accelerator, found: Achieved, products: Sequence[Matmul], rows: list[Row]) -> Achieved:
    """`gemm` and `ramp` together, by the least mean error of the sweep's times."""

    def ratios(shares: Achieved) -> list[float]:
        device = Device(base, shares)
        return [device.gemm(p.m, p.n, p.k) / p.seconds for p in products]

    starts = [structs.replace(found, ramp=float(ramp), gemm=0.5) for ramp in RAMPS]
    tried = [settled(start, "gemm", ratios) for start in starts]
    best = min(tried, key=lambda shares: fmean(abs(ratio - 1) for ratio in ratios(shares)))
    note = f"ramp {best.ramp:g}, {len(products)} shapes, {best.units} units"
    rows.append(row_of("gemm, in a sweep", tera(best.gemm * base.rate("bf16")), best.gemm, ratios(best), note))
    return best


def fit_block(base: Accelerator, found: Achieved, blocks: dict[str, BlockTiming], rows: list[Row]) -> Achieved:
    """What products and attention reach between the other kernels of a block: that is what training sees of them."""
    rate = base.rate("bf16")
    for name, one in blocks.items():
        spec = one.spec
        planned = Device(base, found).attention(
            cast(Attention, name), one.samples, spec.heads, spec.head_dim, one.seq, one.seq / 2
        )
        factor = sum(planned) / (one.attend + one.attend_back)
        found = structs.replace(found, **{name: short(getattr(found, name) * factor)})
        flops = 2.0 * one.samples * spec.heads * one.seq**2 * spec.head_dim
        ahead, back = flops / one.attend, 2.5 * flops / one.attend_back
        note = f"in a block: forward {tera(ahead)}, backward {back / ahead:.2f} of it (planned {BACKWARD})"
        rows.append(Row(name, tera(getattr(found, name) * rate), getattr(found, name), note=note))
    if not blocks:
        return found
    one = list(blocks.values())[-1]
    planned_products = sum(Device(base, found).gemm(*shape) for shape in one.shapes)
    found = structs.replace(found, gemm=short(found.gemm * planned_products / one.products))
    reached = sum(2.0 * m * n * k for m, n, k in one.shapes) / one.products
    note = f"in a block: {tera(reached)} as a whole, with products {100 * one.products / one.whole:.0f}% of the time"
    rows.append(Row("gemm", tera(found.gemm * rate), found.gemm, note=note))
    return found


def fit_eighths(base: Accelerator, found: Achieved, products: Sequence[Matmul], rows: list[Row]) -> Achieved:
    if not products or base.peak.fp8 is None:
        rows.append(Row("fp8", "-", note="this hardware has none: the catalogue's value stays"))
        return found

    def ratios(shares: Achieved) -> list[float]:
        device = Device(base, shares)
        return [device.gemm(p.m, p.n, p.k, "fp8") / p.seconds for p in products]

    found = settled(found, "fp8", ratios)
    note = f"{len(products)} shapes, one scale a tensor"
    rows.append(row_of("fp8", tera(found.fp8 * base.rate("fp8")), found.fp8, ratios(found), note))
    return found


def fit_attention(
    base: Accelerator, found: Achieved, name: str, timings: Sequence[AttentionTiming], rows: list[Row]
) -> Achieved:
    """The share with which forward and backward together come out; their own rates are told beside it."""
    if not timings:
        rows.append(Row(name, "-", note=f"{ATTENTION[name]} does not run here: the catalogue's value stays"))
        return found

    def ratios(shares: Achieved) -> Iterator[float]:
        kernel, device = cast(Attention, name), Device(base, shares)
        for one in timings:
            planned = device.attention(kernel, one.samples, one.heads, one.head_dim, one.seq, one.seq / 2)
            yield sum(planned) / (one.forward + one.backward)

    found = settled(found, name, ratios)
    ahead, back = (
        median(factor * one.flops / getattr(one, way) for one in timings if one.head_dim > 64 or base.is_cpu)
        for way, factor in (("forward", 1.0), ("backward", 2.5))
    )
    note = f"forward {tera(ahead)}, backward {back / ahead:.2f} of it (planned {BACKWARD})"
    narrow = [one.flops / one.forward for one in timings if one.head_dim <= 64]
    if narrow and not base.is_cpu:
        note += f"; heads of 64 reach {median(narrow) / ahead:.2f} of it (planned {NARROW_HEAD})"
    share = getattr(found, name)
    rows.append(row_of(f"{name}, in a sweep", tera(share * base.rate("bf16")), share, ratios(found), note))
    return found


def stream_row(streams: dict[str, float], share: float) -> Row:
    usual = median(streams.values())
    slow, fast = min(streams, key=lambda k: streams[k]), max(streams, key=lambda k: streams[k])
    note = f"{slow} {streams[slow] / 1e9:.4g} to {fast} {streams[fast] / 1e9:.4g}"
    return row_of("stream", f"{usual / 1e9:.4g} GB/s", share, (usual / rate for rate in streams.values()), note)


def fit_links(
    base: Accelerator, found: Achieved, measured: tuple[int, list[Timing]], rows: list[Row]
) -> tuple[Link, Achieved]:
    """Latency from the smallest messages, bandwidth from the largest: a ring of n passes on n-1 times."""
    world, timings = measured
    if not timings:
        rows.append(Row("inside", "-", note="one device, no links to measure: the catalogue's value stays"))
        return base.inside, found

    def rounds(kind: str) -> int:
        return 2 if kind == "all-reduce" else 1

    small, large = min(size for _, size, _ in timings), max(size for _, size, _ in timings)
    latency = median(t / (rounds(kind) * (world - 1)) for kind, size, t in timings if size == small)
    passes = [
        rounds(kind) * size * (world - 1) / world / max(t / 2, t - rounds(kind) * (world - 1) * latency)
        for kind, size, t in timings
        if size == large
    ]
    bandwidth = median(passes)
    ratios = [rounds(kind) * (world - 1) * (latency + size / world / bandwidth) / t for kind, size, t in timings]
    if base.is_cpu:
        link, share = Link(short(bandwidth), short(latency), "measured"), 1.0
    else:
        share = short(bandwidth / base.inside.bandwidth)
        link = structs.replace(base.inside, latency=short(latency))
    note = f"{latency * 1e6:.1f} us a hop, {world} ranks"
    rows.append(row_of("inside", f"{bandwidth / 1e9:.4g} GB/s", share, ratios, note))
    return link, structs.replace(found, inside=share)


def within(found: Achieved) -> Achieved:
    """No share beyond what a file may hold: a machine that had other work for a while measures odd things."""
    shares = {name: value for name, value in structs.asdict(found).items() if name not in NO_SHARES}
    return structs.replace(found, **{name: min(SHARE, value) for name, value in shares.items()})


def tera(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s"


def short(value: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
