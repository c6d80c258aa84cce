"""The attention lab: the numbers it shows are those of real ranks, and bad shapes start none."""

import pytest
from benchmarks.attention import AttentionShape, measure

from fivefold.support.errors import UserError

SMALL = {"hidden": 32, "heads": 4, "kv_heads": 2, "seq": 16, "batch": 2, "dtype": "float64", "rounds": 1}


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree_with_one_process_far_below_what_is_asked(tp: int) -> None:
    result = measure(AttentionShape(tp=tp, **SMALL))
    assert set(result.errors) == {"output", "input gradient", "q.weight", "k.weight", "v.weight", "o.weight"}
    assert max(result.errors.values()) < 1e-13
    assert result.ok
    shown = result.to_dict()
    assert shown["speed_up"] == pytest.approx(result.alone / result.together)
    assert shown["efficiency"] == pytest.approx(shown["speed_up"] / tp)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tp": 3}, "tp=3 does not divide the 4 attention heads"),
        ({"tp": 0}, "--tp=0 must be at least 1"),
        ({"dtype": "float16"}, "unknown --dtype 'float16'"),
        ({"hidden": 33}, "hidden=33 does not divide"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        measure(AttentionShape(**{"tp": 2, **SMALL, **change}))
