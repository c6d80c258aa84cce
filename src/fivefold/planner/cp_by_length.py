"""Whether context parallelism pays, and how much of it: whole steps, by sequence length, cp degree and kernel.

    cp_by_length([8192, 131072], "llama3-8b", "8x8xH100").rows[0].best      # the best layout of every cp

Each number is a search over all layouts with that cp. A step has about as many tokens at every length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from msgspec import structs

from fivefold.cost.kernels import Device
from fivefold.cost.software import Attention
from fivefold.cost.step import Workload
from fivefold.cost.systems import software_of
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.option import Option
from fivefold.planner.search import search
from fivefold.planner.space import FEWEST_TOKENS
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_TOKENS, check_range, within
from fivefold.support.text import did_you_mean

TOKENS_PER_STEP = 1 << 22  # tokens
PEAK_KERNEL = "peak"  # a kernel that reaches the device's peak rate: none can be faster
ATTENTION_KERNELS = (*get_args(Attention)[2:], PEAK_KERNEL)


class LengthRow(NamedTuple):
    """One sequence length with one attention kernel: for each cp degree the fastest layout that fits, or None."""

    seq: int
    batch: int
    kernel: str  # empty: the software's own
    by_cp: dict[int, Option | None]

    @property
    def best(self) -> Option | None:
        return min(filter(None, self.by_cp.values()), key=lambda option: option.seconds, default=None)

    def slower(self, cp: int) -> float | None:
        """By what fraction this cp is slower than the best."""
        option = self.by_cp.get(cp)
        return option.seconds / self.best.seconds - 1 if option and self.best else None


@dataclass(frozen=True)
class LengthsResult(Result):
    model: str
    cluster: str
    software: str
    rows: tuple[LengthRow, ...]

    @property
    def degrees(self) -> list[int]:
        return sorted({cp for row in self.rows for cp in row.by_cp})

    def to_dict(self) -> dict[str, Any]:
        question = {"model": self.model, "cluster": self.cluster, "software": self.software}
        return question | {
            "lengths": [
                {
                    "seq": row.seq,
                    "batch": row.batch,
                    "kernel": row.kernel or None,
                    "best": str(row.best.layout) if row.best else None,
                    "by_cp": [
                        {
                            "cp": cp,
                            "layout": str(option.layout) if option else None,
                            "seconds": option.seconds if option else None,
                        }
                        for cp, option in row.by_cp.items()
                    ],
                }
                for row in self.rows
            ]
        }

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.model} on {self.cluster}, {self.software}: the fastest layout with each cp")
        kernels = any(row.kernel for row in self.rows)
        first, slower, fastest = [">tokens", *(["kernel"] if kernels else [])], [], []
        for row in self.rows:
            what, best = [f"{row.seq:,}", *([row.kernel] if kernels else [])], row.best
            slower.append([*what, *(_slowdown_text(row, cp) for cp in self.degrees)])
            if best:
                share = f"{best.workload.mfu(best.seconds, 'causal'):.1%}"
                fastest.append([*what, f"{best.seconds:.2f} s", share, str(best.layout)])
        caption = "how much slower than with the best cp, over all other choices; no: none fits; -: not tried"
        yield Table([*first, *(f">cp={cp}" for cp in self.degrees)], slower, title="cp by length", caption=caption)
        caption = "MFU: with the half of attention that a causal mask leaves"
        yield Table([*first, ">step", ">MFU", "~layout"], fastest, title="The fastest", caption=caption)


def _slowdown_text(row: LengthRow, cp: int) -> str:
    if cp not in row.by_cp:
        return "-"
    slower = row.slower(cp)
    return "no" if slower is None else "best" if slower == 0 else f"+{slower:.1%}"


def cp_by_length(
    seqs: Sequence[int],
    model: str | ModelSpec = "llama3-8b",
    cluster: str | Path | Cluster = "8x8xH100",
    *,
    kernels: Sequence[str] = (),
    software: str = "fivefold",
) -> LengthsResult:
    """The fastest layout of every cp, for sequences of these lengths, in steps of about 4M tokens.

    `kernels` are attention kernels to compare: flash1, flash2, flash3, or peak, which no kernel can surpass.
    """
    spec, machines = preset(model) if isinstance(model, str) else model, Cluster.read(cluster)
    refuse_experts(spec)
    if len(machines.groups) > 1:
        raise UserError(f"{machines} has mixed nodes; give one group, as cluster={machines.groups[0]}", "compare.nodes")
    if wrong := [name for name in kernels if name not in ATTENTION_KERNELS]:
        raise UserError(
            f"{wrong[0]!r} is not an attention kernel; {did_you_mean(wrong[0], ATTENTION_KERNELS)}", "option.choice"
        )
    for seq in seqs:
        check_range("seq", seq, within(2, MAX_TOKENS))
    profile, rows = software_of(software, machines.groups[0].accelerator), []
    for seq in seqs:
        batch = max(1, TOKENS_PER_STEP // seq)
        workload = Workload(
            structs.replace(spec, context=max(spec.context, seq)), Layout(), machines, seq, batch, software=profile
        )
        for kernel in kernels or ("",):
            with_it = _with_kernel(workload, kernel)
            rows.append(LengthRow(seq, batch, kernel, {cp: _fastest(with_it, cp) for cp in _cp_degrees(workload)}))
    return LengthsResult(spec.name, str(machines), profile.name, tuple(rows))


def _cp_degrees(workload: Workload) -> Iterator[int]:
    """The powers of two that leave each rank enough tokens."""
    cp = 1
    while cp <= workload.cluster.world and (
        cp == 1 or (workload.seq % (2 * cp) == 0 and workload.seq // cp >= FEWEST_TOKENS)
    ):
        yield cp
        cp *= 2


def _with_kernel(workload: Workload, kernel: str) -> Workload:
    """The workload with one kernel for all attention."""
    if not kernel:
        return workload
    name = ATTENTION_KERNELS[-2] if kernel == PEAK_KERNEL else kernel
    device = Device.of(workload.cluster.groups[0].accelerator)
    if kernel == PEAK_KERNEL:
        device = replace(device, achieved=structs.replace(device.achieved, **{name: 1.0}))
    return replace(workload, device=device, software=workload.software.but(attention=name, cp_attention=name))


def _fastest(workload: Workload, cp: int) -> Option | None:
    try:
        return search(workload, top=1, cp=cp).best
    except UserError:  # nothing fits, or the batch does not divide
        return None


def refuse_experts(spec: ModelSpec) -> None:
    if spec.experts is not None:
        raise UserError(
            f"{spec.name} has {spec.experts.count} experts a layer, and the comparison of lengths knows dense "
            f"models alone; training is planned: 'fivefold plan {spec.name} --cluster 2x8xH100'",
            "compare.experts",
        )
