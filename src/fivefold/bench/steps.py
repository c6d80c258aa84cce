"""`fivefold bench train --cases`: how long training steps take on one device, and how long the planner says they take.

    cases("llama3-8b,layers=4/8,seq=4096,recompute=none/full")      # four of them

A case is a model and what changes a step's time on a single device. Alternatives stand between slashes, and all their
combinations are cases.
"""

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, cast

import msgspec

from fivefold.bench.harness import OnProgress, RowsResult, refuse, too_small
from fivefold.cost.step import Workload, estimate
from fivefold.data.shards import TokenShards
from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import CheckpointConfig, Compile, Job, TrainConfig
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.dtypes import DTYPES, Dtype
from fivefold.support.errors import UserError
from fivefold.support.ranges import misfit, within
from fivefold.support.text import bytes_text, did_you_mean

MIN_WARM_UP_STEPS = 3  # steps before the timed ones, at least: in them kernels are chosen and memory is allocated
CHOICES_BY_KEY = {"recompute": ("none", "selective", "full"), "compile": ("auto", "on", "off")}
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class StepCase:
    model: str
    layers: int
    seq: int = 2048
    samples: int = 1  # of a microbatch
    microbatches: int = 1
    recompute: str = "none"
    compile: str = "auto"

    @property
    def spec(self) -> ModelSpec:
        return preset(self.model, layers=self.layers)

    @property
    def layout(self) -> Layout:
        return Layout.from_dict({"microbatches": self.microbatches, "recompute": self.recompute})

    @property
    def batch(self) -> int:
        return self.samples * self.microbatches

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def job(self, dtype: str) -> Job:
        compiled = cast(Compile, self.compile)
        train = TrainConfig(batch=self.batch, dtype=cast(Dtype, dtype), compile=compiled, deterministic=False)
        data, checkpoint = TokenShards(seq=self.seq), CheckpointConfig(save=False)
        return Job(model=self.spec, layout=self.layout, data=data, train=train, checkpoint=checkpoint)


@dataclass(frozen=True)
class Timed:
    """A case that ran, or for which the memory was not enough."""

    case: StepCase
    device: str
    torch: str
    dtype: str
    steps: int
    seconds: float | None = None  # median
    fastest: float | None = None
    slowest: float | None = None
    memory: int | None = None  # bytes at the peak, as the allocator counts them

    @property
    def row(self) -> dict[str, Any]:
        of_run = asdict(self)
        rate = round(self.case.tokens / self.seconds, 1) if self.seconds else None
        return of_run.pop("case") | of_run | {"tokens_per_second": rate}


COLUMNS = {
    "~model": "shown", "batch": "batch", "recompute": "recompute", "compile": "compile", ">step": "step",
    ">tokens/s": "tokens_per_second:.0f", ">memory": "bytes", ">planned": "planned", ">off": "off:+.1%",
}  # fmt: skip


def result(timed: Sequence[Timed], accelerator: Accelerator | None) -> RowsResult:
    """The table of the timings, with the planner's step times if it knows the device."""
    only_shown = []
    for timing in timed:
        case = timing.case
        all_layers = preset(case.model).layers == case.layers
        cells: dict[str, Any] = {"shown": case.model if all_layers else f"{case.model}, {case.layers} layers"}
        cells |= {"batch": f"{case.microbatches} x {case.samples} x {case.seq}", "step": "too large"}
        if timing.seconds is not None:
            peak = bytes_text(timing.memory) if timing.memory else None
            cells |= {"step": f"{1e3 * timing.seconds:.1f} ms", "bytes": peak}
            if accelerator is not None:
                seconds = predicted(case, accelerator)
                cells |= {"planned": f"{1e3 * seconds:.1f} ms", "off": seconds / timing.seconds - 1}
        only_shown.append(cells)
    return RowsResult([timing.row for timing in timed], COLUMNS, only_shown=only_shown)


def cases(word: str) -> list[StepCase]:
    """The cases that a word names: MODEL,KEY=VALUE,... with alternatives between slashes."""
    model, *changes = [part.strip() for part in word.split(",")]
    spec, problems = preset(model), []
    known = [field.name for field in fields(StepCase) if field.name != "model"]
    choices: dict[str, list[Any]] = {"layers": [spec.layers]}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in known:
            problems.append(f"{word}: unknown key {key!r}; {did_you_mean(key, known)}")
        elif key in CHOICES_BY_KEY:
            choices[key] = text.split("/")
            wrong = [value for value in choices[key] if value not in CHOICES_BY_KEY[key]]
            problems += [f"{word}: {key}={v!r} is not a choice; {did_you_mean(v, CHOICES_BY_KEY[key])}" for v in wrong]
        else:
            wrong = [value for value in text.split("/") if not (value.isdecimal() and 0 < int(value) < 1 << 31)]
            problems += [f"{word}: {key}={value!r} must be a whole number of at least 1" for value in wrong]
            choices[key] = [int(value) for value in text.split("/") if value not in wrong]
    refuse(problems)
    return [StepCase(model, **dict(zip(choices, values, strict=True))) for values in product(*choices.values())]


def measure(
    words: list[str],
    steps: int,
    on_progress: OnProgress,
    *,
    warm_up: float,
    accelerator: str | None,
    device: str,
    dtype: str,
) -> Iterator[RowsResult]:
    """Time each case in a process of its own, so that no case starts with memory that another has allocated. Yields the
    result so far after each of them."""
    problems = [*too_small(steps=steps), *filter(None, [misfit("--warm", warm_up, within(0, 3600))])]
    for option, value, known in (("dtype", dtype, ("auto", *DTYPES)), ("device", device, DEVICES)):
        if value not in known:
            problems.append(f"--{option} {value} is not a choice; known: {', '.join(known)}")
    refuse(problems)
    wanted = [case for word in words for case in cases(word)]
    planned_for = Cluster.parse(accelerator).groups[0].accelerator if accelerator else None
    timed: list[Timed] = []
    for number, case in enumerate(wanted, start=1):
        on_progress(f"{number}/{len(wanted)}: {case.model}, {case.layers} layers, {case.batch} x {case.seq}")
        timed += processes.run(
            1, "fivefold.bench.train_rank:one_case", case, device, dtype, steps, warm_up, timeout=600
        )
        if planned_for is None:
            with suppress(UserError):
                planned_for = find_accelerator(timed[0].device)
        yield result(timed, planned_for)


def predicted(case: StepCase, accelerator: Accelerator) -> float:
    cluster = Cluster((Group(1, 1, accelerator),))
    return estimate(Workload(case.spec, case.layout, cluster, case.seq, case.batch)).seconds


def read(path: Path) -> list[Timed]:
    """The rows of a CSV file that `-o` has written."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    # A case for which the memory was not enough has empty cells.
    tables = [{key: text or None for key, text in row.items()} for row in rows]
    return [msgspec.convert(table | {"case": table}, Timed, strict=False) for table in tables]
