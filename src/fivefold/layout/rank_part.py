"""Where one rank is, and all that it has: layers, heads, experts, tokens, sequences and shards.

part_of(spec, Layout(dp=2, tp=4, pp=2), seq=4096, batch=64, rank=5).heads       # range(8, 16) of 32

Each field is computed by the same functions that the training rank calls.
"""

import math
from typing import NamedTuple, Self

from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk, kv_head, local_params
from fivefold.layout.stages import Stage, stages_of
from fivefold.spec.model import ModelSpec


class RankCoords(NamedTuple):
    """Mesh coordinates of a rank that affect what it sends, holds and computes."""

    tp: int = 0  # ranks along tp differ where the vocabulary does not divide
    pp: int = 0  # they have other stages
    fsdp: int = 0  # where the rows of a tied embedding do not divide
    ep: int = 0  # they have other experts
    efsdp: int = 0
    stage: int = 0  # where an optimizer reads whole matrices: each updates others of those that have the same layers

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """The coordinates of a global rank."""
        return cls(*(layout.position(axis, rank) for axis in cls._fields))


RANK0 = RankCoords()


class RankPart(NamedTuple):
    rank: int
    at: dict[str, int]  # its coordinates along dp, pp, cp and tp
    stages: tuple[Stage, ...]
    heads: range
    kv_heads: range
    experts: range  # of each mixture-of-experts layer
    positions: list[range]  # of tokens within every sequence
    sequences: range  # rows of the global batch
    parameters: int  # number of elements that it computes with
    own: int  # number of elements that it updates: under ZeRO its shard

    @property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in stage.layers]


def part_of(spec: ModelSpec, layout: Layout, seq: int, batch: int, rank: int) -> RankPart:
    at = {axis: layout.position(axis, rank) for axis in ("tp", "pp", "cp", "ep", "batch", "fsdp", "efsdp")}
    all_stages = stages_of(spec, layout, seq)
    stages = tuple(all_stages[index] for index in layout.placement.of_rank[at["pp"]])
    names = dict.fromkeys(name for stage in stages for name in stage.names(spec))  # a tied embedding once
    all_params = local_params(spec, layout, at["tp"], at["ep"])
    params = [all_params[name] for name in names]
    shards = [param.share(layout.size(param.fsdp_axis), at[param.fsdp_axis]) for param in params]
    count = sum(param.size for param in params)
    return RankPart(
        rank,
        layout.coordinates(rank),
        stages,
        chunk(spec.heads, layout.tp, at["tp"]),
        kv_head(spec, layout, at["tp"]),
        range(0) if spec.experts is None else chunk(spec.experts.count, layout.ep, at["ep"]),
        context_share(seq, layout, at["cp"]),
        chunk(batch, layout.size("batch"), at["batch"]),
        count,
        sum(math.prod(map(len, shard)) for shard in shards) if layout.zero else count,
    )
