"""`fivefold bench train`: times the steps of the trainer, and in turns with it those of other systems.

    measure(["llama3-8b", "model.layers=12"], against="hf,fp8", steps=10)

Two systems seldom fit into a GPU's memory at once, so each turn is a process of its own.
"""

import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs

from fivefold.bench.comparison import of_one_process, only_ours, torchtitan_problems
from fivefold.bench.harness import HUGGING_FACE, OURS, OnProgress, choices, ratio, refuse, table, too_small, turns
from fivefold.hardware.accelerators import find_accelerator
from fivefold.job.config import Job, TraceConfig
from fivefold.job.preflight import run_directory_problems
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.text import bytes_text, plural, si

CPU = "CPU"
_TIMEOUT_S = 24 * 3600.0  # seconds: in practice no limit, the user ends a measurement that takes too long
TORCHTITAN, TORCHTITAN_BF16 = "torchtitan", "torchtitan, all bf16"
PEERS = (HUGGING_FACE, TORCHTITAN, TORCHTITAN_BF16)
AGAINST = {
    "fp8": "fivefold, 8-bit products",
    "fp8_experts": "fivefold, 8-bit experts",
    "deterministic": "fivefold, same bits",
    "eager": "fivefold, eager",
    "hf": HUGGING_FACE,
    "torchtitan": TORCHTITAN,
    "torchtitan_bf16": TORCHTITAN_BF16,
}
TIME_COLUMNS = {
    "~system": "system", ">ms/step": "step:.1f", ">from": "from:.1f", ">to": "to:.1f", ">tokens/s": "rate:,.0f",
    ">MFU": "mfu:.1%", ">faster": "faster", ">memory": "memory",
}  # fmt: skip
START_COLUMNS = {
    "~system": "system", "~parameters": "parameters", "~compiled": "compiled",
    ">first step, s": "first:.1f", ">first loss": "loss:.4f",
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was saved between two steps."""

    bytes: int
    snapshot: float  # seconds of the call; a GPU goes on copying during the next step, whose update waits for it
    writing: float  # seconds from the end of the call to the manifest
    beside: list[float]  # seconds of the steps while it is written; the first two include waits for the snapshot


@dataclass(frozen=True)
class TrainTurn:
    """The steps of one system in one turn."""

    device: str
    torch: str
    seconds: list[float]  # from one step's end to the next one's
    memory: int  # bytes at the peak
    first: float  # seconds of the first step, compilation included
    loss: float  # of the first step: all systems start from the same weights and take the same tokens
    graphs: int  # that were compiled
    breaks: dict[str, int]  # graph breaks by reason
    parameters: str  # dtypes of the parameters and their masters
    saved: Saved | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)  # name, kind, seconds and calls per step


@dataclass(frozen=True)
class FloorPart:
    """A part of a step, and how long it takes alone."""

    name: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def pace(self) -> str:
        if self.flops:
            return f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s"
        return f"{self.bytes / self.seconds / 1e12:.3g} TB/s"


@dataclass(frozen=True)
class Extras:
    """What else to measure, in Fivefold's first turn."""

    checkpoint: bool = False
    profile: bool = False
    floor: bool = False


@dataclass(frozen=True)
class TrainBenchResult(Result):
    """The turns of each system, in the order they were taken."""

    job: Job
    turns: dict[str, list[TrainTurn]]
    extras: Extras = Extras()
    floor: list[FloorPart] = field(default_factory=list)  # empty unless it was asked for

    def step(self, system: str) -> float:
        """The median seconds of a system's step."""
        return median(second for turn in self.turns[system] for second in turn.seconds)

    def faster(self, system: str) -> float:
        """How many times as fast as the first system: the median of each round's own ratio."""
        rounds = {name: [median(turn.seconds) for turn in turns] for name, turns in self.turns.items()}
        return ratio(next(iter(rounds.values())), rounds[system])

    @property
    def first_turn(self) -> TrainTurn:
        return next(iter(self.turns.values()))[0]

    @property
    def peak(self) -> float | None:
        """The device's peak FLOP/s in bf16 (or float32), by which the MFU of 8-bit steps is measured, too."""
        device, precision = self.first_turn.device, "bf16" if self.job.train.dtype == "bfloat16" else "fp32"
        with suppress(UserError):
            if not device.startswith(CPU):  # its entry in the catalogue is nominal
                return find_accelerator(device).rate(precision)
        return None

    @property
    def tokens(self) -> int:
        return self.job.train.batch * self.job.data.seq

    def mfu(self, seconds: float) -> float | None:
        """The MFU of a step of so many seconds, with attention counted in full, not halved for the causal mask."""
        flops = self.tokens * self.job.model.flops_per_token(self.job.data.seq)
        return None if self.peak is None else flops / seconds / self.peak

    def with_checkpoints(self, saved: Saved, every: int) -> float:
        """The mean seconds of a step with a checkpoint every so many steps, which waits until the last is written."""
        return (sum(saved.beside) + max(0, every - len(saved.beside)) * self.step(OURS)) / every

    def to_dict(self) -> dict[str, Any]:
        job, model, train = self.job, self.job.model, self.job.train
        return {
            "bench": "train",
            "model": model.name,
            "layers": model.layers,
            "parameters": model.parameter_count,
            "active_parameters": model.matmul_parameters,
            "seq": job.data.seq,
            "batch": train.batch,
            "layout": str(job.layout),
            **{key: getattr(train, key) for key in ("fp8", "fp8_experts", "compile", "deterministic", "dtype")},
            "peak": self.peak,
            "systems": [
                {
                    "system": name,
                    "step_seconds": self.step(name),
                    "mfu": self.mfu(self.step(name)),
                    "faster": self.faster(name),
                    "turns": [asdict(turn) for turn in turns],
                }
                for name, turns in self.turns.items()
            ],
            "floor": [asdict(part) for part in self.floor],
        }

    def blocks(self) -> Iterator[Block]:
        job, model = self.job, self.job.model
        peak = f", peak {self.peak / 1e12:.0f} TFLOP/s" if self.peak else ""
        narrow = " with 8-bit matmuls" if job.train.fp8 else " with 8-bit experts" if job.train.fp8_experts else ""
        active = f", {si(model.matmul_parameters)} at work for a token, which MFU counts" if model.experts else ""
        yield Text(
            f"{model.name}, {model.layers} layers, {si(model.parameter_count)} parameters{active}; {job.train.batch} x "
            f"{job.data.seq} tokens, {job.train.dtype}{narrow}\n"
            f"{self.first_turn.device}{peak}, torch {self.first_turn.torch}; medians, turns of each: "
            f"{len(self.turns[OURS])}"
        )
        rows = [self._row(name) for name in self.turns]
        yield table(rows, TIME_COLUMNS)
        yield table(rows, START_COLUMNS, caption="first loss: from the same weights and with the same tokens")
        if self.floor:
            yield self._floor()
        for turn in self.turns[OURS]:
            if turn.saved is not None:
                yield self._checkpoint(turn.saved)
            if turn.kernels:
                yield _profile(turn.kernels)
        if self.extras.profile and not self.turns[OURS][0].kernels:
            yield Text("the profile has no kernels: the device's counters cannot be read here")

    def _row(self, name: str) -> dict[str, Any]:
        step, first, last = self.step(name), self.turns[name][0], self.turns[name][-1]
        milliseconds = [1e3 * second for turn in self.turns[name] for second in turn.seconds]
        breaks = plural(sum(last.breaks.values()), "break")
        return {
            "system": name,
            "step": 1e3 * step,
            "from": min(milliseconds),
            "to": max(milliseconds),
            "rate": self.tokens / step,
            "mfu": self.mfu(step),
            "faster": f"{self.faster(name):.2f}x" if len(self.turns) > 1 else None,
            "memory": bytes_text(max(turn.memory for turn in self.turns[name])),
            "parameters": last.parameters,
            "compiled": f"{plural(last.graphs, 'graph')}, {breaks}" if last.graphs else "eager",
            "first": first.first,
            "loss": first.loss,
        }

    def _floor(self) -> Table:
        total = sum(part.seconds for part in self.floor)
        rows = [(part.name, f"{1e3 * part.seconds:.1f}", part.pace) for part in self.floor]
        share = self.mfu(total)
        return Table(
            ["parts, each measured alone", ">ms", ">pace"],
            rows,
            totals=[("total", f"{1e3 * total:.1f}", "" if share is None else f"{share:.1%} MFU")],
            caption=f"{total / self.step(OURS):.0%} of {OURS}'s step; attention's pace is of what a causal mask leaves",
        )

    def _checkpoint(self, saved: Saved) -> Text:
        every, steps = self.job.checkpoint.every if self.job.checkpoint.save else 0, len(saved.beside)
        first = " and ".join(f"{1e3 * seconds:.1f}" for seconds in saved.beside[:2])
        text = (
            f"a checkpoint of {bytes_text(saved.bytes)}: its call takes {saved.snapshot:.2f} s and its writing "
            f"{saved.writing:.1f} s; right after the call steps take {first} ms, and "
            f"{plural(steps, 'step')} while it is written {self._mean(sum(saved.beside) / steps)}"
        )
        if every:
            waits = "" if every >= steps else ", as the next one waits for the disk"
            text += f"; with checkpoint.every={every} {self._mean(self.with_checkpoints(saved, every))}{waits}"
        return Text(text)

    def _mean(self, seconds: float) -> str:
        """A mean step as text: '812.0 ms a step, 55.1% MFU'."""
        share = self.mfu(seconds)
        return f"{1e3 * seconds:.1f} ms a step" + ("" if share is None else f", {share:.1%} MFU")


def _profile(kernels: list[dict[str, Any]]) -> Table:
    """The time of a step's kernels by kind."""
    milliseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        milliseconds[kernel["kind"]] += 1e3 * kernel["seconds"]
        calls[kernel["kind"]] += kernel["calls"]
    total = sum(milliseconds.values())
    longest = sorted(milliseconds.items(), key=lambda item: -item[1])
    rows = [(kind, f"{ms:.1f}", f"{ms / total:.1%}", f"{calls[kind]:,.0f}") for kind, ms in longest]
    title, totals = "a step on the device", [("total", f"{total:.1f}")]
    return Table(["kernels", ">ms", ">share", ">calls"], rows, title=title, totals=totals)


def job_of(words: list[str]) -> Job:
    """The job of MODEL or JOB.toml with changes, on one device."""
    job = read(words)
    refuse(of_one_process(job))
    return structs.replace(job, trace=TraceConfig())


def read(words: list[str]) -> Job:
    """The job of MODEL or JOB.toml with changes; not deterministic unless that is set."""
    first, *changes = words
    path = first if first.endswith(".toml") else None
    model = [] if path else [f"model={first}", "train.dtype=bfloat16"]
    job = read_job(path, [*model, *changes])
    file = tomllib.loads(Path(path).expanduser().read_text()) if path else {}
    in_changes = any(change.startswith("train.deterministic=") for change in changes)
    if not in_changes and "deterministic" not in file.get("train", {}):
        job = structs.replace(job, train=structs.replace(job.train, deterministic=False))
    return job


def systems(job: Job, against: str) -> dict[str, Job]:
    """The job of each system that takes part, by the system's name."""
    wanted = [word for word in choices(against, "--against", [*AGAINST, "none"]) if word != "none"]
    for word in (word for word in wanted if AGAINST[word] in PEERS):
        if found := only_ours(job) or ([] if word == "hf" else torchtitan_problems(job.model)):
            raise UserError((f"--against {word}: {problem}" for problem in found), "bench.against")
    for word in ("fp8", "fp8_experts", "deterministic"):
        if word in wanted and getattr(job.train, word):
            raise UserError(
                f"--against {word}: the job has train.{word}=true itself; leave one of the two out", "option.conflict"
            )
    if "eager" in wanted:
        from fivefold.launch.device import choose_device, compiles  # imports torch

        if not compiles(job.train, choose_device(job.train.device)):
            setting = f"train.compile={job.train.compile}"
            raise UserError(f"--against eager: with {setting} the job is not compiled here itself", "option.conflict")
    jobs = {OURS: job}
    for word in wanted:
        peer = AGAINST[word] in PEERS
        train = structs.replace(job.train, **({} if peer else {"compile": "off"} if word == "eager" else {word: True}))
        jobs[AGAINST[word]] = structs.replace(job, train=train)
    refuse([f"{name}: {problem}" for name, changed_job in jobs.items() for problem in changed_job.problems(world=1)])
    return jobs


def measure(
    words: list[str], against: str, steps: int, rounds: int | None, extras: Extras, on_progress: OnProgress
) -> TrainBenchResult:
    jobs = systems(job_of(words), against)
    rounds = min(2, len(jobs)) if rounds is None else rounds
    refuse(too_small(steps=steps, rounds=rounds))
    turns_by_system: dict[str, list[TrainTurn]] = {name: [] for name in jobs}
    for number, name in turns(jobs, rounds):
        on_progress(f"{name}: compiles, warms up, and takes {steps} steps; round {number + 1} of {rounds}")
        job, in_this_turn = jobs[name], extras if number == 0 and name == OURS else Extras()
        with _directory(Path(job.run.dir).expanduser()) as path:
            arguments = job, name, steps, in_this_turn, path
            turns_by_system[name] += processes.run(1, "fivefold.bench.train_rank:run", *arguments, timeout=_TIMEOUT_S)
    floor: list[FloorPart] = []
    if extras.floor:
        on_progress("each component alone, the lower bound of a step")
        (floor,) = processes.run(1, "fivefold.bench.floor:run", jobs[OURS], timeout=_TIMEOUT_S)
    return TrainBenchResult(jobs[OURS], turns_by_system, extras, floor)


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    """A temporary directory on the disk of the job's runs, on which it would save checkpoints. It is removed in the
    end, with the folders above it that it needed."""
    refuse(run_directory_problems(parent))
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir={str(parent)!r} cannot be made: {error.strerror}", "file.write") from None
    try:
        with tempfile.TemporaryDirectory(prefix="bench-train-", dir=parent) as name:
            yield Path(name)
    finally:
        for folder in missing:
            with suppress(OSError):  # others may use it by now
                folder.rmdir()
