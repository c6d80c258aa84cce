"""Small jobs to prove, many of them by one set of ranks, and deliberate bugs: patches that a rank enters."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.launch import processes, supervisor
from fivefold.layout.layout import Layout
from fivefold.losses.base import Loss
from fivefold.losses.cross_entropy import PLAIN
from fivefold.optim.adamw import AdamW
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.verifier.compare import OPTIMIZER
from fivefold.verifier.verdict import RankMeasurement, Verdict
from fivefold.verifier.verify import Judge

Bug = Callable[[], AbstractContextManager[Any]]
TIMEOUT = 300.0  # seconds for all that one set of ranks proves


def tiny(**changes: Any) -> ModelSpec:
    small = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 37, "context": 16}
    return preset("tiny", **small | changes)


_LAYER_NORM = {"norm": "layernorm", "bias": True, "positions": "learned", "activation": "gelu"}

# Models with gradients that are small because what is summed cancels; the seed that shows it; all of them are right.
CANCELLING = {
    # A LayerNorm over four channels takes two of four directions out of every gradient that passes it.
    "four channels": (tiny(**_LAYER_NORM, hidden=4, heads=2, kv_heads=2), 0),
    # A norm over a head of two channels leaves one direction; over one channel it leaves its eps alone.
    "heads of two": (tiny(qk_norm=True, head_dim=2), 0),
    "heads of one": (tiny(**_LAYER_NORM, qk_norm=True, hidden=16, head_dim=1, kv_heads=4), 1),
    # Scores near zero: the softmax is nearly uniform, and its gradient is a difference of nearly equal numbers.
    "uniform softmax": (tiny(**_LAYER_NORM, kv_heads=4, init_std=2e-3), 1),
}


def job(layout: str, spec: ModelSpec | None = None, dtype: str = "float64", loss: Loss = PLAIN, **train: Any) -> Job:
    return Job(
        model=spec or tiny(),
        layout=Layout.parse(layout),
        data=TokenShards(seq=16, document_mask=True),
        optimizer=AdamW(**OPTIMIZER),
        loss=loss,
        train=TrainConfig(**{"steps": 2, "batch": 8, "dtype": dtype, "device": "cpu"} | train),
    )


def slow(names: Iterable[Any]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


# ---- many proofs by one set of ranks ---------------------------------------------------------------------------------


def nothing() -> AbstractContextManager[Any]:
    return ExitStack()


def several(rank: processes.Rank, proofs: list[tuple[Job, Path, str]]) -> list[RankMeasurement]:
    """One after another, each with the bug of that name."""
    from fivefold.verifier.rank import compare_steps

    if rank.world > 1:
        rank.join("gloo")
    found = []
    for one, reference, bug in proofs:
        with supervisor.import_function(bug)():
            found.append(compare_steps(rank, one, reference))
    return found


def measured(judge: Judge, proofs: Mapping[str, tuple[Job, Bug]]) -> dict[str, list[RankMeasurement]]:
    """What the ranks of one world found, by the proofs' names: to start them, and a process for each reference, takes
    a third of the time of a proof."""
    [world] = {one.layout.world for one, _ in proofs.values()}
    judge._write_references([one for one, _ in proofs.values()])
    asked = [(one, judge._reference(one)[0], f"{bug.__module__}:{bug.__name__}") for one, bug in proofs.values()]
    by_rank = processes.run(world, f"{__name__}:several", asked, timeout=TIMEOUT)
    return {name: list(ranks) for name, *ranks in zip(proofs, *by_rank, strict=True)}


def together(judge: Judge, proofs: Mapping[str, tuple[Job, Bug]]) -> dict[str, Verdict]:
    found = measured(judge, proofs)
    return {name: judge._verdict(one, found[name], 0.0) for name, (one, _) in proofs.items()}


class Proven:
    """Verdicts on jobs by name, some with a bug; those of one world are reached when the first is asked for."""

    def __init__(self, judge: Judge, proofs: Mapping[str, Job | tuple[Job, Bug]], request: pytest.FixtureRequest):
        """`request`: that of a fixture. Proofs whose tests were not chosen are left out; their argument is `name`."""
        calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
        self.chosen = {call.params["name"] for call in calls if call is not None and "name" in call.params}
        self.proofs = {name: one if isinstance(one, tuple) else (one, nothing) for name, one in proofs.items()}
        self.judge, self.verdicts = judge, dict[str, Verdict]()

    def __getitem__(self, name: str) -> Verdict:
        if name not in self.verdicts:
            world, asked = self.proofs[name][0].layout.world, (self.chosen | {name}) - self.verdicts.keys()
            alike = {n: one for n, one in self.proofs.items() if n in asked and one[0].layout.world == world}
            self.verdicts |= together(self.judge, alike)
        return self.verdicts[name]


# ---- bugs ----------------------------------------------------------------------------------------------------------


def small_buckets() -> AbstractContextManager[Any]:
    """Not a bug: a bucket for each unit of the decoder."""
    from fivefold.parallel.fsdp import FullySharded
    from fivefold.parallel.zero import ZeroBuckets

    patches = ExitStack()
    for kind in (FullySharded, ZeroBuckets):
        defaults = kind.__init__.__kwdefaults__
        assert "min_bucket_elements" in defaults
        patches.enter_context(patch.dict(defaults, min_bucket_elements=1))
    return patches


def mean_of_means() -> AbstractContextManager[Any]:
    """Every microbatch is divided by its own count, and the results are averaged."""
    from fivefold.trainer.engine import Engine

    make = Engine._microbatch

    def counting(self: Any, batch: Any, *loss: Any) -> Any:
        made = make(self, batch, *loss)
        self.__dict__.setdefault("own_counts", []).append(max(1, int(made.targets.mask.sum())))
        return made

    def mean(self: Any, total: Any, count: int) -> Any:
        parts = self.job.layout.dp * self.job.layout.microbatches
        return total / parts / self.own_counts.pop(0)

    return patch.multiple(Engine, _microbatch=counting, _scaled_loss=mean)


def norms_are_not_summed_over_tp() -> AbstractContextManager[Any]:
    from fivefold.parallel.buckets import Bucket

    return patch.object(Bucket, "reduce_extra_axis", lambda self: None)


def gradients_are_divided_by_cp() -> AbstractContextManager[Any]:
    from fivefold.parallel.zero import ZeroBuckets

    finish = ZeroBuckets.finish_grad_sync

    def divide(self: Any) -> None:
        finish(self)
        for master in self.masters.values():
            master.grad /= self.mesh.cp.size

    return patch.object(ZeroBuckets, "finish_grad_sync", divide)


def latents_are_not_summed_over_tp() -> AbstractContextManager[Any]:
    """The gradient of what all heads read is that of this rank's heads alone."""
    from fivefold.parallel.tensor import GatherFromSP

    return patch.object(GatherFromSP, "backward", staticmethod(lambda ctx, gradient: (None, None, gradient)))


def every_step_of_the_ring_has_the_sinks() -> AbstractContextManager[Any]:
    """They belong into a row of scores once."""
    from fivefold.model import kernels
    from fivefold.parallel.context import OnlineSoftmax

    add = OnlineSoftmax.add

    def once_more(self: Any, work: Any, kv: Any) -> None:
        add(self, work, kv)
        kernels.sink_(self.out, self.lse, self.lse.new_zeros(self.lse.shape[1]))

    return patch.object(OnlineSoftmax, "add", once_more)


def the_ring_sees_one_key_too_late() -> AbstractContextManager[Any]:
    from fivefold.parallel import context
    from fivefold.parallel.context import Tile, ring_tile

    def shifted(rank: int, source: int, share: int) -> Tile:
        tile = ring_tile(rank, source, share)
        return Tile(tile.queries, range(1, len(tile.keys) + 1)) if source < rank else tile

    return patch.object(context, "ring_tile", shifted)


def the_ends_of_a_tied_embedding_are_not_summed() -> AbstractContextManager[Any]:
    return norms_are_not_summed_over_tp()  # by the same method


def a_weight_gradient_is_forgotten() -> AbstractContextManager[Any]:
    """The last piece of work of every weight-gradient pass."""
    from fivefold.parallel.pipeline import Pipeline

    weight_half = Pipeline._weight_half

    def forgetful(self: Any, action: Any) -> None:
        self.deferred[action.stage, action.microbatch].pop()
        weight_half(self, action)

    return patch.object(Pipeline, "_weight_half", forgetful)


def microbatches_arrive_in_the_wrong_order() -> AbstractContextManager[Any]:
    """Of two activations the later one is taken first."""
    from fivefold.parallel.pipeline import Channels

    receive = Channels.receive

    def swapped(self: Any, action: Any, shape: Any) -> Any:
        return receive(self, action._replace(microbatch=action.microbatch ^ 1), shape)

    return patch.object(Channels, "receive", swapped)


def a_gradient_stays_away() -> AbstractContextManager[Any]:
    from fivefold.trainer.engine import Engine

    gradients = Engine.gradients

    def without(self: Any) -> Any:
        return {name: gradient for name, gradient in gradients(self).items() if name != "norm.weight"}

    return patch.object(Engine, "gradients", without)


def one_collective_too_many() -> AbstractContextManager[Any]:
    import torch
    import torch.distributed as dist

    from fivefold.trainer.engine import Engine

    norm = Engine.gradient_norm

    def chatty(self: Any) -> Any:
        dist.all_reduce(torch.zeros(3), group=self.mesh.tp.group)
        return norm(self)

    return patch.object(Engine, "gradient_norm", chatty)


# ---- what a rank calls first -----------------------------------------------------------------------------------------


def a_quick_compiler() -> None:
    """Graphs are made as always, and run by PyTorch's own kernels. A compiler of C++ would take a minute."""
    from fivefold.model import compiler

    compiler.COMPILER_BACKEND = "aot_eager"


def rank_1_dies() -> None:
    import os
    import signal

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def rank_1_sleeps() -> None:
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)


def rank_1_raises() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("a number that is none")
