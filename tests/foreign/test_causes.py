"""What is named as the cause of a difference: by values made up for that, of two parameters on two ranks."""

from collections.abc import Mapping, Sequence

import numpy as np

from fivefold.foreign.causes import causes
from fivefold.foreign.compare import Deviation
from fivefold.foreign.evidence import Cause, Evidence
from fivefold.foreign.gradient_causes import _mean_of_means
from fivefold.foreign.measurement import Numbers, OneProcess, RankValues, Values

DRAW = np.random.default_rng(1)
SHAPES = {"a": (6,), "b": (10,)}
WHOLE: dict[str, Numbers] = {"a": np.arange(6, dtype=np.int64), "b": np.arange(6, 16, dtype=np.int64)}
GRADIENT, WEIGHTS = DRAW.standard_normal(16), DRAW.standard_normal(16)
MOVED = 0.1 * DRAW.standard_normal(16)
TRUTH = OneProcess(SHAPES, [1.0], [2.0], [GRADIENT], WEIGHTS, [WEIGHTS + MOVED], {}, "")


def on_rank(
    rank: int, gradient: Values = GRADIENT, after: Values = WEIGHTS + MOVED, norm: float = 2.0,
    numbers: Mapping[str, Numbers] = WHOLE,
) -> RankValues:  # fmt: skip
    gradients = {name: gradient[own] for name, own in numbers.items()}
    return RankValues(rank, numbers, [1.0], [norm], [gradients], [{name: after[own] for name, own in numbers.items()}])


def told(layout: str, quantity: str, *ranks: RankValues) -> list[Cause]:
    wrong = [Deviation(quantity, name, 1, 0, 0.5, 1e-10) for name in (SHAPES if quantity != "norm" else [""])]
    return causes(Evidence({layout: 2}, TRUTH, ranks, wrong, {}))


def test_an_update_that_is_wrong_on_one_rank_names_it_and_its_factor() -> None:
    twice = WEIGHTS + 2 * MOVED
    [cause] = told("dp", "parameter", on_rank(0), on_rank(1, after=twice))
    assert cause.text == (
        "gradients are right, and parameters move x 2 as far as they should on rank 1, and right on the others, "
        "so that replicas disagree after the update: a, b"
    )
    shards = [{name: half for name, own in WHOLE.items() for half in [np.array_split(own, 2)[rank]]} for rank in (0, 1)]
    nearly = WEIGHTS + 2 * MOVED * (1 + 1e-4 * DRAW.standard_normal(16))  # as AdamW that steps twice
    [cause] = told("fsdp", "parameter", on_rank(0, numbers=shards[0]), on_rank(1, after=nearly, numbers=shards[1]))
    assert cause.text == (
        "gradients are right, and parameters move about x 2 as far as they should on rank 1, and right on the others: "
        "a, b"
    )
    [cause] = told("dp", "parameter", *(on_rank(rank, after=WEIGHTS) for rank in (0, 1)))
    assert cause.text == "gradients are right, and parameters are not updated: a, b"
    [cause] = told("dp", "parameter", on_rank(0), on_rank(1, after=WEIGHTS + MOVED[::-1]))
    assert "parameters after the update are not on rank 1, and right on the others" in cause.text


def test_a_norm_whose_squares_are_summed_twice_is_named_by_the_square() -> None:
    parts = [{"a": WHOLE["a"][:3], "b": WHOLE["b"][:5]}, {"a": WHOLE["a"][3:], "b": WHOLE["b"][5:]}]
    ranks = [on_rank(rank, norm=2.0 * 2**0.5, numbers=parts[rank]) for rank in (0, 1)]
    [cause] = told("tp", "norm", *ranks)
    assert cause.text == "the gradient norm is x 1.4142136 = the square root of tp, and the gradients are right"
    assert "squares" in cause.likely


def test_gradients_that_are_all_off_by_a_rounding_name_the_narrower_dtype() -> None:
    def off_by(error: float) -> Sequence[Cause]:
        largest = np.repeat([np.abs(GRADIENT[own]).max() for own in WHOLE.values()], [6, 10])
        wrong = GRADIENT + error * largest * np.sign(DRAW.standard_normal(16))
        return told("dp", "gradient", on_rank(0, gradient=wrong), on_rank(1, gradient=wrong))

    assert off_by(2e-3)[0].text == "all 2 gradients are off by about 2e-03, as rounding to bfloat16 gives"
    assert "rounding to float16" in off_by(2e-4)[0].text
    assert "rounding to float32" in off_by(1e-7)[0].text
    assert "autocast" in off_by(2e-3)[0].likely
    assert "no one factor" in off_by(0.1)[0].text
    assert "no one factor" in off_by(3e-6)[0].text


def test_gradients_that_are_not_numbers_are_said_to_be_that_alone() -> None:
    broken = GRADIENT.copy()
    broken[3] = np.nan
    [cause] = told("dp", "gradient", on_rank(0), on_rank(1, gradient=broken))
    assert cause.text == "1 of 2 gradients (a) are not numbers on rank 1"


def test_a_mean_of_means_is_named_where_one_process_has_microbatches_itself() -> None:
    counts = [12, 11, 10, 9, 8, 7, 6, 5]  # two microbatches there, and of each of two ranks
    ratios = [2 * sum(counts[i // 4 * 4 :][:4]) / (4 * sum(counts[i // 2 * 2 :][:2])) for i in range(8)]
    assert _mean_of_means(dict(enumerate(ratios)), counts) == (4, 2)
