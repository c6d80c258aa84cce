"""Where local elements lie in the whole, found by loading their numbers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fivefold.foreign import numbering
from fivefold.foreign.adapter import Adapter
from fivefold.foreign.compare import Tensors, at_numbers
from fivefold.foreign.rank import _check_whole
from tests.refusals import refusal

SHAPES = {"a.weight": (6, 5), "b": (700,)}


def adapter(load: Any = None) -> Adapter:
    found = Adapter.__new__(Adapter)
    found.given, found.own_load = SimpleNamespace(), load
    return found


class Local(nn.Module):
    """Rows 2 to 3 of a, then the last two columns of its first row; b reversed, and three elements of padding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(12, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(703, dtype=dtype))


def load(model: Local, full: dict[str, torch.Tensor]) -> None:
    a = full["a.weight"]
    model.fused.copy_(torch.cat([a[2:4].reshape(-1), a[0, 3:]]))
    model.b[:700] = full["b"].flip(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cut_fused_permuted_and_padded_parameters_are_found(dtype: torch.dtype) -> None:
    numbers = numbering.find(adapter(load), Local(dtype), SHAPES)  # bfloat16 needs several digits
    assert numbers["fused"].tolist() == [*range(10, 20), 3, 4]
    assert numbers["b"].tolist() == [*range(729, 29, -1), -1, -1, -1]


def test_weights_that_are_computed_with_are_refused() -> None:
    def halved(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
        load(model, {name: 2 * tensor for name, tensor in full.items()})  # type: ignore[arg-type]

    assert refusal(lambda: numbering.find(adapter(halved), Local(torch.float64), SHAPES)).codes == ["adapter.load"]


def test_the_usual_load_copies_by_name_and_refuses_other_shapes() -> None:
    model = nn.Linear(5, 6, bias=False)
    numbers = numbering.find(adapter(), model, {"weight": (6, 5)})
    assert numbers["weight"].tolist() == [*range(30)]
    assert refusal(lambda: numbering.find(adapter(), model, {"weight": (3, 5)})).codes == ["adapter.load"]
    assert refusal(lambda: numbering.find(adapter(), model, {"other": (6, 5)})).codes == ["adapter.named"]


def test_weights_begin_in_general_position() -> None:
    model = nn.LayerNorm(64)
    full = numbering.general_position(adapter(), model)
    assert float(full["bias"].abs().min()) > 0
    assert float((full["weight"] - 1).abs().min()) > 0


def test_values_are_put_at_their_numbers() -> None:
    whole = at_numbers({"x": np.array([4, -1, 0])}, {"x": np.array([1.0, 2.0, 3.0])}, 5)
    assert whole[[4, 0]].tolist() == [1.0, 3.0]
    assert np.isnan(whole[1:4]).all()


def test_one_process_must_load_every_element_where_it_is() -> None:
    tensors = Tensors({"a": (2,), "b": (2, 1)})
    _check_whole({"a": np.array([0, 1]), "b": np.array([2, 3])}, tensors)
    for b in ([3, 2], [2, -1], [2]):  # another order, one that is not loaded, one too few
        error = refusal(lambda b=b: _check_whole({"a": np.array([0, 1]), "b": np.array(b)}, tensors))
        assert error.codes == ["adapter.load"]
        assert "of b " in str(error)
