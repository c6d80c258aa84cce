"""The catalogue of accelerators: what each can do at best, how much of it is reached, and where a figure is from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from fivefold.hardware.accelerators import ACCELERATORS, PAGES, PRECISIONS, SOURCES, Accelerator, Link, find_accelerator
from fivefold.hardware.efficiency import achieved, source_of
from fivefold.report import Block, Result, Table, Text
from fivefold.support.formatting import bytes_text

_LISTED = ("fp32", "bf16", "fp8")  # the other rates are shown of one accelerator


@dataclass(frozen=True)
class AcceleratorList(Result):
    devices: tuple[Accelerator, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            to_builtins(device)
            | {"achieved": to_builtins(achieved(device.name)) | {"source": source_of(device.name)}}
            | {"sources": dict(zip(("rates", "memory and links"), SOURCES[device.name], strict=True))}
            | ({"page": PAGES[device.name]} if device.name in PAGES else {})
            for device in self.devices
        ]

    def blocks(self) -> Iterator[Block]:
        if len(self.devices) == 1:
            yield from _one(self.devices[0])
            return
        rows = [
            (
                device.name,
                f"{device.memory / 1e9:.1f}",
                f"{device.memory_bandwidth / 1e12:.3g}",
                *(_tera(getattr(device.peak, precision)) for precision in _LISTED),
                device.inside.name,
                device.across.name,
            )
            for device in self.devices
        ]
        heads = ["name", ">GB", ">TB/s", *(f">{precision}" for precision in _LISTED), "in a node", "between nodes"]
        caption = "Memory and its bandwidth, dense TFLOP/s by precision, links: `fivefold accelerators H100` shows one"
        yield Table(heads, rows, "Accelerators", caption)
        sources = [(device.name, f"{'. '.join(SOURCES[device.name])}.") for device in self.devices]
        yield Table(["name", "~its figures are from"], sources, "Sources")
        reached = [(device.name, source_of(device.name)) for device in self.devices]
        yield Table(["name", "~the shares of them that software reaches are"], reached, "Efficiency")


def _one(device: Accelerator) -> Iterator[Block]:
    rates, links = SOURCES[device.name]
    peaks = [(name, f"{_tera(peak)} TFLOP/s") for name in PRECISIONS if (peak := getattr(device.peak, name))]
    yield Table(["precision", ">dense, at best"], peaks, device.name, rates)
    rows = [
        ("memory", f"{bytes_text(device.memory)}, as its driver says"),
        ("memory bandwidth", f"{device.memory_bandwidth / 1e12:.3g} TB/s"),
        ("link inside a node", _link(device.inside)),
        ("link between nodes", f"{_link(device.across)}; a cluster's file can say another"),
    ]
    yield Table(["", "~figure"], rows, "Memory and links", links)
    shares = structs.asdict(achieved(device.name))
    shown = [(name, f"{value:.3g}") for name, value in shares.items() if isinstance(value, float) and 0.01 < value <= 1]
    yield Table(["share of a ceiling", ">reached"], shown, "What software reaches", source_of(device.name))
    if device.name in PAGES:
        yield Text(f"\nthe maker's paper: {PAGES[device.name]}")
    yield Text(f"\nwritten in a cluster as 8x{device.name} or 4x8x{device.name}; --json has all figures")


def _link(link: Link) -> str:
    return f"{link.name}, {link.bandwidth / 1e9:g} GB/s in one direction, {link.latency * 1e6:.3g} us a hop"


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:.4g}"


def accelerators(name: str | None = None) -> AcceleratorList:
    """All accelerators that clusters can be made of, or one of them under any of its spellings."""
    return AcceleratorList(tuple(ACCELERATORS.values()) if name is None else (find_accelerator(name),))
