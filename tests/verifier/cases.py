"""Small jobs to prove, and deliberate bugs: functions that a rank calls before it starts, to break one thing."""

from collections.abc import Mapping
from typing import Any

import pytest

from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.layout.layout import Layout
from fivefold.losses.base import Loss
from fivefold.losses.cross_entropy import PLAIN
from fivefold.optim.adamw import AdamW
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.verifier.compare import OPTIMIZER
from fivefold.verifier.verdict import Verdict
from fivefold.verifier.verify import Judge


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


class Proven:
    """Verdicts on many jobs by name. Those of one world are reached by ranks that stay up, when the first is asked for:
    to start ranks, and a process for each reference, takes a third of the time of a proof."""

    def __init__(self, judge: Judge, proofs: Mapping[str, Job], request: pytest.FixtureRequest):
        """`request`: that of a fixture. Only proofs whose tests were chosen are made; their argument is `name`."""
        calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
        chosen = {call.params["name"] for call in calls if call is not None and "name" in call.params}
        self.judge, self.proofs = judge, {name: one for name, one in proofs.items() if name in chosen}
        self.verdicts: dict[str, Verdict] = {}

    def __getitem__(self, name: str) -> Verdict:
        if name not in self.verdicts:
            world = self.proofs[name].layout.world
            alike = {other: one for other, one in self.proofs.items() if one.layout.world == world}
            found = self.judge.with_persistent_ranks(list(alike.values()), 1, lambda done, total, what: None)
            self.verdicts.update(zip(alike, found, strict=True))
        return self.verdicts[name]


def small_buckets() -> None:
    """Not a bug: a bucket for each unit of the decoder."""
    from fivefold.parallel.fsdp import FullySharded
    from fivefold.parallel.zero import ZeroBuckets

    for kind in (FullySharded, ZeroBuckets):
        defaults = kind.__init__.__kwdefaults__
        assert "min_bucket_elements" in defaults
        defaults["min_bucket_elements"] = 1


def a_quick_compiler() -> None:
    """Not a bug: graphs are made as always, and run by PyTorch's own kernels. A compiler of C++ would take a minute."""
    from fivefold.model import compiler

    compiler.BACKEND = "aot_eager"


# ---- bugs ----------------------------------------------------------------------------------------------------------


def mean_of_means() -> None:
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

    Engine._microbatch, Engine._scaled_loss = counting, mean  # type: ignore[method-assign]


def norms_are_not_summed_over_tp() -> None:
    from fivefold.parallel.buckets import Bucket

    Bucket.reduce_extra_axis = lambda self: None  # type: ignore[method-assign]


def gradients_are_divided_by_cp() -> None:
    from fivefold.parallel.zero import ZeroBuckets

    finish = ZeroBuckets.finish_grad_sync

    def divide(self: Any) -> None:
        finish(self)
        for master in self.masters.values():
            master.grad /= self.mesh.cp.size

    ZeroBuckets.finish_grad_sync = divide  # type: ignore[method-assign]


def latents_are_not_summed_over_tp() -> None:
    """The gradient of what all heads read is that of this rank's heads alone."""
    from fivefold.parallel.tensor import GatherFromSP

    GatherFromSP.backward = staticmethod(lambda ctx, gradient: (None, None, gradient))  # type: ignore[method-assign]


def every_step_of_the_ring_has_the_sinks() -> None:
    """They belong into a row of scores once."""
    from fivefold.model import kernels
    from fivefold.parallel.context import OnlineSoftmax

    add = OnlineSoftmax.add

    def once_more(self: Any, work: Any, kv: Any) -> None:
        add(self, work, kv)
        kernels.sink_(self.out, self.lse, self.lse.new_zeros(self.lse.shape[1]))

    OnlineSoftmax.add = once_more  # type: ignore[method-assign]


def the_ring_sees_one_key_too_late() -> None:
    from fivefold.parallel import context
    from fivefold.parallel.context import Tile, ring_tile

    def shifted(rank: int, source: int, share: int) -> Tile:
        tile = ring_tile(rank, source, share)
        return Tile(tile.queries, range(1, len(tile.keys) + 1)) if source < rank else tile

    context.ring_tile = shifted  # type: ignore[attr-defined]


def the_ends_of_a_tied_embedding_are_not_summed() -> None:
    norms_are_not_summed_over_tp()  # by the same method


def a_weight_gradient_is_forgotten() -> None:
    """The last piece of work of every weight-gradient pass."""
    from fivefold.parallel.pipeline import Pipeline

    weight_half = Pipeline._weight_half

    def forgetful(self: Any, action: Any) -> None:
        self.deferred[action.stage, action.microbatch].pop()
        weight_half(self, action)

    Pipeline._weight_half = forgetful  # type: ignore[method-assign]


def microbatches_arrive_in_the_wrong_order() -> None:
    """Of two activations the later one is taken first."""
    from fivefold.parallel.pipeline import Channels

    receive = Channels.receive

    def swapped(self: Any, action: Any, shape: Any) -> Any:
        return receive(self, action._replace(microbatch=action.microbatch ^ 1), shape)

    Channels.receive = swapped  # type: ignore[method-assign]


def a_gradient_stays_away() -> None:
    from fivefold.trainer.engine import Engine

    gradients = Engine.gradients
    Engine.gradients = lambda self: {n: g for n, g in gradients(self).items() if n != "norm.weight"}  # type: ignore[method-assign]


def one_collective_too_many() -> None:
    import torch
    import torch.distributed as dist

    from fivefold.trainer.engine import Engine

    norm = Engine.gradient_norm

    def chatty(self: Any) -> Any:
        dist.all_reduce(torch.zeros(3), group=self.mesh.tp.group)
        return norm(self)

    Engine.gradient_norm = chatty  # type: ignore[method-assign]


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
