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

from fivefold.foreign.adapter import MULTIPLY, AdapterFile, Layout, layout_text, parse_layout
from fivefold.foreign.causes import causes
from fivefold.foreign.certificate import Certificate
from fivefold.foreign.compare import Deviation, compare, compare_replicas
from fivefold.foreign.evidence import Cause, Evidence, ModuleRow
from fivefold.foreign.layout_proof import REPLICAS, STILL, LayoutProof
from fivefold.foreign.locate import located, module_rows
from fivefold.foreign.masks import same_masks, unlike_masks
from fivefold.foreign.measurement import (
    SEED,
    SEEDS,
    AdapterDescription,
    Device,
    Insight,
    Observation,
    OneProcess,
    RankValues,
    Settings,
    joined,
)
from fivefold.foreign.repeated import RepeatedCertificate, certified, read_certificate
from fivefold.launch import processes
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_STEPS, check_range, seconds, within
from fivefold.support.text import did_you_mean, first_of_many, nearest
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
    seed: int = SEED,
    device: Device = "cpu",
    timeout: float = TIMEOUT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Certificate:
    """Prove that training code from elsewhere computes in each layout what it computes in one process.

    `adapter` is FILE, FILE:NAME or the name of one that ships (docs/others.md); `layouts` are those to verify, instead
    of the adapter's own. Every step's loss, gradients and gradient norm are compared on every rank, and the parameters
    after `steps` steps, on `device`, "cpu" or "cuda"; where they differ, the likely cause is named. `seed` is that of
    weights and dropout, and chooses the batches. Ranks of one layout have `timeout` seconds for each step. `progress`
    is called before each layout with how many are done, how many there are, and its name.

    >>> found = ff.verify_adapter("pipelining", ["fsdp=2"])
    >>> found.ok, found.proofs[0].layout
    (True, {'fsdp': 2})
    """
    check_range("--steps", steps, within(1, MAX_STEPS))
    check_range("--seed", seed, within(0, SEEDS))
    seconds("--timeout", timeout)
    place = AdapterFile.of(adapter)
    chosen = [parse_layout(layout) for layout in layouts]
    digest = place.digest  # of what is verified, should it change meanwhile
    progress(0, 1, "the adapter")
    with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as home:
        proof = AdapterProof(place, Settings(steps, device, seed), timeout, Path(home))
        description = proof.describe(chosen)
        todo = description.cases
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


class AdapterProof:
    """One adapter's truth, and layouts held against it: `describe` and `refer` once, then `prove` for each layout."""

    def __init__(self, place: AdapterFile, settings: Settings, timeout: float, home: Path):
        self.place, self.settings, self.timeout = place, settings, timeout
        self.weights = home / "weights.safetensors"
        self.insight: Insight | None = None

    def describe(self, chosen: Sequence[Layout]) -> AdapterDescription:
        try:
            [self.description] = self._run(1, "describe", self.place, chosen, self.settings.device)
        except processes.RankError as error:
            raise UserError(
                f"the adapter {self.place.text} could not be read: {_told(error, self.place)}", "adapter.read"
            ) from error
        for layout, world in zip(self.description.layouts, self.description.worlds, strict=True):
            if world == 1:
                raise UserError(_undivided(layout), "adapter.layout")
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
            raise UserError(
                f"one process of {self.place.text} failed: {_told(error, self.place)}", "adapter.reference"
            ) from error
        self.settings = replace(self.settings, still=self.reference.random == "dropout")
        return self.reference

    def prove(self, layout: Layout, world: int, known: Mapping[str, float]) -> LayoutProof:
        """By value; where dropout had to be off for that, then its masks and replicas with dropout on."""
        start, updates = time.perf_counter(), self.description.updates
        parts: list[list[RankValues]] = []
        try:
            ranks = self._measure(layout, world, self.settings, parts)
            noisy = self._measure(layout, world, self._watched) if self.reference.random else []
        except (processes.RankError, UserError) as error:
            details, ended, stacks = "", "".join(error.codes[:1]) if isinstance(error, UserError) else "", {}
            if isinstance(error, processes.RankError):
                details, ended = error.details, error.kind
                stacks = {end.rank: end.stack for end in error.ends if end.kind == "hung"}
            deviations = self._until_it_failed(parts)
            return LayoutProof(
                layout, world, time.perf_counter() - start, deviations, broken=_said(error), ended=ended,
                details=details, stacks=stacks, remarks=self._remarks,
            )  # fmt: skip
        if (unlike := _unlike_batches(self.reference, ranks)) is not None:
            broken = (
                f"batch(step) is not the same on rank {unlike} as in one process; it must be the same on all ranks, in "
                "every layout"
            )
            return LayoutProof(layout, world, time.perf_counter() - start, [], broken=broken)
        deviations = compare(self.reference, ranks, self.description.dtype, updates)
        proof = LayoutProof(layout, world, time.perf_counter() - start, deviations, remarks=self._remarks)
        if self.reference.random:
            drops = _traces(noisy)
            if self.reference.random == "draws" and not proof.passed:
                deviations = compare_replicas(self.reference, ranks, updates)
                proof = replace(proof, deviations=deviations, compared=REPLICAS)
            elif self.reference.random == "dropout":
                copies = [found for found in compare_replicas(self.reference, noisy, updates) if not found.passed]
                proof = replace(proof, deviations=[*copies, *deviations], compared=STILL)
            wrong = unlike_masks(drops)
            remarks = [*proof.remarks, *same_masks(drops)]
            proof = replace(proof, causes=wrong, unlike_masks=bool(wrong), remarks=remarks)
        if proof.compared == REPLICAS or all(deviation.passed for deviation in deviations):
            return proof
        return self._explained(proof, ranks, deviations, known)

    def _until_it_failed(self, parts: Sequence[Sequence[RankValues]]) -> list[Deviation]:
        """What all ranks measured before one failed: what is wrong there may be why."""
        if not parts or self.reference.random == "draws":
            return []
        ranks = [joined(own) for own in zip(*parts, strict=True)]
        if _unlike_batches(self.reference, ranks) is not None:
            return []
        reference = self.reference.until(len(ranks[0].losses), len(ranks[0].norms))
        return compare(reference, ranks, self.description.dtype, self.description.updates)

    @property
    def _remarks(self) -> list[str]:
        without = first_of_many(self.reference.ungraded)
        return [f"no gradient in one process, so none is compared: {without}"] if without else []

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

    def _measure(
        self, layout: Layout, world: int, settings: Settings, parts: list[list[RankValues]] | None = None
    ) -> list[RankValues]:
        """What each rank has measured; `parts` gets the parts of it that all ranks have come to."""
        parts = [] if parts is None else parts
        arguments = (self.place, layout, settings, self.weights)
        processes.run(world, f"{_RANK}:measure", *arguments, timeout=self.timeout, each=parts.append)
        return [joined(own) for own in zip(*parts, strict=True)]

    def _run(self, world: int, function: str, *args: Any) -> list[Any]:
        return processes.run(world, f"{_RANK}:{function}", *args, timeout=self.timeout)


def _undivided(layout: Layout) -> str:
    """Why a layout of one rank is none to verify, and which word may have been meant."""
    if not layout:
        return "a layout is empty, and so one process itself, with which layouts are compared; it should be like dp=2"
    hints = [did_you_mean(key, MULTIPLY) for key in layout if key not in MULTIPLY and nearest(key, MULTIPLY)]
    return "; ".join([f"the layout {layout_text(layout)} is 1 rank: nothing is divided", *hints[:1]])


def _traces(ranks: Sequence[RankValues]) -> dict[int, Observation]:
    return {rank.rank: rank.trace for rank in ranks if rank.trace is not None}


def _unlike_batches(reference: OneProcess, ranks: Sequence[RankValues]) -> int | None:
    """The first rank whose batches are not those of one process."""
    return next((rank.rank for rank in ranks if list(rank.batches) != reference.batches[: len(rank.batches)]), None)


def _said(error: Exception) -> str:
    """An error of a rank; an exit code that is usual for success needs a word more."""
    silent = isinstance(error, processes.RankError) and error.kind == "died" and error.error == "exit code 0"
    return f"{error}: the adapter exited before its last step" if silent else f"{error}"


def _told(error: processes.RankError, place: AdapterFile) -> str:
    """The same of one process, in one line: with the adapter's line that raised it, or the last that was printed."""
    lines = [line for line in error.details.splitlines() if line.strip()]
    if error.kind != "raised":
        return f"{_said(error)}: {lines[-1]}" if lines else _said(error)
    own = [line.strip().split(", ")[1] for line in lines if line.strip().startswith(f'File "{place.file}", line ')]
    return f"{error} ({place.file.name}, {own[-1]})" if own else f"{error}"
