"""Bytes that a rank holds between steps: parameters, gradients, optimizer state, by ZeRO stage.

With N ranks to shard over (dp x cp, or dp/replicate x cp; of experts the ranks that have the same ones), P parameters
per tp rank, in bytes per parameter:

  stage   parameters   gradients   optimizer state
  0       c            a           s
  1       c            a           s/N
  2       c            a/N         s/N
  3       a/N          a/N         m/N      (FSDP2 keeps the full-precision weights themselves in shards)

c is the compute dtype's size, a the accumulation dtype's (4, or 8 in float64), m what the optimizer's states take (2a
for AdamW's two moments), s is m and a more where a full-precision master is kept beside a bfloat16 weight. Where c is
a, the weights are the masters: also in bfloat16 those of parameters that are never rounded (norms, sinks), which stage
3 does not shard. `Accounting` is this table, and whoever counts state reads it.
"""

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RANK0, RankCoords
from fivefold.layout.sharding import LocalParam, local_params
from fivefold.layout.stages import stages_of
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, states_of
from fivefold.spec.model import ModelSpec
from fivefold.support.dtypes import DTYPE_BYTES, dtype_of_bytes, wide_bytes
from fivefold.support.text import bytes_text, si

ADAMW = AdamW()


class State(NamedTuple):
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Accounting:
    """Bytes per parameter. Two have names, because people mean different ones."""

    weight: int  # in compute
    gradient: int
    master: int  # beside the weight; 0: the weight is as wide, and is the master itself
    states: float  # of the optimizer
    sharded_masters: bool = True  # ZeRO 3 keeps the master as its only copy, and gathers compute weights from it

    @classmethod
    def of(cls, dtype: str, states: int = len(AdamW.states)) -> "Accounting":
        """This code's: gradients are added up, and masters and states kept, in float32 at least. `states`: how many
        the optimizer has of a parameter."""
        compute, full = DTYPE_BYTES[dtype], wide_bytes(dtype)
        return cls(compute, full, full if compute < full else 0, full * states)

    @property
    def saved(self) -> float:
        """What a checkpoint has: masters and states."""
        return (self.master or self.weight) + self.states

    def held(self, weights: Any, gradients: Any, owned: Any, sharded: Any = False) -> State:
        """The state of a rank with so many compute weights and gradients, which updates `owned` parameters. `sharded`:
        the weights are those of ZeRO 3. Numbers, or arrays of them."""
        only = 1 * sharded if self.sharded_masters else 0  # the masters, and no weights beside them
        each = only * (self.master or self.weight) + (1 - only) * self.weight
        beside = self.states + (1 - only) * self.master
        return State(each * weights, self.gradient * gradients, beside * owned)

    def state(self, full: Any, share: Any, zero: Any, ranks: Any) -> State:
        """The state of a rank that computes with `full` parameters and owns `share` of them, with `ranks` to shard
        over. Numbers, or arrays of them."""
        sharded = (zero == 3) & (ranks > 1)

        def held(divided: Any) -> Any:
            return divided * share + (1 - 1 * divided) * full

        return self.held(held(sharded), held(sharded | (zero == 2)), held(zero > 0), sharded)


# The ZeRO paper's (arXiv 1910.02054, table 1): gradients in two bytes. 7.5 billion parameters on 64 GPUs: 120, 31.4,
# 16.6 and 1.88 GB with stages 0 to 3.
PAPER_ACCOUNTING = Accounting(weight=2, gradient=2, master=4, states=8, sharded_masters=False)
FIVEFOLD_ACCOUNTING = Accounting.of("bfloat16")  # this code's, with AdamW: gradients are added up in float32


def paper(parameters: float, zero: int, ranks: int) -> State:
    """What the ZeRO paper counts for a model of so many parameters, without tp and pp."""
    return PAPER_ACCOUNTING.state(parameters, parameters / ranks, zero, ranks)


def state(spec: ModelSpec, layout: Layout, dtype: str, optimizer: OptimizerConfig = ADAMW) -> State:
    """What a rank of this code holds at most, to the byte: uneven shards are largest on the first of their axis."""
    states = [state_of(spec, layout, dtype, optimizer, RankCoords(pp=rank)) for rank in range(layout.pp)]
    return State(*map(max, zip(*states, strict=True)))


def state_of(
    spec: ModelSpec,
    layout: Layout,
    dtype: str,
    optimizer: OptimizerConfig = ADAMW,
    at: RankCoords = RANK0,
    *,
    seq: int | None = None,
    narrow: bool = False,
) -> State:
    """What the rank at these coordinates holds, to the byte.

    Layers are divided among stages for sequences of `seq` tokens; of the model's context where it is not said.
    Gradients are those that exist between microbatches. Buckets, and FSDP2, pad shares to the longest. `narrow`:
    gradients of a single microbatch that no other rank or stage has a part in stay in the dtype they come in, as they
    do on a GPU.
    """
    mixed, wide = DTYPE_BYTES[dtype] < wide_bytes(dtype), dtype_of_bytes(wide_bytes(dtype))
    stages = stages_of(spec, layout, seq or spec.context)
    own_stages = [stages[number] for number in layout.placement.of_rank[at.pp]]
    # An embedding that first and last stage share on one rank counts once.
    here = [
        param
        for param in local_params(spec, layout, at.tp, at.ep).values()
        if any(stage.holds(param.parameter) for stage in own_stages)
    ]
    alike: dict[tuple[str, bool, int], list[LocalParam]] = defaultdict(list)
    for param in here:
        exact, states = mixed and param.parameter.full_precision, len(states_of(optimizer, param.parameter))
        alike[param.fsdp_axis, exact, states].append(param)
    held = [State(0, 0, 0)]
    for (axis, exact, states), parts in alike.items():
        place = at.fsdp if axis == "fsdp" else at.efsdp
        ranks = layout.size(axis)
        each = Accounting.of(wide if exact else dtype, states)
        full = sum(param.size for param in parts)
        owned = sum(math.prod(map(len, param.share(ranks, place))) for param in parts)
        padded = sum(param.share_size(ranks) for param in parts)
        if layout.fully_shards(spec):
            held.append(each.held(full, full, full) if exact else each.held(padded, padded, owned, sharded=True))
            continue
        stage = layout.zero if ranks > 1 else 0
        gradients = {0: full, 1: padded * ranks, 2: padded}[stage]
        state = each.held(full, gradients, owned if stage else full)
        if narrow and ranks == layout.microbatches == 1:
            final = [param for param in parts if not param.tp.partial and not (param.parameter.tied and layout.pp > 1)]
            less = (each.gradient - each.weight) * sum(param.size for param in final)
            state = state._replace(gradients=state.gradients - less)
        held.append(state)
    return State(*map(sum, zip(*held, strict=True)))


def checkpoint_bytes(spec: ModelSpec, dtype: str, optimizer: OptimizerConfig = ADAMW) -> int:
    """Bytes of a checkpoint, of all ranks together: masters and the optimizer's states."""
    if optimizer.unit == "element":
        return round(spec.parameter_count * Accounting.of(dtype, len(optimizer.states)).saved)
    held = (param.size * Accounting.of(dtype, len(states_of(optimizer, param))).saved for param in spec.parameters())
    return round(sum(held))


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_problems(job: Job, ranks: int, have: int, where: str) -> list[str]:
    """Why `ranks` ranks do not fit into the `have` bytes that they share."""
    each = state(job.model, job.layout, job.train.dtype, job.optimizer).total
    if each * ranks <= have:
        return []
    on_it = f" on each of the {ranks} ranks that share it" if ranks > 1 else ""
    return [
        f"{job.model.name} has {si(job.model.parameter_count)} parameters: weights, gradients and optimizer take "
        f"{bytes_text(each)} in {job.train.dtype}{on_it}, and {where} has {bytes_text(have)}; take a smaller "
        f"model, or fewer layers: model.layers={max(1, job.model.layers * have // (each * ranks))} may fit"
    ]


def proof_problems(job: Job) -> list[str]:
    """The same for a job's ranks on this machine, and for the single process that they are held against."""
    if job.train.device == "cuda":
        return []  # each rank looks at its own GPU when it starts
    alone = msgspec.structs.replace(job, layout=Layout())
    here = host_memory(), "this machine"
    return memory_problems(job, job.layout.world, *here) or memory_problems(alone, 1, *here)
