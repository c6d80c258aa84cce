"""A certificate: what was verified, with which versions, how far off it was, and within which bounds; one JSON file.

It holds no code and no path: to repeat it one names the adapter, whose digest must be the certificate's.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fivefold.foreign.layout_proof import (
    QUANTITIES,
    STILL,
    LayoutProof,
    failure,
    failures,
    modules_table,
    proofs_table,
)
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.scene import GREEN, GREY, RED, Rect, Scene, TextMark, rgb, text_on, text_width
from fivefold.support.text import plural

FORMAT = "fivefold certificate 2"
_BADGE_LABEL, _BADGE_SIZE, _BADGE_HEIGHT = "verified", 11.0, 20.0
# The first of them that was imported stands in the headline: transformers imports accelerate, and Megatron-Core both.
_FRAMEWORKS = ("megatron-core", "torchtitan", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True)
class Certificate(Result):
    adapter: str
    adapter_digest: str
    dtype: str
    device: str
    steps: int
    seed: int
    random: str  # "", "dropout", or "draws": the model draws random numbers
    parameters: int
    versions: Mapping[str, str]
    proofs: Sequence[LayoutProof]
    threads: int = 1  # of one process; each rank has as many, or its share of the cores
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of what the adapter imports from beside itself
    created: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return bool(self.proofs) and all(proof.passed for proof in self.proofs)

    @property
    def worst(self) -> float:
        """Of all values that were compared with one process."""
        errors = [deviation.error for proof in self.proofs if proof.by_value for deviation in proof.deviations]
        return max(errors, default=math.nan)

    @property
    def framework(self) -> str:
        name = next((name for name in _FRAMEWORKS if name in self.versions), "torch")
        return f"{name} {self.versions.get(name, '')}"

    @property
    def summary(self) -> str:
        """One line for a README: of how many layouts the values were compared, and of how many they were not."""
        passed = [proof for proof in self.proofs if proof.passed]
        if not self.ok:
            return f"{failures(self.proofs)} ({self.framework})"
        by_value = sum(proof.by_value for proof in passed)
        parts = []
        if by_value:
            still = " without dropout" if any(proof.compared == STILL for proof in passed) else ""
            parts.append(f"{plural(by_value, 'layout')} = one process{still} within {self.worst:.1e}")
        if others := len(passed) - by_value:
            parts.append(f"in {plural(others, 'layout')} only replicas and masks were compared, and agree")
        return f"{'; '.join(parts)} ({self.dtype}, {self.framework})"

    def to_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "format": FORMAT,
            "passed": self.ok,
            "summary": self.summary,
            "adapter": self.adapter,
            "adapter_sha256": self.adapter_digest,
            "files": dict(self.files),
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "steps": self.steps,
            "seed": self.seed,
            "random": self.random,
            "parameters": self.parameters,
            "versions": dict(self.versions),
            "created": self.created,
            "layouts": [proof.to_dict() for proof in self.proofs],
        }
        return body | {"sha256": digest_of(body)}

    def blocks(self) -> Iterator[Block]:
        size = f"{self.parameters:,} parameters in {self.dtype}, {plural(self.steps, 'step')}"
        yield Text(f"{self.adapter} against one process: {size}", "bold")
        yield proofs_table(self.proofs)
        if self.random:
            yield Text(_RANDOM[self.random])
        for remark in dict.fromkeys(remark for proof in self.proofs for remark in proof.remarks):
            yield Text(remark)
        for proof in self.proofs:
            if not proof.passed:
                yield from failure(proof)
        yield Text(self.summary, "good" if self.ok else "bad")

    def record(self) -> Iterator[Block]:
        """What a page has beyond the report: where a layout differs, bounds, versions, digests."""
        for proof in self.proofs:
            if proof.modules:
                yield modules_table(proof)
        rows = []
        for quantity in QUANTITIES:
            worst = [found for proof in self.proofs if (found := proof.worst(quantity)) is not None]
            if worst:
                largest = max(worst, key=lambda deviation: deviation.error)
                rows.append([quantity, f"{largest.error:.1e}", f"{largest.tolerance:.1e}", largest.name or "-"])
        yield Table(["quantity", ">largest error", ">bound", "of"], rows, title="Errors and bounds")
        settings = {"device": self.device, "threads": str(self.threads), "dtype": self.dtype, "seed": str(self.seed),
                    "steps": str(self.steps), "created": self.created}  # fmt: skip
        yield Table(["setting", "value"], [[*row] for row in settings.items()], title="How")
        yield Table(["package", "version"], [[*row] for row in self.versions.items()], title="Versions")
        digests = {self.adapter: self.adapter_digest, **self.files, "this certificate": str(self.to_dict()["sha256"])}
        yield Table(["of", "SHA-256"], [[*row] for row in digests.items()], title="Digests")

    def scene(self) -> Scene:
        """A badge for a README: what a row of them has, a label and a few words on a colour."""
        passed = sum(proof.passed for proof in self.proofs)
        by_value = sum(proof.passed and proof.by_value for proof in self.proofs)
        words = f"{passed} of {plural(len(self.proofs), 'layout')}"
        if self.ok and by_value == passed:
            words = f"{plural(passed, 'layout')} = one process"
        left, right = (text_width(text, _BADGE_SIZE) + 16 for text in (_BADGE_LABEL, words))
        middle, fill = _BADGE_HEIGHT / 2, GREEN if self.ok else RED
        return Scene(left + right, _BADGE_HEIGHT, self.summary, [
            Rect(0, 0, left, _BADGE_HEIGHT, GREY),
            Rect(left, 0, right, _BADGE_HEIGHT, fill),
            TextMark(left / 2, middle, _BADGE_LABEL, _BADGE_SIZE, "middle", text_on(rgb(GREY))),
            TextMark(left + right / 2, middle, words, _BADGE_SIZE, "middle", text_on(rgb(fill))),
        ])  # fmt: skip


_RANDOM = {
    "dropout": "The model draws dropout: values are compared with dropout off, and then, with dropout on, replicas and "
    "masks.",
    "draws": "Another seed gives another loss, also without dropout: the model draws random numbers. Where a layout "
    "draws others, only replicas and the masks of dropout are compared.",
}


def digest_of(body: Mapping[str, Any]) -> str:
    """Of everything else in a certificate."""
    plain = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
