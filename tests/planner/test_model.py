"""One model, shown."""

import pytest

from fivefold.planner.model_summary import model
from fivefold.spec.presets import PRESETS
from fivefold.support.errors import UserError
from tests.commands import fivefold


@pytest.mark.parametrize("name", ["tiny-gpt", "llama3-8b", "qwen2.5-0.5b", "tiny-deepseek"])
def test_the_parts_add_up_to_the_model(name: str) -> None:
    found = model(name)
    assert sum(found.parts.values()) == found.spec.parameter_count
    assert ("head" in found.parts) == (not found.spec.tied)
    assert ("biases" in found.parts) == (name in ("tiny-gpt", "qwen2.5-0.5b"))


def test_every_preset_says_where_its_numbers_come_from() -> None:
    assert all(model(name).source != "not stated" for name in PRESETS)


def test_a_model_is_shown_by_name_and_an_unknown_one_is_answered_with_the_nearest(tmp_path) -> None:
    shown = fivefold("list", "models", "llama3-8b", "--seq", "8192", cwd=tmp_path)
    assert shown.returncode == 0
    for text in ("8,030,261,248", "meta-llama/Meta-Llama-3", "144.54", "57.91B"):
        assert text in shown.stdout, text
    refused = fivefold("list", "models", "llama-3-8b", cwd=tmp_path)
    assert refused.returncode == 2
    assert "did you mean 'llama3-8b'" in refused.stderr
    table = model("llama3-8b", seq=8192).to_dict()
    assert (table["layers"], table["parameters"], table["training_bytes"]["bfloat16"]["total"]) == (
        32, 8_030_261_248, 18 * 8_030_261_248 - 2 * 65 * 4096  # a norm's weight is its master
    )  # fmt: skip


def test_experts_have_a_line_for_each_number_and_a_part_of_their_own(tmp_path) -> None:
    shown = fivefold("list", "models", "tiny-deepseek", cwd=tmp_path).stdout
    assert "1,055,424 parameters, 613,056 of them active for a token" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("experts top")] == [
        ["experts", "top", "k", "2"], ["experts", "top", "groups", "2"]
    ]  # fmt: skip
    assert model("tiny-deepseek").parts["experts"] == 3 * 8 * 3 * 128 * 64


def test_a_model_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="seq=0 must be at least 1"):
        model("tiny", seq=0)
