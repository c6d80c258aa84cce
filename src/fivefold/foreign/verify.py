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

from fivefold.foreign.adapter import AdapterFile, Layout, layout_text, parse_layout
from fivefold.foreign.causes import causes
from fivefold.foreign.certificate import Certificate
from fivefold.foreign.compare import Deviation, compare, compare_replicas
from fivefold.foreign.evidence import Cause, Evidence, ModuleRow
from fivefold.foreign.layout_proof import REPLICAS, STILL, LayoutProof
from fivefold.foreign.locate import located, module_rows
from fivefold.foreign.masks import same_masks, unlike_masks
from fivefold.foreign.measurement import (
    SEED,
    AdapterDescription,
    Device,
    Insight,
    Observation,
    OneProcess,
    RankValues,
    Settings,
)
from fivefold.foreign.repeated import RepeatedCertificate, certified, read_certificate
from fivefold.launch import processes
from fivefold.support.errors import UserError
from fivefold.support.ranges import STEPS, checked, seconds, within
from fivefold.version import __version__

TIMEOUT = 300.0  # seconds for one layout: large frameworks take long to import
STEPS_OF_PROOF = 2
_SEEDS = 2**31
_RANK = "fivefold.foreign.rank"
_MAX_WORLD = 64


def verify_adapter(
    adapter: str,
    layouts: Sequence[str | Mapping[str, Any]] = (),
    *,
    steps: int = STEPS_OF_PROOF,
    seed: int = SEED,
    device: Device = "cpu",
    timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Certificate:
    """Prove that training code from elsewhere computes in each layout what it computes in one process.

    `adapter` is FILE, FILE:NAME or the name of one that ships (docs/others.md); `layouts` are those to verify, instead
    of the adapter's own. Every step's loss, gradients and gradient norm are compared on every rank, and the parameters
    after `steps` steps, on `device`, "cpu" or "cuda". `seed` is that of weights
    and dropout, and chooses the batches. Where they differ,
    the likely cause is named. Ranks of one layout have `timeout` seconds; `progress` is called with (done, total, name)
    before each.

    >>> found = ff.verify_adapter("pipelining", ["fsdp=2"])
    >>> found.ok, found.proofs[0].layout
    (True, {'fsdp': 2})
    """
    checked("--steps", steps, within(1, STEPS))
    checked("--seed", seed, within(0, _SEEDS))
    seconds("--timeout", timeout)
    place = AdapterFile.of(adapter)
    chosen = [parse_layout(layout) for layout in layouts]
    digest = place.digest  # of what is verified, should it change meanwhile
    progress(0, 1, "the adapter")
    with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as home:
        proof = _Proof(place, Settings(steps, device, seed), timeout, Path(home))
        description = proof.describe(chosen)
        todo = list(zip(description.layouts, description.worlds, description.known, strict=True))
        progress(0, len(todo) + 1, "one process")
        reference = proof.refer()
        proofs = []
        for number, (layout, world, known) in enumerate(todo):
            progress(number + 1, len(todo) + 1, layout_text(layout))
            proofs.append(proof.prove(layout, world, known))
            if place.digest != digest:
                raise UserError(
                    f"{place.text} was changed while it was verified; verify it anew", "certificate.adapter"
                )
        return Certificate(
            adapter=place.text,
            adapter_digest=digest,
            dtype=description.dtype,
            device=device,
            steps=proof.settings.steps,
            seed=seed,
            random=reference.random,
            parameters=len(reference.weights),
            versions={"fivefold": __version__, "python": platform.python_version(), **reference.versions},
            proofs=proofs,
            threads=reference.threads,
            files=reference.files,
        )


def check_certificate(
    certificate: str | Path,
    adapter: str = "",
    *,
    timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> RepeatedCertificate:
    """Repeat what a certificate says: whether each layout still has its outcome, within its bounds.

    `certificate` is the file that `fivefold verify --adapter ... -o` wrote. One of a file's adapter needs the file,
    `adapter`: a certificate runs no code. `timeout` and `progress` are those of `ff.verify_adapter`.

    >>> import json, pathlib
    >>> file = pathlib.Path("certificate.json")
    >>> found = ff.verify_adapter("pipelining", ["fsdp=2"], steps=1)
    >>> size = file.write_text(json.dumps(found.to_dict()))
    >>> ff.check_certificate(file).verdict
    'the certificate holds'
    """
    stated = read_certificate(Path(certificate))
    certified(Path(certificate), stated, adapter)
    now = verify_adapter(
        adapter or stated["adapter"], [row["layout"] for row in stated["layouts"]], steps=stated["steps"],
        seed=stated["seed"], device=stated["device"], timeout=timeout, progress=progress,
    )  # fmt: skip
    return RepeatedCertificate(stated, now)


class _Proof:
    """One adapter's truth, and layouts held against it."""

    def __init__(self, place: AdapterFile, settings: Settings, timeout: float, home: Path):
        self.place, self.settings, self.timeout = place, settings, timeout
        self.weights = home / "weights.safetensors"
        self.insight: Insight | None = None

    def describe(self, chosen: Sequence[Layout]) -> AdapterDescription:
        try:
            [self.description] = self._run(1, "describe", self.place, chosen, self.settings.device)
        except processes.RankError as error:
            raise UserError(
                f"the adapter {self.place.text} could not be read: {_told(error)}", "adapter.read"
            ) from error
        for layout, world in zip(self.description.layouts, self.description.worlds, strict=True):
            if world > _MAX_WORLD:
                raise UserError(
                    f"the layout {layout_text(layout)} has {world} ranks; this machine tries up to {_MAX_WORLD}",
                    "adapter.ranks",
                )
        if not self.description.updates:  # without an optimizer the second step is the first with other data
            self.settings = replace(self.settings, steps=1)
        return self.description

    def refer(self) -> OneProcess:
        try:
            [self.reference] = self._run(1, "refer", self.place, self.settings, self.weights)
        except processes.RankError as error:
            raise UserError(f"one process of {self.place.text} failed: {_told(error)}", "adapter.reference") from error
        self.settings = replace(self.settings, still=self.reference.random == "dropout")
        return self.reference

    def prove(self, layout: Layout, world: int, known: Mapping[str, float]) -> LayoutProof:
        """By value; where dropout had to be off for that, then its masks and replicas with dropout on."""
        start, updates = time.perf_counter(), self.description.updates
        try:
            ranks = self._measure(layout, world, self.settings)
            noisy = self._measure(layout, world, self._watched) if self.reference.random else []
        except (processes.RankError, UserError) as error:
            details = error.details if isinstance(error, processes.RankError) else ""
            return LayoutProof(layout, world, time.perf_counter() - start, [], broken=str(error), details=details)
        deviations = compare(self.reference, ranks, self.description.dtype, updates)
        proof = LayoutProof(layout, world, time.perf_counter() - start, deviations)
        if self.reference.random:
            drops = _traces(noisy)
            if self.reference.random == "draws" and not proof.passed:
                deviations = compare_replicas(self.reference, ranks, updates)
                proof = replace(proof, deviations=deviations, compared=REPLICAS)
            elif self.reference.random == "dropout":
                copies = [found for found in compare_replicas(self.reference, noisy, updates) if not found.passed]
                proof = replace(proof, deviations=[*copies, *deviations], compared=STILL)
            wrong = unlike_masks(drops)
            proof = replace(proof, causes=wrong, unlike_masks=bool(wrong), remarks=same_masks(drops))
        if proof.compared == REPLICAS or all(deviation.passed for deviation in deviations):
            return proof
        return self._explained(proof, ranks, deviations, known)

    def _explained(
        self, proof: LayoutProof, ranks: Sequence[RankValues], by_value: Sequence[Deviation], known: Mapping[str, float]
    ) -> LayoutProof:
        """Why a layout differs from one process; the proof stands without it."""
        traces: dict[int, Observation] = {}
        with suppress(processes.RankError, UserError):
            traces = _traces(
                self._measure(proof.layout, proof.world, replace(self._watched, still=self.settings.still))
            )
        evidence = Evidence(
            proof.layout, self.reference, ranks, by_value, known, self._insight(), traces,
            dtype=self.description.dtype,
        )  # fmt: skip
        found = [*proof.causes]
        rows: list[ModuleRow] = []
        try:
            found += causes(evidence)
            found += located(evidence)
            rows += module_rows(evidence)
        except Exception as error:  # numbers of any kind come from elsewhere, and the difference is to be reported
            found.append(Cause(f"more could not be told: {type(error).__name__}: {error}", "", ""))
        return replace(proof, causes=found, modules=rows)

    def _insight(self) -> Insight | None:
        """What one process says when it is looked into; the proof stands without it."""
        if self.insight is None:
            with suppress(processes.RankError, UserError):
                [self.insight] = self._run(1, "explain", self.place, self.settings, self.weights)
        return self.insight

    @property
    def _watched(self) -> Settings:
        """One step, with dropout on, in which ranks are looked into."""
        return replace(self.settings, steps=1, watch=True, still=False)

    def _measure(self, layout: Layout, world: int, settings: Settings) -> list[RankValues]:
        return self._run(world, "measure", self.place, layout, settings, self.weights)

    def _run(self, world: int, function: str, *args: Any) -> list[Any]:
        return processes.run(world, f"{_RANK}:{function}", *args, timeout=self.timeout)


def _traces(ranks: Sequence[RankValues]) -> dict[int, Observation]:
    return {rank.rank: rank.trace for rank in ranks if rank.trace is not None}


def _told(error: processes.RankError) -> str:
    lines = [line for line in error.details.splitlines() if line.strip()]
    return f"{error}" if error.kind == "raised" or not lines else f"{error}: {lines[-1]}"
