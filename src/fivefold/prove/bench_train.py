"""`fivefold bench train`: the trainer's own steps, timed; beside them Hugging Face transformers', compiled."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from fivefold.accelerators import find_accelerator
from fivefold.errors import UserError
from fivefold.prove import ranks
from fivefold.train.config import CheckpointConfig, Job, read_job
from fivefold.words import bytes_text


@dataclass(frozen=True)
class Timed:
    system: str
    device: str
    torch: str
    seconds: list[float]  # of each step
    memory: int  # bytes at the peak
    first: float  # seconds of the first step, compilation and all
    graphs: int
    breaks: dict[str, int]
    parameters: str  # the dtypes of what is trained

    @property
    def median(self) -> float:
        return median(self.seconds)


def job_of(words: list[str]) -> Job:
    """MODEL or JOB.toml, and changes; one device."""
    first, *changes = words
    path = first if first.endswith(".toml") else None
    named = [] if path else [f"model={first}"]
    job = read_job(path, [*named, *([] if path else ["train.dtype=bfloat16"]), *changes])
    if not any(change.startswith("train.deterministic=") for change in changes):
        job = structs.replace(job, train=structs.replace(job.train, deterministic=False))
    job = structs.replace(job, checkpoint=CheckpointConfig(save=False))
    if problems := job.problems(world=1):
        raise UserError(problems)
    return job


def measure(job: Job, system: str, steps: int) -> Timed:
    """In a process of its own: no system finds memory that another has left."""
    return ranks.run(1, "fivefold.prove.bench_train_run:run", job, system, steps, timeout=1800)[0]


def as_json(job: Job, timed: list[Timed]) -> dict[str, Any]:
    rows = [asdict(one) | {"step_seconds": one.median, "mfu": mfu(job, one)} for one in timed]
    model = {"model": job.model.name, "layers": job.model.layers, "parameters": job.model.parameter_count}
    settings = {"seq": job.data.seq, "batch": job.train.batch, "layout": str(job.layout), "fp8": job.train.fp8}
    return {"bench": "train", **model, **settings, "dtype": job.train.dtype, "systems": rows}


def mfu(job: Job, one: Timed) -> float | None:
    """Of the device's bf16 (or float32) peak, with attention counted full; an fp8 step, too, by the bf16 peak."""
    try:
        peak = find_accelerator(one.device).rate("bf16" if job.train.dtype == "bfloat16" else "fp32")
    except UserError:
        return None
    tokens = job.train.batch * job.data.seq
    return tokens * job.model.flops_per_token(job.data.seq) / one.median / peak


def report(console: Console, job: Job, timed: list[Timed]) -> None:
    tokens, model = job.train.batch * job.data.seq, job.model
    console.print(
        f"{model.name}, {model.layers} layers, {model.parameter_count / 1e9:.2f}B parameters; {job.train.batch} x "
        f"{job.data.seq} tokens, {job.train.dtype}{' with 8-bit products' if job.train.fp8 else ''}; "
        f"{timed[0].device}, torch {timed[0].torch}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("system", "trains", "step", "fastest", "slowest", "tokens/s", "MFU", "memory", "first step", "graphs"):
        table.add_column(name, justify="left" if name in ("system", "trains") else "right")
    for one in timed:
        share = mfu(job, one)
        table.add_row(
            one.system,
            one.parameters,
            f"{1e3 * one.median:.1f} ms",
            f"{1e3 * min(one.seconds):.1f}",
            f"{1e3 * max(one.seconds):.1f}",
            f"{tokens / one.median:,.0f}",
            "" if share is None else f"{share:.1%}",
            bytes_text(one.memory),
            f"{one.first:.1f} s",
            f"{one.graphs}, {sum(one.breaks.values()) or 'no'} breaks" if one.graphs else "eager",
        )
    console.print(table)
