"""Fits the constants of the planner's formulas (`cost.kernels.Device`) to measured seconds, and states their errors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from statistics import fmean, median
from typing import Any, cast

import torch
from msgspec import structs

from fivefold.cost.kernels import ATTENTION_BACKWARD_EFFICIENCY, HEAD_64_EFFICIENCY, Device
from fivefold.cost.software import Attention
from fivefold.hardware.accelerators import Accelerator, Achieved, Link, achieved
from fivefold.hardware.cluster import SHARE
from fivefold.machines.clock import Timing
from fivefold.machines.kernels import AttentionTiming, BlockTiming, MatmulTiming
from fivefold.machines.result import CalibrationResult, MeasuredRow, short

RAMPS = (0, 25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 650, 800, 1000, 1300, 1700, 2200, 3000)
NO_SHARES = (
    "ramp",
    "units",
    "launch",
    "host",
    "update",
    "source",
)  # fields of Achieved that are no shares of a ceiling
ATTENTION = {"flash2": "torch's flash kernel", "flash3": "cuDNN's"}
Ratios = Callable[[Device], Iterable[float]]  # planned / measured


@dataclass(frozen=True)
class Samples:
    """The timings of one device."""

    name: str  # of the device
    units: int  # multiprocessors of a GPU, threads of a CPU
    sustained: float  # FLOP/s of large products, back to back for seconds
    products: list[MatmulTiming]
    fp8: list[MatmulTiming]
    attention: dict[str, list[AttentionTiming]]
    blocks: dict[str, BlockTiming]
    streams: dict[str, float]  # bytes/s
    launch: float  # seconds from one tiny kernel to the next
    host: tuple[float, float]  # seconds to launch a block's forward, and its backward
    update: float  # seconds of a parameter's optimizer step on a CPU; 0 on a GPU, where memory bounds it


def fitted(base: Accelerator, samples: Samples, links: tuple[int, list[Timing]]) -> CalibrationResult:
    """Fit all constants. `base` has the ceilings; `links` is the number of ranks, and their timed collectives."""
    fit = Fit(base, achieved(base.name))
    stream = short(median(samples.streams.values()) / base.memory_bandwidth)
    fit.set(launch=short(samples.launch), units=samples.units, stream=stream)
    if base.is_cpu:  # the time of launches is part of the host's, which the formula adds
        fit.set(launch=0.0, host=short(fmean(samples.host)), update=short(samples.update))
    fit.products(samples.products)
    share = samples.sustained / base.rate("bf16")
    fit.row("gemm, sustained", tera(samples.sustained), share, note="nothing but large products, for seconds")
    fit.fp8(samples.fp8)
    for name, timings in samples.attention.items():
        fit.attention(name, timings)
    fit.blocks(samples.blocks)
    if base.is_cpu:
        fit.set(flash3=fit.achieved.flash2)
    fit.streams(samples.streams)
    fit.row("launch", f"{samples.launch * 1e6:.2f} us", note="from one tiny kernel to the next")
    forward, backward = (f"{seconds * 1e3:.3f} ms" for seconds in samples.host)
    fit.row("host", forward, note=f"to launch a block forward; backward {backward}")
    if samples.update:
        fit.row("update", f"{samples.update * 1e9:.3g} ns", note="a parameter: norm, clipping and AdamW")
    inside = fit.links(*links)
    not_measured = [row.what for row in fit.rows if row.measured == "-"]
    source = f"measured by fivefold calibrate on {samples.name}, torch {torch.__version__}, {date.today()}"
    source += f"; kept from the catalogue: {', '.join([*not_measured, 'flash1', 'across'])}"
    # No share above what a file may hold: on a machine with other work, measurements may be off.
    shares = {name: value for name, value in structs.asdict(fit.achieved).items() if name not in NO_SHARES}
    fit.set(source=source, **{name: min(SHARE, value) for name, value in shares.items()})
    accelerator = structs.replace(base, inside=inside, achieved=fit.achieved)
    all_timings = asdict(samples) | {"collectives": links}
    return CalibrationResult(samples.name, accelerator, fit.rows, samples.host[0], all_timings)


def with_across(base: Accelerator, accelerator: Accelerator, nodes: int, timings: list[Timing]) -> Accelerator:
    """The fitted `accelerator` with the link between nodes, by the timings of a ring with a rank on each of them."""
    assert accelerator.achieved is not None
    fit = Fit(structs.replace(base, inside=base.across), accelerator.achieved)
    across = fit.links(nodes, timings)
    shares = structs.replace(accelerator.achieved, across=min(SHARE, fit.achieved.inside))
    kept = (shares.source or "").replace(", across", "")
    return structs.replace(accelerator, across=across, achieved=structs.replace(shares, source=kept))


class Fit:
    """Finds the constants one after the other, and makes a row for each measurement."""

    def __init__(self, base: Accelerator, achieved: Achieved):
        self.base, self.achieved = base, achieved
        self.rows: list[MeasuredRow] = []

    @property
    def device(self) -> Device:
        return Device(self.base, self.achieved)

    def set(self, **constants: Any) -> None:
        self.achieved = structs.replace(self.achieved, **constants)

    def row(
        self, what: str, measured: str, share: float | None = None, ratios: Iterable[float] = (), note: str = ""
    ) -> None:
        """Add a row; `ratios` are planned / measured, and give its median and worst error."""
        errors = [abs(ratio - 1) for ratio in ratios]
        middle = median(errors) if errors else None
        self.rows.append(MeasuredRow(what, measured, share, middle, max(errors, default=None), note))

    def with_share(self, shares: Achieved, name: str, ratios: Ratios) -> Achieved:
        """`shares` with the value of the share `name` for which the median of planned / measured is 1. A time that
        something else bounds does not follow the share, so it takes a few rounds."""
        for _ in range(4):
            ratio = median(ratios(Device(self.base, shares)))
            shares = structs.replace(shares, **{name: short(max(1e-6, getattr(shares, name) * ratio))})
        return shares

    def products(self, products: Sequence[MatmulTiming]) -> None:
        """Fit `gemm` and `ramp`, for the least mean error of the sweep's times."""

        def ratios(device: Device) -> list[float]:
            return [device.gemm(p.m, p.n, p.k) / p.seconds for p in products]

        def error(shares: Achieved) -> float:
            return fmean(abs(ratio - 1) for ratio in ratios(Device(self.base, shares)))

        starts = [structs.replace(self.achieved, ramp=float(ramp), gemm=0.5) for ramp in RAMPS]
        best = self.achieved = min((self.with_share(start, "gemm", ratios) for start in starts), key=error)
        note = f"ramp {best.ramp:g}, {len(products)} shapes, {best.units} units"
        self.row("gemm, in a sweep", tera(best.gemm * self.base.rate("bf16")), best.gemm, ratios(self.device), note)

    def fp8(self, products: Sequence[MatmulTiming]) -> None:
        if not products or self.base.peak.fp8 is None:
            self.row("fp8", "-", note="this hardware has none: the catalogue's value stays")
            return

        def ratios(device: Device) -> list[float]:
            return [device.gemm(p.m, p.n, p.k, "fp8") / p.seconds for p in products]

        self.achieved = self.with_share(self.achieved, "fp8", ratios)
        share, note = self.achieved.fp8, f"{len(products)} shapes, one scale a tensor"
        self.row("fp8", tera(share * self.base.rate("fp8")), share, ratios(self.device), note)

    def attention(self, name: str, timings: Sequence[AttentionTiming]) -> None:
        """Fit a kernel's share to its forward and backward in sum; the note has the rates of each."""
        if not timings:
            self.row(name, "-", note=f"{ATTENTION[name]} does not run here: the catalogue's value stays")
            return

        def ratios(device: Device) -> list[float]:
            return [_attention(device, name, timing) / (timing.forward + timing.backward) for timing in timings]

        self.achieved = self.with_share(self.achieved, name, ratios)
        wide = [timing for timing in timings if timing.head_dim > 64 or self.base.is_cpu]
        forward = median(timing.flops / timing.forward for timing in wide)  # FLOP/s, as the next two
        backward = median(2.5 * timing.flops / timing.backward for timing in wide)
        note = _forward_backward(forward, backward)
        narrow = [timing.flops / timing.forward for timing in timings if timing.head_dim <= 64]
        if narrow and not self.base.is_cpu:
            note += f"; heads of 64 reach {median(narrow) / forward:.2f} of it (planned {HEAD_64_EFFICIENCY})"
        share = getattr(self.achieved, name)
        self.row(f"{name}, in a sweep", tera(share * self.base.rate("bf16")), share, ratios(self.device), note)

    def blocks(self, blocks: dict[str, BlockTiming]) -> None:
        """Replace the shares of products and attention by those that they reach inside a block, as in training."""
        rate = self.base.rate("bf16")
        for name, block in blocks.items():
            timing = block.attention
            factor = _attention(self.device, name, timing) / (timing.forward + timing.backward)
            share = short(getattr(self.achieved, name) * factor)
            self.set(**{name: share})
            forward, backward = timing.flops / timing.forward, 2.5 * timing.flops / timing.backward
            note = f"in a block: {_forward_backward(forward, backward)}"
            self.row(name, tera(share * rate), share, note=note)
        for block in list(blocks.values())[-1:]:  # that of the last attention kernel, if any ran
            planned = sum(self.device.gemm(*shape) for shape in block.shapes)
            self.set(gemm=short(self.achieved.gemm * planned / block.products))
            reached = tera(sum(2.0 * m * n * k for m, n, k in block.shapes) / block.products)
            part = f"{100 * block.products / block.whole:.0f}% of the time"
            note = f"in a block: {reached} as a whole, with products {part}"
            self.row("gemm", tera(self.achieved.gemm * rate), self.achieved.gemm, note=note)

    def streams(self, streams: dict[str, float]) -> None:
        middle = median(streams.values())
        slowest, fastest = min(streams, key=streams.__getitem__), max(streams, key=streams.__getitem__)
        note = f"{slowest} {streams[slowest] / 1e9:.4g} to {fastest} {streams[fastest] / 1e9:.4g}"
        ratios = (middle / rate for rate in streams.values())
        self.row("stream", f"{middle / 1e9:.4g} GB/s", self.achieved.stream, ratios, note)

    def links(self, world: int, timings: list[Timing]) -> Link:
        """The link inside a node: latency from the smallest messages, bandwidth from the largest. A ring of n ranks
        passes a message on n-1 times."""
        inside = self.base.inside
        if not timings:
            self.row("inside", "-", note="one device, no links to measure: the catalogue's value stays")
            return inside
        # Hops, bytes and seconds: an all-reduce goes around twice.
        rings = [((2 if kind == "all-reduce" else 1) * (world - 1), size, t) for kind, size, t in timings]
        sizes = [size for _, size, _ in rings]
        latency = median(t / hops for hops, size, t in rings if size == min(sizes))
        large = [ring for ring in rings if ring[1] == max(sizes)]
        bandwidth = median(hops * size / world / max(t / 2, t - hops * latency) for hops, size, t in large)
        ratios = [hops * (latency + size / world / bandwidth) / t for hops, size, t in rings]
        share = 1.0 if self.base.is_cpu else short(bandwidth / inside.bandwidth)
        self.set(inside=share)
        self.row("inside", f"{bandwidth / 1e9:.4g} GB/s", share, ratios, f"{latency * 1e6:.1f} us a hop, {world} ranks")
        if self.base.is_cpu:
            return Link(short(bandwidth), short(latency), "measured")
        return structs.replace(inside, latency=short(latency))


def _forward_backward(forward: float, backward: float) -> str:
    return f"forward {tera(forward)}, backward {backward / forward:.2f} of it (planned {ATTENTION_BACKWARD_EFFICIENCY})"


def _attention(device: Device, name: str, timing: AttentionTiming) -> float:
    """The planned seconds of forward and backward in sum."""
    kernel = cast(Attention, name)
    return sum(device.attention(kernel, timing.samples, timing.heads, timing.head_dim, timing.seq, timing.seq / 2))


def tera(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s"
