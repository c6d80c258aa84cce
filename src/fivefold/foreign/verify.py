"""Compares somebody else's training code with one process of the same code, in every layout that its adapter names.

    verify_adapter("my_adapter.py").ok

No torch in this process, and none of the adapter's code: ranks import both.
"""

import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.foreign.adapter import AdapterFile, Layout, layout_text, parse_layout, shipped_names
from fivefold.foreign.causes import causes
from fivefold.foreign.certificate import Certificate, LayoutProof, RepeatedCertificate, read_certificate
from fivefold.foreign.compare import compare, compare_replicas
from fivefold.foreign.evidence import Evidence
from fivefold.foreign.locate import located, unlike_masks
from fivefold.foreign.measurement import (
    AdapterDescription,
    Device,
    Insight,
    Observation,
    OneProcess,
    RankValues,
    Settings,
)
from fivefold.launch import processes
from fivefold.support.errors import UserError
from fivefold.support.ranges import STEPS, checked, seconds, within
from fivefold.version import __version__

TIMEOUT = 300.0  # seconds for one layout: large frameworks take long to import
STEPS_OF_PROOF = 2
_RANK = "fivefold.foreign.rank"
_MAX_WORLD = 64


def verify_adapter(
    adapter: str,
    layouts: Sequence[str | Mapping[str, Any]] = (),
    *,
    steps: int = STEPS_OF_PROOF,
    device: Device = "cpu",
    timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Certificate:
    """Prove that training code from elsewhere computes in each layout what it computes in one process.

    `adapter` is FILE, FILE:NAME or the name of one that ships; `layouts` are those to verify, instead of the adapter's
    own. Every step's loss, gradients and gradient norm are compared on every rank, and the parameters after `steps`
    steps. Where they differ, the likely cause is named. Ranks of one layout have `timeout` seconds.
    """
    checked("--steps", steps, within(1, STEPS))
    seconds("--timeout", timeout)
    place = AdapterFile.of(adapter)
    chosen = [parse_layout(layout) for layout in layouts]
    progress(0, 1, "the adapter")
    with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as home:
        proof = _Proof(place, steps, device, timeout, Path(home))
        description, worlds = proof.describe(chosen)
        todo = list(zip(chosen or description.layouts, worlds, strict=True))
        progress(0, len(todo) + 1, "one process")
        reference = proof.refer()
        proofs = []
        for number, (layout, world) in enumerate(todo):
            progress(number + 1, len(todo) + 1, layout_text(layout))
            proofs.append(proof.prove(layout, world))
        return Certificate(
            adapter=place.text,
            adapter_digest=place.digest,
            dtype=description.dtype,
            device=device,
            steps=proof.steps,
            random=reference.random,
            parameters=len(reference.weights),
            versions={"fivefold": __version__, "python": platform.python_version(), **reference.versions},
            proofs=proofs,
        )


def check_certificate(
    certificate: str | Path,
    adapter: str = "",
    *,
    timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> RepeatedCertificate:
    """Repeat what a certificate says. One of a file's adapter needs the file, `adapter`: a certificate runs no code."""
    stated = read_certificate(Path(certificate))
    if not adapter and ":" not in stated["adapter"] and stated["adapter"] not in shipped_names():
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
    now = verify_adapter(
        adapter or stated["adapter"], [row["layout"] for row in stated["layouts"]], steps=stated["steps"],
        device=stated["device"], timeout=timeout, progress=progress,
    )  # fmt: skip
    return RepeatedCertificate(stated, now)


class _Proof:
    """One adapter's truth, and layouts held against it."""

    def __init__(self, place: AdapterFile, steps: int, device: Device, timeout: float, home: Path):
        self.place, self.steps, self.device, self.timeout = place, steps, device, timeout
        self.weights = home / "weights.safetensors"
        self.insight: Insight | None = None

    def describe(self, chosen: Sequence[Layout]) -> tuple[AdapterDescription, list[int]]:
        try:
            [self.description] = self._run(1, "describe", self.place)
            worlds = self._run(1, "world_of", self.place, chosen)[0] if chosen else list(self.description.worlds)
        except processes.RankError as error:
            raise UserError(
                f"the adapter {self.place.text} could not be read: {_told(error)}", "adapter.read"
            ) from error
        for layout, world in zip(chosen or self.description.layouts, worlds, strict=True):
            if world > _MAX_WORLD:
                raise UserError(
                    f"the layout {layout_text(layout)} has {world} ranks; this machine tries up to {_MAX_WORLD}",
                    "adapter.ranks",
                )
        return self.description, worlds

    def refer(self) -> OneProcess:
        if not self.description.updates:
            self.steps = 1  # without an optimizer the second step is the first with other data
        try:
            [self.reference] = self._run(1, "refer", self.place, self._settings, self.weights)
        except processes.RankError as error:
            raise UserError(f"one process of {self.place.text} failed: {_told(error)}", "adapter.reference") from error
        return self.reference

    def prove(self, layout: Layout, world: int) -> LayoutProof:
        start = time.perf_counter()
        try:
            ranks = self._measure(layout, world)
        except (processes.RankError, UserError) as error:
            details = error.details if isinstance(error, processes.RankError) else ""
            return LayoutProof(layout, world, time.perf_counter() - start, [], broken=str(error), details=details)
        deviations = compare(self.reference, ranks, self.description.dtype, self.description.updates)
        taken = time.perf_counter() - start
        if all(deviation.passed for deviation in deviations):
            return LayoutProof(layout, world, taken, deviations)
        traces = self._traces(layout, world)
        if self.reference.random:
            deviations = compare_replicas(self.reference, ranks, self.description.updates)
            return LayoutProof(layout, world, taken, deviations, unlike_masks(traces), random=True)
        evidence = Evidence(
            layout, self.reference, ranks, deviations, self.description.known, self._insight(), traces,
            dtype=self.description.dtype,
        )  # fmt: skip
        return LayoutProof(layout, world, taken, deviations, [*causes(evidence), *located(evidence)])

    def _insight(self) -> Insight | None:
        """What one process says when it is looked into; the proof stands without it."""
        if self.insight is None:
            with suppress(processes.RankError, UserError):
                [self.insight] = self._run(1, "explain", self.place, self._settings, self.weights)
        return self.insight

    def _traces(self, layout: Layout, world: int) -> dict[int, Observation]:
        """What the ranks of a layout say when they are looked into."""
        with suppress(processes.RankError, UserError):
            watched = self._measure(layout, world, replace(self._settings, steps=1, watch=True))
            return {rank.rank: rank.trace for rank in watched if rank.trace is not None}
        return {}

    def _measure(self, layout: Layout, world: int, settings: Settings | None = None) -> list[RankValues]:
        settings = settings or self._settings
        return self._run(world, "measure", self.place, layout, settings, self.weights)

    @property
    def _settings(self) -> Settings:
        return Settings(self.steps, self.device)

    def _run(self, world: int, function: str, *args: Any) -> list[Any]:
        return processes.run(world, f"{_RANK}:{function}", *args, timeout=self.timeout)


def _told(error: processes.RankError) -> str:
    lines = [line for line in error.details.splitlines() if line.strip()]
    return f"{error}" if error.kind == "raised" or not lines else f"{error}: {lines[-1]}"
