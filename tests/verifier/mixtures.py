"""Small mixtures of experts to prove, and bugs that others have shipped: patches that a rank enters."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from fivefold.job.config import Job
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.verifier.cases import with_balance
from tests.verifier import cases
from tests.verifier.cases import tiny

MIXTRAL = Experts(count=8, top_k=2, ffn=12)
DEEPSEEK = Experts(
    count=8, top_k=2, ffn=12, shared=1, dense_layers=1, scores="sigmoid", scale=2.5, groups=4, top_groups=2,
    balance_bias=True,
)  # fmt: skip


def moe(experts: Experts = MIXTRAL, **changes: Any) -> ModelSpec:
    return tiny(experts=experts, **changes)


def job(layout: str, spec: ModelSpec | None = None, dtype: str = "float64", seq: int = 16, **train: Any) -> Job:
    """One step, with everything that keeps the load even, unless something else is asked for."""
    made = cases.job(layout, spec or moe(), dtype, **{"steps": 1} | train)
    made = msgspec.structs.replace(made, data=msgspec.structs.replace(made.data, seq=seq))
    return with_balance(made, [f"train.{name}" for name in train])


# ---- gradients -----------------------------------------------------------------------------------------------------


def _after_finish(change: Callable[[Any, str, Any], None]) -> AbstractContextManager[Any]:
    """Change the gradients of experts, when they are complete."""
    from fivefold.parallel.zero import ZeroBuckets

    finish = ZeroBuckets.finish_grad_sync

    def changed(self: Any) -> None:
        finish(self)
        for name, one in self.local_params.items():
            if one.parameter.experts:
                change(self, name, self.masters[name].grad)

    return patch.object(ZeroBuckets, "finish_grad_sync", changed)


def gradients_are_divided_by_ep() -> AbstractContextManager[Any]:
    return _after_finish(lambda weights, name, gradient: gradient.div_(weights.mesh.ep.size))


def gradients_are_multiplied_by_ep() -> AbstractContextManager[Any]:
    return _after_finish(lambda weights, name, gradient: gradient.mul_(weights.mesh.ep.size))


def experts_are_reduced_over_the_dense_group() -> AbstractContextManager[Any]:
    from fivefold.parallel.weights import Weights

    return patch.object(Weights, "fsdp_axis_of", lambda self, one: self.mesh.fsdp)


def the_router_is_not_summed_over_tp() -> AbstractContextManager[Any]:
    return cases.norms_are_not_summed_over_tp()  # by the same method


def the_router_is_detached() -> AbstractContextManager[Any]:
    from fivefold.model.router import Router

    forward = Router.forward

    def detached(self: Any, *inputs: Any) -> Any:
        routed = forward(self, *inputs)
        return replace(routed, weights=routed.weights.detach())

    return patch.object(Router, "forward", detached)


def copies_of_hybrid_sharding_are_not_summed() -> AbstractContextManager[Any]:
    from fivefold.parallel.mesh import Mesh

    submesh = Mesh.submesh

    def without_copies(self: Any, *names: str) -> Any:
        return submesh(self, *(("efsdp",) if "efsdp" in names else names))

    return patch.object(Mesh, "submesh", without_copies)


# ---- the norm ------------------------------------------------------------------------------------------------------


def _norm_counts(experts: Callable[[int], int]) -> AbstractContextManager[Any]:
    """`experts`: which copy a shard of experts is said to be, given which it is; copy 0 counts."""
    from fivefold.parallel.weights import Weights

    copies = Weights.copies

    def said(self: Any, name: str) -> tuple[int, int]:
        number, of = copies(self, name)
        return (experts(number) if self.local_params[name].parameter.experts else number), of

    return patch.object(Weights, "copies", said)


def the_norm_leaves_experts_out() -> AbstractContextManager[Any]:
    return _norm_counts(lambda number: 1)


def the_norm_counts_copies_of_experts() -> AbstractContextManager[Any]:
    return _norm_counts(lambda number: 0)


def ranks_clip_by_norms_of_their_own() -> AbstractContextManager[Any]:
    from fivefold.parallel.optimizer import Optimizer

    step = Optimizer.step

    def alone(self: Any, lr: float | None, norm: Any) -> None:
        squares = [p.grad.square().sum() for p in self.weights.masters.values() if p.grad is not None]
        step(self, lr, sum(squares).sqrt().to(norm))

    return patch.object(Optimizer, "step", alone)


def the_optimizer_skips_experts_without_tokens() -> AbstractContextManager[Any]:
    """As one that takes experts one by one does with those whose gradient is None."""
    from fivefold.parallel.optimizer import Optimizer

    step = Optimizer.step

    def skipping(self: Any, lr: float | None, norm: Any) -> None:
        still = []
        for name, master in self.weights.masters.items():
            experts = self.weights.local_params[name].parameter.experts
            if experts and master.grad is not None:
                empty = master.grad.unflatten(0, (experts // self.mesh.ep.size, -1)).flatten(1).eq(0).all(1)
                still.append((master, empty, master.detach().clone()))
        step(self, lr, norm)
        for master, empty, before in still:
            rows = empty.repeat_interleave(len(master) // len(empty))
            master.data[rows] = before[rows]

    return patch.object(Optimizer, "step", skipping)


# ---- losses that even the load out ---------------------------------------------------------------------------------


def _losses(change: Callable[[Any, Any], Any], only: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """Other factors and divisors, in the stages that `only` is true of."""
    from fivefold.trainer.engine import RankModel

    stages = RankModel._stages

    def changed(self: Any) -> Any:
        made = stages(self)
        for model in made.values():
            for block in model.layers.values():
                if hasattr(block.mlp, "balance") and only(model.stage):
                    block.mlp.balance = change(block.mlp.balance, self.mesh)
        return made

    return patch.object(RankModel, "_stages", changed)


def the_balance_loss_is_divided_by_dp() -> AbstractContextManager[Any]:
    return _losses(lambda asked, mesh: replace(asked, rows=asked.rows * mesh.batch.size), lambda stage: True)


def the_balance_loss_leaves_masked_tokens_out() -> AbstractContextManager[Any]:
    """It counts only tokens that the loss mask lets count; of one microbatch."""
    from fivefold.trainer.engine import Engine

    make, masks = Engine._microbatch, []

    def noting(self: Any, *inputs: Any, **extras: float) -> Any:
        made = make(self, *inputs, **extras)
        masks.append(made.targets.mask)
        return made

    def masked(experts: Any, routed: Any, rows: Any, counts: Any, length: int) -> Any:
        share = counts.to(routed.scores) * (experts.count / (experts.top_k * length))
        return (share[rows] * routed.scores * masks[-1].reshape(-1, 1)).sum() / length

    both = ExitStack()
    both.enter_context(patch.object(Engine, "_microbatch", noting))
    both.enter_context(patch("fivefold.model.moe.balance_loss", masked))
    return both


def losses_are_dropped_but_on_the_last_stage() -> AbstractContextManager[Any]:
    return _losses(lambda asked, mesh: replace(asked, loss=0.0, z_loss=0.0), lambda stage: not stage.last)


# ---- load and bias -------------------------------------------------------------------------------------------------


def a_recomputation_counts_the_load() -> AbstractContextManager[Any]:
    from fivefold.model.recompute import is_recomputing
    from fivefold.model.router import Router

    forward = Router.forward

    def counting(self: Any, *inputs: Any) -> Any:
        routed = forward(self, *inputs)
        if is_recomputing():
            self.count(routed.counts)
        return routed

    return patch.object(Router, "forward", counting)


def the_bias_moves_with_every_microbatch() -> AbstractContextManager[Any]:
    from fivefold.model.load_balancing import update_expert_bias
    from fivefold.model.router import Router

    forward = Router.forward

    def moving(self: Any, *inputs: Any) -> Any:
        routed = forward(self, *inputs)
        if self.balance is not None:
            update_expert_bias(self.balance, routed.counts, 0.05)
        return routed

    return patch.object(Router, "forward", moving)


# ---- routing -------------------------------------------------------------------------------------------------------


def an_expert_is_chosen_twice() -> AbstractContextManager[Any]:
    from fivefold.model.router import Router

    best = Router.top_k

    def twice(self: Any, scores: Any) -> Any:
        chosen = best(self, scores)
        return chosen[:, :1].expand_as(chosen).contiguous()

    return patch.object(Router, "top_k", twice)


def tokens_are_weighted_before_the_experts() -> AbstractContextManager[Any]:
    """Of a model whose tokens visit one expert each."""
    from fivefold.parallel.token_dispatch import AllToAllDispatch

    run = AllToAllDispatch.run

    def before(self: Any, x: Any, routed: Any, *rest: Any) -> Any:
        return run(self, x * routed.weights.to(x), replace(routed, weights=routed.weights / routed.weights), *rest)

    return patch.object(AllToAllDispatch, "run", before)


def every_tp_rank_routes_all_tokens() -> AbstractContextManager[Any]:
    from fivefold.parallel.expert_parallel import ExpertParallelDispatch

    make = ExpertParallelDispatch.__init__

    def whole(self: Any, *inputs: Any) -> None:
        make(self, *inputs)
        self.slices = False

    return patch.object(ExpertParallelDispatch, "__init__", whole)


def a_rank_without_tokens_stays_away() -> None:
    """A hook, not a patch: the others wait for it."""
    from fivefold.parallel.token_dispatch import AllToAllDispatch

    run = AllToAllDispatch.run

    def away(self: Any, x: Any, *rest: Any) -> Any:
        return run(self, x, *rest) if len(x) else (x, None)

    AllToAllDispatch.run = away  # type: ignore[method-assign]
