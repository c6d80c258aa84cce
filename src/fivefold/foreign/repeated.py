"""A certificate read, and repeated: whether the same adapter still gives what it says, layout for layout.

Whoever writes a certificate can compute its digest: it shows a changed file, and is no signature. So nothing that a
certificate says causes code to run, and what it says of names and paths is checked before it is used.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from fivefold.foreign.adapter import DTYPES, AdapterFile, Layout, layout_text, parse_layout
from fivefold.foreign.certificate import FORMAT, Certificate, digest_of
from fivefold.foreign.layout_proof import LayoutProof, Outcome, changes, failure, failures, stated_outcome
from fivefold.foreign.measurement import SEEDS, Device
from fivefold.render.blocks import Block, Cell, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_STEPS, check_range, within


@dataclass(frozen=True)
class RepeatedCertificate(Result):
    """A certificate and what the same adapter gives now. It holds if every layout has the outcome that it had, within
    the bounds that it had and for the causes that it had. It is good news only if it also says that all passed."""

    stated: Mapping[str, Any]
    now: Certificate

    @property
    def rows(self) -> list[tuple[Layout, Outcome, LayoutProof, list[str]]]:
        return [(row["layout"], stated_outcome(row), proof, changes(row, proof))
                for row, proof in zip(self.stated["layouts"], self.now.proofs, strict=True)]  # fmt: skip

    @property
    def changed_settings(self) -> list[str]:
        now = self.now.to_dict()
        return [f"{key} {self.stated[key]} then, {now[key]} now" for key in ("dtype", "parameters", "random", "steps")
                if self.stated[key] != now[key]]  # fmt: skip

    @property
    def holds(self) -> bool:
        return not self.changed_settings and not any(changed for *_, changed in self.rows)

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.holds and self.now.ok

    @property
    def changed_versions(self) -> list[str]:
        then, now = self.stated["versions"], self.now.versions
        return [
            f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]

    @property
    def verdict(self) -> str:
        if not self.holds:
            return "the certificate does not hold"
        if all(proof.passed for proof in self.now.proofs):
            return "the certificate holds"
        return f"the certificate holds, and is one of a failure: {failures(self.now.proofs)}"

    def to_dict(self) -> dict[str, Any]:
        changed = [{"layout": layout, "changes": found} for layout, _, _, found in self.rows if found]
        return {"passed": self.ok, "holds": self.holds, "verdict": self.verdict, "changed": changed,
                "settings": self.changed_settings, "versions": self.changed_versions,
                "now": self.now.to_dict()}  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.now.adapter}, certified {self.stated['created']}, again:", "bold")
        rows: list[list[str | Cell]] = [
            [layout_text(layout), then, proof.outcome,
             Cell("changed", "bad") if changed else Cell("the same", "good")]
            for layout, then, proof, changed in self.rows
        ]  # fmt: skip
        yield Table(["layout", "then", "now", ""], rows)
        for line in self.changed_settings:
            yield Text(f"another setting: {line}", "bad")
        for line in self.changed_versions:
            yield Text(f"another version: {line}")
        for layout, _, proof, changed in self.rows:
            for line in changed:
                yield Text(f"{layout_text(layout)}: {line}", "bad")
            if changed and not proof.passed:
                yield from failure(proof)
        yield Text(self.verdict, "good" if self.ok else "bad")


# ---- reading --------------------------------------------------------------------------------------------------------

_WANTED: dict[str, type | tuple[type, ...]] = {
    "adapter": str, "adapter_sha256": str, "files": dict, "dtype": str, "device": str, "steps": int, "seed": int,
    "random": str, "parameters": int, "versions": dict, "created": str, "layouts": list,
}  # fmt: skip
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST = 200  # characters of an adapter's name


def read_certificate(file: Path) -> dict[str, Any]:
    """A certificate as it was written; UserError for anything else."""
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a certificate: {error}", "certificate.read") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(f"{file} is not a certificate that `fivefold verify --adapter` wrote", "certificate.format")
    odd = [key for key, kind in _WANTED.items() if not isinstance(body.get(key), kind) or isinstance(body[key], bool)]
    if odd:
        raise UserError(f"{file} lacks {odd[0]}, or has something else there", "certificate.format")
    if body.get("sha256") != digest_of(body):
        raise UserError(f"{file} was changed after it was written: its digest is another", "certificate.digest")
    if problem := _problem(body):
        raise UserError(f"{file} {problem}", "certificate.format")
    for row in body["layouts"]:
        parse_layout(row["layout"])
    return body


def _problem(body: Mapping[str, Any]) -> str:
    """What is wrong with a certificate whose fields are there."""
    rows, adapter = body["layouts"], body["adapter"]
    if not rows:
        return "has no layouts: it says nothing that could be repeated"
    if not all(isinstance(row, dict) and isinstance(row.get("layout"), dict) and row["layout"] for row in rows):
        return "has a layout without its settings"
    if not all(isinstance(row.get("passed"), bool) for row in rows):
        return "has a layout without its outcome"
    for key, limits in (("steps", within(1, MAX_STEPS)), ("seed", within(0, SEEDS))):
        try:
            check_range(key, body[key], limits)
        except UserError as error:
            return f"says something odd: {error}"
    if not adapter.isprintable() or len(adapter) > _LONGEST:
        return "has no name of an adapter"
    if not all(isinstance(value, str) and _SHA256.fullmatch(value) for value in _digests(body)):
        return "has no digest of the adapter, or of a file beside it"
    if body["device"] not in get_args(Device):
        return f"names the device {body['device']!r}; there are cpu and cuda"
    if body["dtype"] not in DTYPES:
        return f"names the dtype {body['dtype']!r}; there are {', '.join(DTYPES)}"
    if outside := [name for name in body["files"] if PurePosixPath(name).is_absolute() or ".." in name]:
        return f"names the file {outside[0]!r}, which is not beside the adapter"
    return ""


def _digests(body: Mapping[str, Any]) -> list[Any]:
    return [body["adapter_sha256"], *body["files"].values()]


def certified(certificate: Path, stated: Mapping[str, Any], adapter: str) -> AdapterFile:
    """The adapter that a certificate is of: the one that the user names, or else one that ships, and no other. What a
    certificate names by itself could lie beside it, and be of its author."""
    if not adapter and not _ships(stated["adapter"]):
        raise UserError(
            f"{certificate} is of the adapter {stated['adapter']}; name the file that it is: --adapter FILE",
            "certificate.adapter",
        )
    place = AdapterFile.of(adapter or stated["adapter"])
    if place.digest != stated["adapter_sha256"]:
        raise UserError(
            f"{place.text} is not the adapter of {certificate}: its SHA-256 begins with {place.digest[:12]}, and the "
            f"certificate's with {stated['adapter_sha256'][:12]}; verify it anew",
            "certificate.adapter",
        )
    if place.name != (name := stated["adapter"].rpartition(":")[2] if ":" in stated["adapter"] else ""):
        file = adapter.removesuffix(f":{place.name}")
        raise UserError(
            f"{certificate} is of {stated['adapter']}, and --adapter {adapter} is another of that file; "
            f"nearest: --adapter {f'{file}:{name}' if name else file}",
            "certificate.adapter",
        )
    for beside, digest in stated["files"].items():
        file = place.file.parent / beside
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise UserError(
                f"{beside}, which {place.text} imports, is not that of {certificate}; verify it anew",
                "certificate.adapter",
            )
    return place


def _ships(text: str) -> bool:
    """Whether this names an adapter that ships, or an object in one, and nothing else."""
    try:
        return AdapterFile.of(text).ships
    except UserError:
        return False
