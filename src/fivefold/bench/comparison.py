"""Contests of speed: the same training step by several systems, in turns, in one run.

    contest = Contest(job, ("bare loop", "fivefold tp=2", "DTensor tp=2"), rounds=7)
    rows(measure(contest))

A step is all of it: forward and backward passes of every microbatch, the gradient norm, clipping, AdamW. Every system
starts from the same weights and takes the same batch, and its first loss has to be that of the others: a system that
computes something else is not faster. Between steps all ranks meet; a system of one process has the machine for itself.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from fivefold.job.config import Job, read_job
from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError

# By the number that the ranks of a system share something of: what PyTorch itself has for it.
PEERS = {"dp": "DDP", "zero": "FSDP2", "tp": "DTensor", "pp": "pipelining"}
HUGGING_FACE = "Hugging Face"
ALONE = ("bare loop", HUGGING_FACE)
OURS = "fivefold"
_PATIENCE = 600.0  # seconds for a step of a system
AGREE = (1e-5, 1e-3)  # relative, of the loss of the first step, and of the second, which an update lies before
# The model of the contests on CPUs: 31.6M parameters.
MODEL = (
    "model=tiny", "model.hidden=512", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.head_dim=64",
    "model.ffn=1376", "model.vocab=8192", "model.context=512", "model.tied=false", "data.seq=512", "train.batch=4",
)  # fmt: skip


@dataclass(frozen=True)
class Contest:
    job: Job  # of one process: its model, sequence, batch and microbatches are everyone's
    systems: tuple[str, ...]  # "bare loop", "fivefold", "fivefold dp=2", "DTensor tp=2"
    rounds: int = 5
    threads: int = 1

    @property
    def world(self) -> int:
        return max(layout_of(self.job, system).world for system in self.systems)


@dataclass(frozen=True)
class Result:
    """Seconds of every round by system, in the order they were taken."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]  # of the first two steps
    cores: int
    version: str  # of torch
    machine: str

    def median(self, system: str) -> float:
        return median(self.seconds[system])

    def ratio(self, system: str, base: str) -> float:
        """The median of each round's own: both sides have met the same noise."""
        pairs = zip(self.seconds[system], self.seconds[base], strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def spread(self, system: str) -> float:
        """The slowest round, by the fastest."""
        return max(self.seconds[system]) / min(self.seconds[system])

    @property
    def agree(self) -> bool:
        wanted = next(iter(self.losses.values()))
        triples = [triple for losses in self.losses.values() for triple in zip(losses, wanted, AGREE, strict=True)]
        return all(abs(loss - right) <= most * abs(right) for loss, right, most in triples)


def layout_of(job: Job, system: str) -> Layout:
    """The layout that a system's ranks stand in; the global batch is cut into the same microbatches."""
    _, _, text = system.rpartition(" ")
    if "=" not in text:
        return Layout(microbatches=job.layout.microbatches)
    layout = Layout.parse(text)
    if "microbatches" in text:
        return layout
    return Layout.parse(f"{text},microbatches={max(1, job.layout.microbatches // layout.dp)}")


def base_job(changes: list[str], defaults: tuple[str, ...] = MODEL, microbatches: int = 4) -> Job:
    # Without decay: which parameters it spares is a matter of sampling, and no matter of speed.
    settings = [f"layout=microbatches={microbatches}", "train.compile=off", "optimizer.weight_decay=0"]
    job = read_job(None, [*defaults, *settings, *changes])
    if problems := [*of_one_process(job), *unfair(job)]:
        raise UserError(problems)
    return job


def of_one_process(job: Job) -> list[str]:
    """What is wrong with a job that is measured without other ranks."""
    if job.layout.world > 1:
        ranks_asked = f"layout={job.layout} has {job.layout.world} ranks, and the job is to be one process's"
        return [f"{ranks_asked}; several are measured with: --ranks {job.layout.world}, of bench scaling or peers"]
    return job.problems(world=1)


def unfair(job: Job) -> list[str]:
    """Settings that only some of the systems would follow."""
    train = job.train
    rules = [
        (train.dtype == "float32", f"train.dtype={train.dtype}: contests are in float32"),
        (train.compile == "off" and not train.fp8, "train.compile and train.fp8 are Fivefold's alone here"),
        (not job.model.tied, "the model must not be tied: model.tied=false"),
    ]
    return [sentence for fair, sentence in rules if not fair] + only_ours(job)


def only_ours(job: Job) -> list[str]:
    """Settings that Hugging Face's Llama in a plain loop would not follow."""
    train, model = job.train, job.model
    rules = [
        (llama(job), f"Hugging Face's Llama is another model than {model.name}"),
        (not model.dropout, f"model.dropout={model.dropout} is Fivefold's alone here"),
        (train.label_smoothing == train.z_loss == 0, "label_smoothing and z_loss are Fivefold's alone here"),
        (job.optimizer.clip > 0, "optimizer.clip=0: all systems clip"),
        (job.layout.recompute == "none", "recompute is Fivefold's alone here"),
    ]
    return [sentence for fair, sentence in rules if not fair]


def llama(job: Job) -> bool:
    """Whether Hugging Face's Llama is the same model."""
    model = job.model
    kinds = (model.norm, model.activation, model.positions) == ("rmsnorm", "swiglu", "rope")
    return kinds and not model.bias and not model.qk_norm


def check(contest: Contest) -> None:
    """Every problem at once, before any process starts."""
    problems = [f"--rounds {contest.rounds} must be at least 1"] if contest.rounds < 1 else []
    if odd := [one for one in contest.systems if layout_of(contest.job, one).world not in (1, contest.world)]:
        problems.append(f"{odd[0]} has neither one rank nor {contest.world}, as the others; measure it by itself")
    for system in contest.systems:
        layout, job = layout_of(contest.job, system), contest.job
        found = layout.problems(job.model, seq=job.data.seq, batch=job.train.batch)
        problems += [f"{system}: {problem}" for problem in found]
        if system.startswith(PEERS["tp"]) and job.model.kv_heads % layout.tp:  # ours copies them
            problems.append(
                f"{system}: it splits whole heads, and model.kv_heads={job.model.kv_heads} is not a multiple of "
                f"{layout.tp}; nearest: model.kv_heads={layout.tp * (job.model.kv_heads // layout.tp + 1)}"
            )
    if problems:
        raise UserError(problems)


def measure(contest: Contest) -> Result:
    patience = _PATIENCE * (contest.rounds + 2) * len(contest.systems)
    return ranks.run(contest.world, "fivefold.bench.comparison_rank:run", contest, timeout=patience)[0]


def own_single(system: str) -> str:
    """What a system is compared with: its own step in one process."""
    if system == HUGGING_FACE:
        return system
    return OURS if system.startswith(OURS) else "bare loop"


def rows(result: Result) -> list[dict[str, Any]]:
    found = []
    for system in result.seconds:
        base = own_single(system)
        found.append(
            {
                "system": system,
                "seconds": result.median(system),
                "fastest": min(result.seconds[system]),
                "slowest": max(result.seconds[system]),
                "of_its_single": result.ratio(system, base) if base in result.seconds else None,
                "of_bare": result.ratio(system, "bare loop") if "bare loop" in result.seconds else None,
                "losses": result.losses[system],
            }
        )
    return found
