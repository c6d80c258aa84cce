"""`fivefold bench train`: the trainer's own steps, timed; beside them others', in turns.

Two systems seldom fit into a GPU's memory at once, so a turn is a process of its own, and turns go there and back.
"""

import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from fivefold.bench.comparison import HUGGING_FACE, OURS, of_one_process, only_ours
from fivefold.bench.comparison_report import columns
from fivefold.hardware.accelerators import find_accelerator
from fivefold.job.config import Job, TraceConfig, read_job
from fivefold.job.preflight import run_directory_problems
from fivefold.launch import ranks
from fivefold.support.errors import UserError
from fivefold.support.formatting import bytes_text, counted, did_you_mean, si

CPU = "CPU"
_PATIENCE = 24 * 3600.0  # seconds: whoever waits for a measurement ends it
AGAINST = {
    "fp8": "fivefold, 8-bit products",
    "deterministic": "fivefold, same bits",
    "eager": "fivefold, eager",
    "hf": HUGGING_FACE,
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the middle of the steps."""

    bytes: int
    snapshot: float  # seconds of the call; a GPU copies on, beside the next step, whose update waits for it
    writing: float  # seconds from there to its manifest
    beside: list[float]  # seconds of the steps meanwhile; what the snapshot stops is in the first two


@dataclass(frozen=True)
class Timed:
    """One turn."""

    device: str
    torch: str
    seconds: list[float]  # from one step's end to the next one's
    memory: int  # bytes at the peak
    first: float  # seconds of the first step, compilation and all
    loss: float  # of that step: all start from the same weights and take the same tokens
    graphs: int
    breaks: dict[str, int]
    parameters: str  # the dtypes of what is trained
    saved: Saved | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)  # name, kind, seconds and calls of a step


@dataclass(frozen=True)
class More:
    """What else to measure, in the first turn of ours."""

    checkpoint: bool = False
    profile: bool = False


@dataclass(frozen=True)
class Result:
    """The turns of each system, in the order they were taken."""

    job: Job
    turns: dict[str, list[Timed]]

    def step(self, system: str) -> float:
        return median(second for turn in self.turns[system] for second in turn.seconds)

    def faster(self, system: str) -> float:
        """Than the first system: the median of each round's own ratio."""
        pairs = zip(self.turns[next(iter(self.turns))], self.turns[system], strict=True)
        return median(median(theirs.seconds) / median(mine.seconds) for theirs, mine in pairs)

    @property
    def peak(self) -> float | None:
        """FLOP/s of the device in bf16 (or float32); 8-bit steps, too, are held against the bf16 peak."""
        kind = "bf16" if self.job.train.dtype == "bfloat16" else "fp32"
        if self.any.device.startswith(CPU):  # its entry in the catalogue is nominal
            return None
        try:
            return find_accelerator(self.any.device).rate(kind)
        except UserError:
            return None

    @property
    def any(self) -> Timed:
        return next(iter(self.turns.values()))[0]

    @property
    def tokens(self) -> int:
        return self.job.train.batch * self.job.data.seq

    def mfu(self, seconds: float) -> float | None:
        """Attention counted full."""
        done = self.tokens * self.job.model.flops_per_token(self.job.data.seq)
        return None if self.peak is None else done / seconds / self.peak

    def with_checkpoints(self, saved: Saved, every: int) -> float:
        """Seconds of a step on average, with a checkpoint in so many. The next one waits until this one is written."""
        return (sum(saved.beside) + max(0, every - len(saved.beside)) * self.step(OURS)) / every


def job_of(words: list[str]) -> Job:
    """MODEL or JOB.toml, and changes; one device."""
    first, *changes = words
    path = first if first.endswith(".toml") else None
    named = [] if path else [f"model={first}"]
    job = read_job(path, [*named, *([] if path else ["train.dtype=bfloat16"]), *changes])
    asked = any(change.startswith("train.deterministic=") for change in changes) or _says_deterministic(path)
    train = job.train if asked else structs.replace(job.train, deterministic=False)
    job = structs.replace(job, train=train, trace=TraceConfig())
    if problems := of_one_process(job):
        raise UserError(problems)
    return job


def _says_deterministic(path: str | None) -> bool:
    table = tomllib.loads(Path(path).expanduser().read_text()) if path else {}
    return "deterministic" in table.get("train", {})


def systems(job: Job, against: str) -> dict[str, Job]:
    """What takes part, by name, and with which settings."""
    wanted = [word for word in dict.fromkeys(word.strip() for word in against.split(",")) if word not in ("", "none")]
    if unknown := [word for word in wanted if word not in AGAINST]:
        hint = did_you_mean(unknown[0], [*AGAINST, "none"])
        raise UserError(f"--against {unknown[0]} is not a choice; {hint}")
    if "hf" in wanted and (unlike := only_ours(job)):
        raise UserError(f"--against hf: {sentence}" for sentence in unlike)
    if "fp8" in wanted and job.train.fp8:
        raise UserError("--against fp8: the job has train.fp8=true itself; leave one of the two out")
    if "deterministic" in wanted and job.train.deterministic:
        raise UserError(
            "--against deterministic: the job has train.deterministic=true itself; leave one of the two out"
        )
    if "eager" in wanted and not _compiled(job):
        raise UserError(f"--against eager: with train.compile={job.train.compile} the job is not compiled here itself")
    changed = {
        "fp8": structs.replace(job.train, fp8=True),
        "deterministic": structs.replace(job.train, deterministic=True),
        "eager": structs.replace(job.train, compile="off"),
        "hf": job.train,
    }
    found = {OURS: job} | {AGAINST[word]: structs.replace(job, train=changed[word]) for word in wanted}
    if problems := [f"{name}: {one}" for name, its in found.items() for one in its.problems(world=1)]:
        raise UserError(problems)
    return found


def _compiled(job: Job) -> bool:
    if job.train.compile != "auto":
        return job.train.compile == "on"
    from fivefold.launch.device import choose_device, compiles  # torch knows which device there is

    return compiles(job.train, choose_device(job.train.device))


def measure(contestants: dict[str, Job], steps: int, rounds: int, more: More, told: Callable[[str], None]) -> Result:
    turns: dict[str, list[Timed]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:  # what drifts meets first and last alike
            told(f"{name}: compiles, warms up, and takes {steps} steps; round {number + 1} of {rounds}")
            wanted = more if number == 0 and name == OURS else More()
            function, job = "fivefold.bench.train_run:run", contestants[name]
            with _directory(Path(job.run.dir).expanduser()) as path:
                turns[name] += ranks.run(1, function, job, name == HUGGING_FACE, steps, wanted, path, timeout=_PATIENCE)
    return Result(contestants[OURS], turns)


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    """Where the run's own would be made: a checkpoint is to meet the same disk. Nothing is left, whatever ends it."""
    if problems := run_directory_problems(parent):
        raise UserError(problems)
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir={str(parent)!r} cannot be made: {error.strerror}") from None
    try:
        with tempfile.TemporaryDirectory(prefix="bench-train-", dir=parent) as name:
            yield Path(name)
    finally:
        for folder in missing:
            with suppress(OSError):  # somebody else's by now
                folder.rmdir()


def as_json(result: Result) -> dict[str, Any]:
    job = result.job
    rows = [
        {
            "system": name,
            "step_seconds": result.step(name),
            "mfu": result.mfu(result.step(name)),
            "faster": result.faster(name),
            "turns": [asdict(turn) for turn in turns],
        }
        for name, turns in result.turns.items()
    ]
    model = {"model": job.model.name, "layers": job.model.layers, "parameters": job.model.parameter_count}
    settings = {"seq": job.data.seq, "batch": job.train.batch, "layout": str(job.layout), "fp8": job.train.fp8}
    settings |= {"compile": job.train.compile, "deterministic": job.train.deterministic}
    return {"bench": "train", **model, **settings, "dtype": job.train.dtype, "peak": result.peak, "systems": rows}


def report(console: Console, result: Result, profiled: bool = False) -> None:
    job, model = result.job, result.job.model
    peak = f", peak {result.peak / 1e12:.0f} TFLOP/s" if result.peak else ""
    console.print(
        f"{model.name}, {model.layers} layers, {si(model.parameter_count)} parameters; {job.train.batch} x "
        f"{job.data.seq} tokens, {job.train.dtype}{' with 8-bit products' if job.train.fp8 else ''}\n"
        f"{result.any.device}{peak}, torch {result.any.torch}; medians, turns of each: {len(result.turns[OURS])}"
    )
    headings = ("system", "ms/step", "from", "to", "tokens/s", "MFU", "faster", "memory", "loss")
    console.print(columns(headings, [_line(result, name) for name in result.turns]))
    console.print("loss: of the first step, from the same weights and with the same tokens")
    for name, turns in result.turns.items():
        graphs, breaks = turns[-1].graphs, sum(turns[-1].breaks.values())
        how = f"{counted(graphs, 'graph')}, {counted(breaks, 'break')}" if graphs else "eager"
        console.print(f"{name}: {turns[-1].parameters}; {how}; first step {turns[0].first:.1f} s")
    for turn in result.turns[OURS]:
        if turn.saved is not None:
            console.print(_checkpoint(result, turn.saved))
        if turn.kernels:
            console.print("\non the device, of a step:", _profile(turn.kernels))
        elif profiled and turn is result.turns[OURS][0]:
            console.print("the profile has no kernels: the device's counters cannot be read here")


def _line(result: Result, name: str) -> list[str]:
    turns, step = result.turns[name], result.step(name)
    every, share = [second for turn in turns for second in turn.seconds], result.mfu(step)
    return [
        name,
        *(f"{1e3 * seconds:.1f}" for seconds in (step, min(every), max(every))),
        f"{result.tokens / step:,.0f}",
        "" if share is None else f"{share:.1%}",
        f"{result.faster(name):.2f}x" if len(result.turns) > 1 else "",
        bytes_text(max(turn.memory for turn in turns)),
        f"{turns[0].loss:.4f}",
    ]


def _profile(kernels: list[dict[str, Any]]) -> Table:
    sums: dict[str, list[float]] = {}
    for one in kernels:
        entry = sums.setdefault(one["kind"], [0.0, 0.0])
        entry[0], entry[1] = entry[0] + one["seconds"], entry[1] + one["calls"]
    total = sum(seconds for seconds, _ in sums.values())
    lines = [
        (kind, f"{1e3 * seconds:.1f}", f"{seconds / total:.1%}", f"{calls:,.0f}")
        for kind, (seconds, calls) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]
    return columns(("kernels", "ms", "share", "calls"), [*lines, ("all", f"{1e3 * total:.1f}", "", "")])


def _checkpoint(result: Result, saved: Saved) -> str:
    every, steps = result.job.checkpoint.every if result.job.checkpoint.save else 0, len(saved.beside)
    first = " and ".join(f"{1e3 * seconds:.1f}" for seconds in saved.beside[:2])  # with what the snapshot stops
    words = (
        f"a checkpoint of {bytes_text(saved.bytes)}: its call takes {saved.snapshot:.2f} s and its writing "
        f"{saved.writing:.1f} s; right after the call steps take {first} ms, and "
        f"{counted(steps, 'step')} beside the writing {_mean(result, sum(saved.beside) / steps)}"
    )
    if every:
        waits = "" if every >= steps else ", as the next one waits for the disk"
        step = _mean(result, result.with_checkpoints(saved, every))
        words += f"; with checkpoint.every={every} {step}{waits}"
    return words


def _mean(result: Result, seconds: float) -> str:
    share = result.mfu(seconds)
    return f"{1e3 * seconds:.1f} ms a step" + ("" if share is None else f", {share:.1%} MFU")
