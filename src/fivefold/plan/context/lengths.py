"""Whether context parallelism pays, and how much of it: whole steps, by the length of a sequence, cp and the kernel.

lengths([8192, 131072], "llama3-8b", "8x8xH100").rows[0].best      # the best layout of every cp

Each number is a search over all layouts with that cp. A step has about as many tokens at every length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from msgspec import structs

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.stack import Attention
from fivefold.plan.cost.systems import software_of
from fivefold.plan.cost.time import Case
from fivefold.plan.search.option import Option
from fivefold.plan.search.search import search
from fivefold.plan.search.space import FEWEST_TOKENS
from fivefold.plan.unplanned import refuse_unplanned
from fivefold.report import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean
from fivefold.support.ranges import TOKENS, checked, within

STEP = 1 << 22  # tokens
PEAK = "peak"  # a kernel that reaches the device's peak rate: none can be faster
KERNELS = (*get_args(Attention)[2:], PEAK)


class Length(NamedTuple):
    """One length with one attention kernel: by cp, the fastest layout that fits; None where none does."""

    seq: int
    batch: int
    kernel: str  # empty: the software's own
    by_cp: dict[int, Option | None]

    @property
    def best(self) -> Option | None:
        return min(filter(None, self.by_cp.values()), key=lambda one: one.seconds, default=None)

    def slower(self, cp: int) -> float | None:
        """Than the best, with this cp."""
        found = self.by_cp.get(cp)
        return found.seconds / self.best.seconds - 1 if found and self.best else None


@dataclass(frozen=True)
class LengthsResult(Result):
    model: str
    cluster: str
    software: str
    rows: tuple[Length, ...]

    @property
    def degrees(self) -> list[int]:
        return sorted({cp for row in self.rows for cp in row.by_cp})

    def to_dict(self) -> dict[str, Any]:
        asked = {"model": self.model, "cluster": self.cluster, "software": self.software}
        return asked | {
            "lengths": [
                {
                    "seq": row.seq,
                    "batch": row.batch,
                    "kernel": row.kernel or None,
                    "best": str(row.best.layout) if row.best else None,
                    "by_cp": [
                        {"cp": cp, "layout": str(one.layout) if one else None, "seconds": one.seconds if one else None}
                        for cp, one in row.by_cp.items()
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
            slower.append([*what, *(_loss(row, cp) for cp in self.degrees)])
            if best:
                share = f"{best.case.mfu(best.seconds, 'causal'):.1%}"
                fastest.append([*what, f"{best.seconds:.2f} s", share, str(best.layout)])
        caption = "how much slower than with the best cp, over all other choices; no: none fits; -: not tried"
        yield Table([*first, *(f">cp={cp}" for cp in self.degrees)], slower, title="cp by length", caption=caption)
        caption = "MFU: with the half of attention that a causal mask leaves"
        yield Table([*first, ">step", ">MFU", "~layout"], fastest, title="The fastest", caption=caption)


def _loss(row: Length, cp: int) -> str:
    if cp not in row.by_cp:
        return "-"
    slower = row.slower(cp)
    return "no" if slower is None else "best" if slower == 0 else f"+{slower:.1%}"


def lengths(
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
    refuse_unplanned(spec)
    if len(machines.groups) > 1:
        raise UserError(f"{machines} has mixed nodes; give one group, as cluster={machines.groups[0]}")
    if wrong := [name for name in kernels if name not in KERNELS]:
        raise UserError(f"{wrong[0]!r} is not an attention kernel; {did_you_mean(wrong[0], KERNELS)}")
    for seq in seqs:
        checked("seq", seq, within(2, TOKENS))
    stack, rows = software_of(software, machines.groups[0].accelerator), []
    for seq in seqs:
        batch = max(1, STEP // seq)
        case = Case(structs.replace(spec, context=max(spec.context, seq)), Layout(), machines, seq, batch, stack=stack)
        for kernel in kernels or ("",):
            with_it = _with(case, kernel)
            rows.append(Length(seq, batch, kernel, {cp: _fastest(with_it, cp) for cp in _degrees(case)}))
    return LengthsResult(spec.name, str(machines), stack.name, tuple(rows))


def _degrees(case: Case) -> Iterator[int]:
    """Powers of two that leave a rank enough tokens."""
    cp = 1
    while cp <= case.cluster.world and (cp == 1 or (case.seq % (2 * cp) == 0 and case.seq // cp >= FEWEST_TOKENS)):
        yield cp
        cp *= 2


def _with(case: Case, kernel: str) -> Case:
    """Every attention of the case by one kernel."""
    if not kernel:
        return case
    name = KERNELS[-2] if kernel == PEAK else kernel
    device = Device.of(case.cluster.groups[0].accelerator)
    if kernel == PEAK:
        device = replace(device, reached=structs.replace(device.reached, **{name: 1.0}))
    return replace(case, device=device, stack=case.stack.but(attention=name, cp_attention=name))


def _fastest(case: Case, cp: int) -> Option | None:
    try:
        return search(case, top=1, cp=cp).best
    except UserError:  # nothing fits, or the batch does not divide
        return None
