"""Two checkouts are compared by what they answer: words, and numbers but for rounding."""

from benchmarks.plan_against import ALIKE, differences


def test_differences_are_found_wherever_they_are() -> None:
    before = {"options": [{"layout": "dp=8", "seconds": 2.0}, {"layout": "tp=8", "seconds": 3.0}], "fitting": 2}
    assert list(differences(before, before)) == []
    rounded = {"options": [{"layout": "dp=8", "seconds": 2.0 * (1 + ALIKE / 2)}, before["options"][1]], "fitting": 2}
    assert list(differences(before, rounded)) == []
    slower = {"options": [{"layout": "dp=8", "seconds": 2.001}, before["options"][1]], "fitting": 3}
    assert list(differences(before, slower)) == [("options[0].seconds", 2.0, 2.001), ("fitting", 2, 3)]
    assert list(differences(before, before | {"options": []})) == [("options", before["options"], [])]
