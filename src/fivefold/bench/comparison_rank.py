"""One rank of a comparison: every system that it is part of, a step of each in turns."""

import torch.distributed as dist

from fivefold.bench import systems
from fivefold.bench.comparison import BARE, Comparison, ComparisonResult, layout_of
from fivefold.bench.harness import HUGGING_FACE, OURS
from fivefold.bench.rank import enter, machine, take_turns
from fivefold.data.batch import Batch
from fivefold.launch.ranks import Rank
from fivefold.verify.batches import plain_batch


def run(rank: Rank, case: Comparison) -> ComparisonResult:
    enter(rank, case.threads)
    job = case.job
    batch = plain_batch(job.model.vocab, job.train.batch, job.data.seq)
    built = {name: build(case, name, batch, rank.number) for name in case.systems}
    # The first two steps are also the warm-up.
    losses = {name: [_loss(system) for _ in range(2)] for name, system in built.items()}
    steps = {name: system.step if system else None for name, system in built.items()}
    return ComparisonResult(case, take_turns(steps, case.rounds), losses, machine())


def build(case: Comparison, name: str, batch: Batch, rank: int) -> systems.System | None:
    """A system, on the ranks that it has; making one is collective, so all of its ranks make it now."""
    job, layout = case.job, layout_of(case.job, name)
    if rank >= layout.world:
        return None
    if name.startswith(OURS):
        return systems.Ours(job, layout, batch)
    kind = name.partition(" ")[0]
    if kind == "pipelining":
        return systems.Pipelined(job, layout, batch)
    part = systems.Part.of(batch, layout, rank if layout.dp > 1 else 0)
    if name == BARE:
        return systems.Loop(systems.decoder(job), part, job)
    if name == HUGGING_FACE:
        return systems.HuggingFace(job, part)
    kinds = {"DDP": systems.DataParallel, "FSDP2": systems.FullySharded, "DTensor": systems.TensorParallel}
    return kinds[kind](job, part)


def _loss(system: systems.System | None) -> float:
    """The loss of a step, as all ranks together have it."""
    mine = None if system is None else (system.step(), system.sums)
    if not dist.is_initialized():
        assert mine is not None
        return mine[0]
    found: list[tuple[float, bool] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    known = [one for one in found if one is not None]
    total = sum(loss for loss, _ in known)
    return total if known[0][1] else total / len(known)
