"""A run's directory as the trainer leaves it, made by its own writers without ranks."""

from collections.abc import Sequence
from pathlib import Path

from fivefold.checkpoint.store import Store
from fivefold.job.reading import read_job
from fivefold.launch import rank_log
from fivefold.launch.world import World
from fivefold.trainer.outputs import Outputs
from fivefold.trainer.records import Evaluation, Load, Step
from tests.checkpoint.test_store import save
from tests.tracing.test_summary import by_hand

ENVIRONMENT = {"fivefold": "0", "ranks": 2, "device": "cpu x 1"}
WORDS = ["layout=pp=2,microbatches=4", "train.steps=40", "run.name=demo"]


def step(number: int, experts: bool = False) -> Step:
    load = Load.of([[number, 3, 1], [2, 2, number]], 6, by_expert=number % 5 == 0) if experts else None
    return Step(
        step=number, loss=5.0 / number, grad_norm=1.0 + number % 3, lr=1e-3 / number, tokens=64, loss_tokens=63,
        seconds=0.5, tokens_per_second=128.0, mfu=0.4 if number % 2 else None, memory=1000 + number, load=load,
    )  # fmt: skip


def a_run(folder: Path, steps: int = 20, *, experts: bool = False, traced: bool = False) -> Path:
    """Steps, an evaluation every ten, a checkpoint each time, and a trace made by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = Outputs(folder, read_job(None, WORDS), ENVIRONMENT, 0, lambda _: None)
    store = Store(folder / "checkpoints")
    for number in range(1, steps + 1):
        outputs.on_step(step(number, experts))
        if number % 10 == 0:
            outputs.on_evaluation(Evaluation(step=number, held_out_loss=6.0 / number, samples=8, loss_tokens=80))
            save(store, number)
    if traced:
        outputs.trace(by_hand())
    outputs.close()
    return folder


def log(folder: Path, starts: Sequence[Sequence[str]], rank: int = 0) -> None:
    """A rank's log: for each start the launcher's header, and what the rank said."""
    path = folder / "logs" / f"rank-{rank}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for number, said in enumerate(starts):
            world = World(rank=rank, size=2, joined=True, start=number)
            file.write("\n".join([f"{'=' * 20} {rank_log._header(world)}", *said]) + "\n")
