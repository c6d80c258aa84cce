"""A rank's part: which layers, heads, experts, tokens, sequences and shards it has.

part_of(spec, Layout(dp=2, tp=4, pp=2), seq=4096, batch=64, rank=5).heads       # range(8, 16) of 32

Each field is what the rank that trains would say: `stages`, `sharding` and `buckets` are asked, and nothing else.
"""

import math
from typing import NamedTuple

from fivefold.layout.buckets import held
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk, context_share, kv_head
from fivefold.layout.stages import Stage, stages_of
from fivefold.spec.model import ModelSpec


class Part(NamedTuple):
    rank: int
    at: dict[str, int]  # its place along dp, pp, cp and tp
    stages: tuple[Stage, ...]
    heads: range
    kv_heads: range
    experts: range  # of each layer that has some
    positions: list[range]  # of every sequence
    sequences: range  # of the global batch
    parameters: int  # that it computes with
    own: int  # that it updates: its shard of them, under ZeRO

    @property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in stage.layers]


def part_of(spec: ModelSpec, layout: Layout, seq: int, batch: int, rank: int) -> Part:
    at = {axis: layout.position(axis, rank) for axis in ("tp", "pp", "cp", "ep", "batch", "zero", "ezero")}
    every = stages_of(spec, layout, seq)
    stages = tuple(every[number] for number in layout.placement.of_rank[at["pp"]])
    names = dict.fromkeys(name for stage in stages for name in stage.names(spec))  # a tied embedding once
    boxes = held(spec, layout, at["tp"], at["ep"])
    mine = [boxes[name] for name in names]
    shards = [one.share(layout.size(one.zero_axis), at[one.zero_axis]) for one in mine]
    whole = sum(one.size for one in mine)
    return Part(
        rank,
        layout.coordinates(rank),
        stages,
        chunk(spec.heads, layout.tp, at["tp"]),
        kv_head(spec, layout, at["tp"]),
        range(0) if spec.experts is None else chunk(spec.experts.count, layout.ep, at["ep"]),
        context_share(seq, layout, at["cp"]),
        chunk(batch, layout.size("batch"), at["batch"]),
        whole,
        sum(math.prod(map(len, shard)) for shard in shards) if layout.zero else whole,
    )
