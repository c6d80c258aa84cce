"""The Verify view of a report: what `verify --json` says of a layout, or of a sweep of them.

shown(verify("dp=2,tp=2").to_dict())
read(Path("verify.json"))           # the same, of a file; one that is something else is refused
"""

from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.documents import read_json
from fivefold.support.errors import UserError

IN_FULL = 20  # layouts of a sweep that are told in full, those that fail first


class Pair(msgspec.Struct):
    layout: float | None
    reference: float | None


class Worst(msgspec.Struct):
    name: str
    step: int
    error: float | None
    note: str
    holds: bool


class Numbers(msgspec.Struct):
    calls: float
    payload: float
    wire: float


class Sent(msgspec.Struct):
    axis: str
    kind: str
    counted: Numbers
    expected: Numbers
    holds: bool


class Held(msgspec.Struct):
    rank: int
    name: str
    expected: float
    counted: float
    holds: bool


class Proof(msgspec.Struct):
    """One layout against one process."""

    layout: str
    model: str
    variant: str
    dtype: str
    passed: bool
    problems: list[str]
    details: str
    bound: float
    losses: list[Pair]
    norms: list[Pair]
    traffic_per_step: list[Sent]
    held: list[Held]
    seconds: float
    worst_loss: Worst | None = None
    worst_norm: Worst | None = None
    worst_gradient: Worst | None = None
    worst_parameter: Worst | None = None
    worst_routing: Worst | None = None
    worst_load: Worst | None = None
    worst_bias: Worst | None = None


class Sweep(msgspec.Struct):
    passed: bool
    sampled: int
    total: int
    pairs_met: float
    failed: int
    layouts: list[Proof]


def read(path: Path) -> dict[str, Any]:
    """What a file holds that `verify --json` wrote."""
    try:
        return shown(read_json(path))
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} is not what `fivefold verify --json` prints: {error}; write one with "
            f"`fivefold verify --layout dp=2 --json > {path}`"
        ) from None


def shown(found: Any) -> dict[str, Any]:
    """The payload: a sweep's rows, and those layouts in full that fail, or that came first."""
    if not (isinstance(found, dict) and "layouts" in found):
        one = msgspec.convert(found, Proof)
        return {"title": f"{one.layout} of {one.model}", "sweep": None, "proofs": [msgspec.to_builtins(one)]}
    sweep = msgspec.convert(found, Sweep)
    full = sorted(sweep.layouts, key=lambda one: one.passed)[:IN_FULL]
    counts = {name: getattr(sweep, name) for name in ("passed", "sampled", "total", "pairs_met", "failed")}
    return {
        "title": f"{sweep.sampled} of {sweep.total} layouts",
        "sweep": counts | {"rows": [_row(one) for one in sweep.layouts]},
        "proofs": [msgspec.to_builtins(one) for one in full],
    }


def _row(one: Proof) -> dict[str, Any]:
    return {
        "layout": one.layout,
        "model": one.variant or one.model,
        "passed": one.passed,
        "seconds": one.seconds,
        "gradient": one.worst_gradient and one.worst_gradient.error,
        "parameter": one.worst_parameter and one.worst_parameter.error,
        "traffic": all(sent.holds for sent in one.traffic_per_step),
        "held": all(held.holds for held in one.held),
    }
