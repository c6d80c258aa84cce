"""A parameter of three dimensions, [experts, rows, columns]: through the buckets of one layout, into a checkpoint, and
out of it into the boxes of another."""

from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import Checkpoint, Manifest
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Store
from fivefold.layout.bucket_plan import buckets
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box, LocalParam, tensor_shard
from fivefold.parallel.buckets import slots_of
from fivefold.spec.operations import Parameter, TensorRule
from fivefold.spec.presets import preset

SHAPE = (5, 6, 4)
WHOLE = torch.arange(120.0).view(SHAPE)


def part(box: Box) -> Tensor:
    return WHOLE[tuple(slice(side.start, side.stop) for side in box)].contiguous()


def held(rule: TensorRule, tp: int, rank: int) -> LocalParam:
    experts = Parameter("experts", SHAPE, "linear", 0, rule)
    return LocalParam.of(experts, tensor_shard(experts, preset("tiny"), Layout(tp=tp)), tp, rank)


def test_a_bucket_gives_every_zero_rank_its_share_of_a_stack() -> None:
    for rule, tp, parts in (("colwise", 2, 2), ("rowwise", 2, 3), ("replicated", 1, 4)):
        for rank in range(tp):
            one = held(rule, tp, rank)
            (bucket,) = buckets([one])
            table = torch.full((parts, bucket.padded(parts) // parts), -1.0)
            for index in range(parts):
                master = nn.Parameter(part(one.share(parts, index)))
                (slot,) = slots_of(bucket, {"experts": part(one.box)}, {"experts": master}, parts)
                if index == 0:
                    for place, values in slot.pairs(table, slot.weight):
                        place.copy_(values)
                assert torch.equal(slot.of_master(table[index]), master)
            assert table[table >= 0].numel() == one.size


def test_a_checkpoint_of_a_stack_is_read_in_the_boxes_of_another_layout(tmp_path: Path) -> None:
    shares = [held("colwise", 2, rank).share(3, index) for rank in range(2) for index in range(3)]
    written = [{"model.experts": Shard.of(part(box), SHAPE, box)} for box in shares if all(map(len, box))]
    manifest = Manifest(step=1, samples=0, updates=0, optimizer=False, data="", job={})
    checkpoint = Checkpoint(write_alone(Store(tmp_path), written, manifest, lambda _: None))
    for box in (held("rowwise", 2, 1).share(2, 1), held("replicated", 1, 0).box):
        into = torch.empty([len(side) for side in box])
        load(checkpoint, {"model.experts": Shard.of(into, SHAPE, box)})
        assert torch.equal(into, part(box))
