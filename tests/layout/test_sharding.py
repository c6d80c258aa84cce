"""Parameters of any number of dimensions: who holds which box of them, in buckets, shards and checkpoints."""

from itertools import product

import pytest

from fivefold.layout.bucket_plan import buckets
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box, LocalParam, TensorShard, local_params, tensor_shard
from fivefold.layout.stages import Stage
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT, Parameter, TensorRule
from fivefold.spec.presets import preset

SPEC = preset("tiny")
EXPERTS = Parameter("layers.1.mlp.experts.weight", (5, 6, 4), "linear", 1, "colwise")  # [experts, rows, columns]


def places(box: Box) -> list[tuple[int, ...]]:
    return list(product(*box))


def of(rule: TensorRule, layout: Layout, rank: int = 0, parameter: Parameter = EXPERTS) -> LocalParam:
    parameter = parameter._replace(tp=rule)
    return LocalParam.of(parameter, tensor_shard(parameter, SPEC, layout), layout.tp, rank)


@pytest.mark.parametrize("rule", ["colwise", "rowwise"])
@pytest.mark.parametrize(("tp", "zero"), [(1, 3), (2, 1), (2, 2), (2, 4)])
def test_every_element_of_a_stack_of_matrices_is_held_once(rule: TensorRule, tp: int, zero: int) -> None:
    found = [
        place
        for rank in range(tp)
        for index in range(zero)
        for place in places(of(rule, Layout(tp=tp), rank).share(zero, index))
    ]
    assert sorted(found) == places(tuple(map(range, EXPERTS.shape)))


def test_rows_and_columns_are_the_last_two_dimensions_of_a_weight_and_rows_the_last_of_a_bias() -> None:
    bias = Parameter("layers.1.mlp.experts.bias", (5, 6), "bias", 1)
    assert of("colwise", Layout(tp=2)).shape == (5, 3, 4)
    assert of("rowwise", Layout(tp=2)).shape == (5, 6, 2)
    assert of("colwise", Layout(tp=2), parameter=bias).shape == (5, 3)
    assert of("replicated", Layout(tp=2)).shape == of("per_head", Layout(tp=2)).shape == EXPERTS.shape


def test_what_a_rank_sees_of_the_model_decides_whether_its_gradient_is_a_summand() -> None:
    flat, sp = Layout(tp=4), Layout(tp=4, sp=True)
    assert SPEC.kv_heads == 2
    assert of("colwise_kv", Layout(tp=2)).tp == TensorShard(1)
    assert of("colwise_kv", flat).tp == TensorShard(None, partial=True)
    assert [of("per_head", layout).tp.partial for layout in (Layout(), flat, sp)] == [False, True, True]
    assert [of("replicated", layout).tp.partial for layout in (Layout(), flat, sp)] == [False, False, True]


def test_shares_of_a_stack_are_padded_to_the_first() -> None:
    one = of("colwise", Layout(tp=2))
    (bucket,) = buckets([one])
    assert (one.size, bucket.size(), bucket.units) == (60, 60, (1,))
    assert [one.share(2, index)[0] for index in range(2)] == [range(3), range(3, 5)]
    assert one.share_size(2) == 36
    assert bucket.padded(2) == 72
    (late,) = buckets([one], split_backward=True)
    assert late.deferred


def test_a_stage_holds_its_layers_and_its_ends() -> None:
    first, middle, last = (
        Stage(0, range(1), True, False),
        Stage(1, range(1, 2), False, False),
        Stage(2, range(0), False, True),
    )
    table = Parameter("embedding.weight", (8, 4), "embedding", EMBEDDING_UNIT, "colwise")
    head = Parameter("head.weight", (8, 4), "linear", HEAD_UNIT, "colwise")
    assert [stage.holds(EXPERTS) for stage in (first, middle, last)] == [False, True, False]
    assert [stage.holds(table) for stage in (first, middle, last)] == [True, False, False]
    assert [stage.holds(table._replace(tied=True)) for stage in (first, middle, last)] == [True, False, True]
    assert [stage.holds(head) for stage in (first, middle, last)] == [False, False, True]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt"])
def test_the_ranks_of_a_model_hold_all_of_it(name: str) -> None:
    spec = preset(name)
    for tp in (1, 2, 4):
        ranks = [local_params(spec, Layout(tp=tp), rank) for rank in range(tp)]
        for parameter in spec.parameters():
            boxes = {rank[parameter.name].box for rank in ranks}
            assert sum(rank[parameter.name].size for rank in ranks) * len(boxes) == parameter.size * tp
