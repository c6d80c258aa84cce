"""Which layers a stage holds: exactly balanced, or as told."""

import itertools

import pytest

from fivefold.layout.layout import Layout
from fivefold.layout.stages import balance_layers, costs, layer_cost, stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset

DENSE_FIRST = Experts(count=8, top_k=2, ffn=64, dense_layers=2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("vocab", [64, 257, 5000, 100_000])
def test_no_split_has_a_faster_slowest_stage(stages: int, vocab: int) -> None:
    spec = preset("tiny", layers=6, vocab=vocab)
    layer, bottom, top = costs(spec, 32)

    def slowest(sizes: tuple[int, ...]) -> float:
        load = [size * layer for size in sizes]
        load[0] += bottom
        load[-1] += top
        return max(load)

    splits = [sizes for sizes in itertools.product(range(7), repeat=stages) if sum(sizes) == 6]
    assert slowest(balance_layers(spec, stages, 32)) == min(map(slowest, splits))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("spec", "seq"),
    [
        (preset("tiny-deepseek", layers=6, ffn=64, experts=DENSE_FIRST), 32),
        (preset("tiny-deepseek", layers=6, ffn=2000, experts=DENSE_FIRST), 32),
        (preset("tiny-oss", layers=6), 4096),
        (preset("tiny", layers=6, window=16, window_period=3), 100_000),
    ],
)
def test_no_split_is_faster_where_layers_differ(stages: int, spec: ModelSpec, seq: int) -> None:
    _, bottom, top = costs(spec, seq)
    layers = [layer_cost(spec, layer, seq) for layer in range(6)]
    assert len(set(layers)) == 2

    def loads(sizes: tuple[int, ...]) -> list[float]:
        ends = list(itertools.accumulate(sizes, initial=0))
        found = [sum(layers[a:b]) for a, b in itertools.pairwise(ends)]
        return [found[0] + bottom, *found[1:-1], found[-1] + top]

    splits = [sizes for sizes in itertools.product(range(7), repeat=stages) if sum(sizes) == 6]
    best = loads(balance_layers(spec, stages, seq))
    assert max(best) == pytest.approx(min(max(loads(one)) for one in splits))
    even = [one for one in splits if max(loads(one)) <= max(best) * (1 + 1e-9)]
    assert sum(load**2 for load in best) == pytest.approx(min(sum(load**2 for load in loads(one)) for one in even))


def test_a_stage_with_layers_that_see_everything_has_fewer_of_the_others() -> None:
    """Every sixth layer sees 131,072 tokens, and the others see 128 of them."""
    spec = preset("gpt-oss-20b", layers=24, window_period=6, vocab=8)
    wide, narrow = (layer_cost(spec, layer, 131_072) for layer in (5, 0))
    assert wide - narrow == 2 * (131_072 / 2 - 128) * 2 * spec.heads * spec.head_dim
    assert balance_layers(spec, 3, 131_072) == (11, 7, 6)  # with 1, 1 and 2 that see everything


def test_a_large_head_takes_layers_off_the_last_stage() -> None:
    """Llama 3's 405B run did so by hand (arXiv 2407.21783, section 3.3.2)."""
    small, large = (balance_layers(preset("tiny", layers=12, vocab=vocab), 4, 64) for vocab in (64, 4000))
    assert small == (3, 3, 3, 3)
    assert large[-1] < 3
    assert sum(large) == 12


def test_stages_hold_every_parameter_once_and_a_tied_embedding_at_both_ends() -> None:
    for tied in (False, True):
        spec = preset("tiny", layers=5, tied=tied)
        stages = stages_of(spec, Layout(pp=3), 32)
        names = [name for stage in stages for name in stage.names(spec)]
        assert sorted(set(names)) == sorted(parameter.name for parameter in spec.parameters())
        twice = {name for name in names if names.count(name) > 1}
        assert twice == ({"embedding.weight"} if tied else set())


def test_a_split_is_taken_as_it_is() -> None:
    stages = stages_of(preset("tiny"), Layout(pp=3, split=(0, 3, 1)), 32)
    assert [stage.layers for stage in stages] == [range(0), range(3), range(3, 4)]
    assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, False), (False, True)]


def test_ten_thousand_layers_are_balanced_without_trying_all_pairs_of_ends() -> None:
    for changes in ({}, {"window": 128, "window_period": 2}):
        sizes = balance_layers(preset("llama3-8b", layers=10_000, **changes), 3, 8192)
        assert sum(sizes) == 10_000
        assert max(sizes) - min(sizes) <= 5
