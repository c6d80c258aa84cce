"""Ranges stand with their fields."""

import itertools

import msgspec
import pytest

from fivefold.layout.layout import Layout
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.ranges import check_range, outside, within


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (10, None), (11, "seq=11 is more than 10"), (0, "seq=0 must be at least 1; give more"),
        (1 << 16609, "seq=2^16609 or so is more than 10"), (1.0, "seq=1.0 is not a whole number"),
        (float("nan"), "seq=nan is not a whole number"), (True, "seq=True is not a whole number"),
        ("2", "seq='2' is not a whole number"),
    ],
    ids=itertools.count(),  # Python does not print a number of thousands of digits
)  # fmt: skip
def test_an_argument_is_held_against_its_range(value, sentence: str | None) -> None:
    allowed = within(1, 10, "give more")
    if sentence is None:
        assert check_range("seq", value, allowed) == value
    else:
        with pytest.raises(UserError) as caught:
            check_range("seq", value, allowed)
        assert caught.value.problems == [sentence]


def test_every_field_outside_of_its_range_is_named() -> None:
    odd = msgspec.structs.replace(preset("tiny"), layers=2_000_000, vocab=0)
    assert outside(odd, "model") == {
        "layers": "model.layers=2000000 is more than 10000",
        "vocab": "model.vocab=0 must be at least 1",
    }
    assert outside(preset("gpt3-175b"), "model") == outside(Layout(), "layout") == {}
