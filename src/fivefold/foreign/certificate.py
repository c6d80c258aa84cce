"""A certificate: what was verified, with which versions, how far off it was, and within which bounds; one JSON file.

It holds no code and no path: to repeat it one names the adapter, whose digest must be the certificate's.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from fivefold.foreign.adapter import Layout, layout_text
from fivefold.foreign.compare import Deviation
from fivefold.foreign.evidence import Cause
from fivefold.foreign.measurement import Device
from fivefold.render.blocks import Block, Cell, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.text import counted

FORMAT = "fivefold certificate 1"
_QUANTITIES = ("loss", "gradient", "norm", "parameter")
_SHOWN = 3  # deviations of a failing layout that are printed


@dataclass(frozen=True)
class LayoutProof:
    layout: Layout
    world: int
    seconds: float
    deviations: Sequence[Deviation]  # the worst first
    causes: Sequence[Cause] = ()
    broken: str = ""  # why there are no numbers
    details: str = ""
    random: bool = False  # only replicas and masks were compared

    @property
    def passed(self) -> bool:
        told = self.random and self.causes
        return not self.broken and not told and all(deviation.passed for deviation in self.deviations)

    @property
    def failed(self) -> list[Deviation]:
        return [deviation for deviation in self.deviations if not deviation.passed]

    def worst(self, quantity: str) -> Deviation | None:
        """The largest multiple of its tolerance."""
        return next((deviation for deviation in self.deviations if deviation.quantity == quantity), None)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"layout": self.layout, "ranks": self.world, "passed": self.passed}
        if self.broken:
            return row | {"broken": self.broken}
        for quantity in _QUANTITIES:
            if (worst := self.worst(quantity)) is not None:
                row[quantity] = {"error": _finite(worst.error), "bound": worst.tolerance, "name": worst.name}
        if not self.passed:
            row["failed"] = [str(deviation) for deviation in self.failed]
            row["causes"] = [{key: value for key, value in vars(cause).items() if value} for cause in self.causes]
        return row | ({"compared": "replicas and dropout masks"} if self.random else {})


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else "infinite"


@dataclass(frozen=True)
class Certificate(Result):
    adapter: str
    adapter_digest: str
    dtype: str
    device: str
    steps: int
    random: bool
    parameters: int
    versions: Mapping[str, str]
    proofs: Sequence[LayoutProof]
    created: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return all(proof.passed for proof in self.proofs)

    @property
    def worst(self) -> float:
        errors = [deviation.error for proof in self.proofs for deviation in proof.deviations]
        return max(errors, default=math.nan)

    @property
    def summary(self) -> str:
        """One line for a README."""
        passed = sum(proof.passed for proof in self.proofs)
        framework = next((f"{name} {number}" for name, number in self.versions.items() if name in _FRAMEWORKS), "")
        framework = framework or f"torch {self.versions.get('torch', '')}"
        if not self.ok:
            count, all_of_them = len(self.proofs) - passed, counted(len(self.proofs), "layout")
            return f"{count} of {all_of_them} differ{'s' if count == 1 else ''} from one process ({framework})"
        return f"{counted(passed, 'layout')} = one process within {self.worst:.1e} ({self.dtype}, {framework})"

    def to_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "format": FORMAT,
            "passed": self.ok,
            "summary": self.summary,
            "adapter": self.adapter,
            "adapter_sha256": self.adapter_digest,
            "dtype": self.dtype,
            "device": self.device,
            "steps": self.steps,
            "parameters": self.parameters,
            "versions": dict(self.versions),
            "created": self.created,
            "layouts": [proof.to_dict() for proof in self.proofs],
        }
        return body | {"sha256": digest_of(body)}

    def blocks(self) -> Iterator[Block]:
        size = f"{self.parameters:,} parameters in {self.dtype}, {counted(self.steps, 'step')}"
        yield Text(f"{self.adapter} against one process: {size}", "bold")
        yield Table(
            ["layout", ">ranks", ">loss", ">gradient", ">norm", ">parameter", ""], [_row(p) for p in self.proofs]
        )
        if self.random:
            yield Text(
                "Another seed gives another loss: the model draws random numbers. Where a layout draws others, only "
                "replicas and the masks of dropout are compared."
            )
        for proof in self.proofs:
            if not proof.passed:
                yield from _failure(proof)
        yield Text(self.summary, "good" if self.ok else "bad")


_FRAMEWORKS = ("megatron-core", "torchtitan", "transformers", "accelerate", "deepspeed")


def digest_of(body: Mapping[str, Any]) -> str:
    """Of everything else in a certificate."""
    plain = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _row(proof: LayoutProof) -> list[str | Cell]:
    cells = []
    for quantity in _QUANTITIES:
        worst = proof.worst(quantity)
        cells.append("-" if worst is None else f"{worst.error:.1e}" if math.isfinite(worst.error) else "missing")
    outcome = Cell("passed", "good") if proof.passed else Cell("broken" if proof.broken else "differs", "bad")
    return [layout_text(proof.layout), str(proof.world), *cells, outcome]


def _failure(proof: LayoutProof) -> Iterator[Block]:
    yield Text(f"{layout_text(proof.layout)}:", "bad")
    if proof.broken:
        yield Text(f"  {proof.broken}")
        if proof.details:
            yield Text("\n".join(f"  {line}" for line in proof.details.splitlines()[-12:]), "dim")
        return
    order = {quantity: place for place, quantity in enumerate(_QUANTITIES)}
    failed = sorted(proof.failed, key=lambda deviation: (deviation.step, order[deviation.quantity]))  # where it begins
    for deviation in failed[:_SHOWN]:
        yield Text(f"  {deviation}")
    if len(failed) > _SHOWN:
        yield Text(f"  {len(failed) - _SHOWN} more differ; --json has them all")
    for cause in proof.causes:
        yield Text(f"  cause: {cause.text}", "bold")
        if cause.likely:
            yield Text(f"    likely: {cause.likely}")
        if cause.read:
            yield Text(f"    read: {cause.read}")


@dataclass(frozen=True)
class RepeatedCertificate(Result):
    """A certificate and what the same adapter gives now. It holds if every layout has the outcome that it had."""

    stated: Mapping[str, Any]
    now: Certificate

    @property
    def rows(self) -> list[tuple[Layout, bool, LayoutProof]]:
        return [(row["layout"], bool(row.get("passed")), proof)
                for row, proof in zip(self.stated["layouts"], self.now.proofs, strict=True)]  # fmt: skip

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return all(then == proof.passed for _, then, proof in self.rows)

    @property
    def changed_versions(self) -> list[str]:
        then, now = self.stated.get("versions") or {}, self.now.versions
        names = sorted({*then, *now})
        return [
            f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in names
            if then.get(name) != now.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        changed = [layout for layout, then, proof in self.rows if then != proof.passed]
        return {"passed": self.ok, "changed": changed, "versions": self.changed_versions, "now": self.now.to_dict()}

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.now.adapter}, certified {self.stated.get('created', '')}, again:", "bold")
        words = {True: "passed", False: "differs"}
        rows: list[list[str | Cell]] = [
            [layout_text(layout), words[then], words[proof.passed],
             Cell("the same", "good") if then == proof.passed else Cell("changed", "bad")]
            for layout, then, proof in self.rows
        ]  # fmt: skip
        yield Table(["layout", "then", "now", ""], rows)
        for line in self.changed_versions:
            yield Text(f"another version: {line}")
        for _, then, proof in self.rows:
            if then and not proof.passed:
                yield from _failure(proof)
        yield Text(
            "the certificate holds" if self.ok else "the certificate does not hold", "good" if self.ok else "bad"
        )


# ---- repeating one --------------------------------------------------------------------------------------------------


def read_certificate(file: Path) -> dict[str, Any]:
    """A certificate as it was written; UserError for anything else."""
    try:
        body = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} cannot be read as a certificate: {error}", "certificate.read") from None
    wanted = {"format": str, "adapter": str, "adapter_sha256": str, "steps": int, "device": str, "layouts": list}
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(f"{file} is not a certificate that `fivefold verify --adapter` wrote", "certificate.format")
    if odd := [key for key, kind in wanted.items() if not isinstance(body.get(key), kind)]:
        raise UserError(f"{file} lacks {odd[0]}, or has something else there", "certificate.format")
    if body.get("sha256") != digest_of(body):
        raise UserError(f"{file} was changed after it was written: its digest is another", "certificate.digest")
    if not all(isinstance(row, dict) and isinstance(row.get("layout"), dict) for row in body["layouts"]):
        raise UserError(f"{file} has a layout without its settings", "certificate.format")
    if not re.fullmatch(r"[0-9a-f]{64}", body["adapter_sha256"]):
        raise UserError(f"{file} has no digest of the adapter", "certificate.format")
    if body["device"] not in get_args(Device):
        raise UserError(f"{file} names the device {body['device']!r}; there are cpu and cuda", "certificate.format")
    return body
