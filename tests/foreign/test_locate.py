"""Where a difference begins, which masks are wrong, and how a factor is named: by values made up for that."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from fivefold.foreign.adapter import Adapter
from fivefold.foreign.compare import Held, Tensors, Truth, _tensors
from fivefold.foreign.evidence import factor_name
from fivefold.foreign.gradient_causes import _mean_of_means
from fivefold.foreign.locate import _backward, _by_module, _forward, _other_buffers, in_order
from fivefold.foreign.masks import same_masks, unlike_masks
from fivefold.foreign.measurement import Buffer, Call, Drop, Observation
from fivefold.foreign.watch import watching

DRAW = np.random.default_rng(0)
NOTHING = np.zeros((0, 2))
ROWS = {name: (DRAW.standard_normal((8, 2)), DRAW.standard_normal((8, 2))) for name in ("a", "b", "c")}


def calls(**changed: tuple[object, object]) -> list[Call]:
    """One call of each module in order; a change is (factor of the output, factor of its gradient)."""
    found, entered = [], NOTHING
    for name, (outputs, gradients) in ROWS.items():
        output, gradient = changed.get(name, (1.0, 1.0))
        found.append(Call(name, entered, outputs * output, gradients * gradient, 4))
        entered = outputs * output
    return found


TRUTH = _by_module(calls())


def test_a_gradient_that_changes_its_size_is_found_between_two_modules() -> None:
    [cause] = _backward({0: calls(), 1: calls(a=(1.0, 2.0))}, TRUTH, 1e-8)
    assert cause.text == (
        "backward: between the outputs of b and a the gradient becomes x 2 of what it is in one process, on rank 1"
    )
    assert _backward({0: calls()}, TRUTH, 1e-8) == []


def test_a_gradient_of_another_direction_is_found_after_the_last_right_one() -> None:
    bent = np.array([1.0, 3.0])
    [cause] = _backward({0: calls(a=(1.0, bent), b=(1.0, bent))}, TRUTH, 1e-8)
    assert cause.text.startswith("backward: after c, where it is right, the gradient at the output of b is the first")


def test_the_first_output_that_differs_is_found_though_layers_were_called_from_the_end() -> None:
    wrong = calls(b=(2.0, 1.0), c=(3.0, 1.0))
    traces = {0: Observation(wrong[::-1])}  # as a backward pass computes them again
    [cause] = _forward(in_order(traces, TRUTH), TRUTH, 1e-8)
    assert "forward: the output of b is the first that differs, on rank 0; what it is given is that of" in cause.text


def test_the_microbatch_is_said_where_a_module_is_called_for_each() -> None:
    def half(call: Call, part: int) -> Call:
        wrong = 2 if (part, call.module) == (1, "b") else 1
        return Call(call.module, NOTHING, call.outputs[part::2] * wrong, NOTHING, 4, part)

    halves = [[half(call, part) for call in calls()] for part in (0, 1)]
    traces = {0: Observation([*halves[0], *halves[1]])}
    [cause] = _forward(in_order(traces, TRUTH), TRUTH, 1e-8)
    assert "the output of b is the first that differs, on rank 0 in its call 2 of 2" in cause.text


def without_backward_sum(rest: float) -> dict[int, list[Call]]:
    """c, cut over two ranks, whose input's gradient is each rank's summand; `rest` of c's own passes by it."""
    first, middle, last = calls()
    passed, summand = rest * last.gradients, DRAW.standard_normal((8, 2))
    summands = (summand, middle.gradients - passed - summand)
    return {rank: [first, replace(middle, gradients=own + passed), last] for rank, own in enumerate(summands)}


@pytest.mark.parametrize("rest", [0.0, 1.0])  # of a residual block the block's own gradient passes by
def test_summands_of_a_gradient_are_named_at_the_input_of_what_is_cut(rest: float) -> None:
    [cause] = _backward(without_backward_sum(rest), TRUTH, 1e-8)
    assert cause.text == (
        "backward: at the input of c the gradients of ranks [0, 1] add up to that of one process: a missing SUM"
    )
    assert "column-parallel" in cause.likely
    alone = {0: without_backward_sum(rest)[0]}
    assert _backward(alone, TRUTH, 1e-8)[0].text.startswith("backward: after c, where it is right")


def test_a_buffer_with_other_values_is_named_and_a_part_or_a_state_is_not() -> None:
    def seen_buffers(**digests: str) -> Observation:
        return Observation(buffers={name: Buffer((4,), digest) for name, digest in digests.items()})

    truth = seen_buffers(scale="x", angles="y", state="z")
    cut = Observation(buffers={"scale": Buffer((2,), "v"), "angles": Buffer((4,), "y")})
    assert _other_buffers({0: truth, 1: cut}, truth) == []
    [cause] = _other_buffers({0: truth, 1: seen_buffers(scale="w", angles="y")}, truth)
    assert cause.text == "buffers with other values than in one process, on rank 1: scale"


def test_only_buffers_that_a_step_leaves_are_kept() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].register_buffer("scale", torch.ones(3))
    trace = Observation()
    with watching(cast(Adapter, SimpleNamespace(named=lambda model: dict(model.named_parameters()))), model, trace):
        model(torch.randn(4, 3))
    assert {name: buffer.shape for name, buffer in trace.buffers.items()} == {"0.scale": (3,)}


# ---- masks ----------------------------------------------------------------------------------------------------------


def drop(entered: str, kept: str, again: bool = False, dropped: int = 100) -> Drop:
    return Drop("net.py:3", entered, kept, dropped, again)


def seen(*by_rank: list[Drop]) -> dict[int, Observation]:
    return {rank: Observation(drops=drops) for rank, drops in enumerate(by_rank)}


def test_masks_of_one_activation_must_be_one() -> None:
    [cause] = unlike_masks(seen([drop("x", "m")], [drop("x", "n")]))
    assert "ranks [0, 1] hold the same activation and draw different masks" in cause.text
    assert unlike_masks(seen([drop("x", "m")], [drop("x", "m")])) == []


def test_what_is_computed_again_must_have_its_mask() -> None:
    [cause] = unlike_masks(seen([drop("x", "m"), drop("x", "n", again=True)]))
    assert "computed again in the backward pass has another mask, on ranks 0" in cause.text
    assert unlike_masks(seen([drop("x", "m"), drop("x", "m", again=True)])) == []


def test_microbatches_must_have_masks_of_their_own_and_ranks_should() -> None:
    [cause] = unlike_masks(seen([drop("x", "m"), drop("y", "m")]))
    assert "unlike activations have the same mask on rank 0" in cause.text
    assert unlike_masks(seen([drop("x", "m", dropped=2), drop("y", "m", dropped=2)])) == []  # by chance
    across = seen([drop("x", "m")], [drop("y", "m")])
    assert unlike_masks(across) == []
    assert same_masks(across) == [
        "Ranks 0 to 1 have unlike data and draw the same masks of dropout; all ranks have one seed here."
    ]
    assert same_masks(seen([drop("x", "m")], [drop("y", "n")])) == []


# ---- names and places -----------------------------------------------------------------------------------------------


def test_a_factor_has_all_names_that_it_may_have() -> None:
    layout, known = {"dp": 2, "tp": 2, "mbs": 3}, {"microbatches": 4}
    assert factor_name(2.0, layout, known, 4) == "dp or tp"
    assert factor_name(0.5, layout, known, 4) == "1/dp or 1/tp"
    assert factor_name(4.0, layout, known, 4) == "dp x tp or microbatches"
    assert factor_name(0.25, layout, known, 4) == "1/(dp x tp) or 1/microbatches"
    assert factor_name(3.0, layout, known, 4) == ""  # mbs is no axis, and the adapter does not know it
    assert factor_name(3.0, layout, {"mbs": 8}, 4) == "mbs"  # it does, and the layout's own number comes first
    assert factor_name(3.0, {"replicas": 3}, {}, 3) == "ranks"


def test_a_part_without_a_target_is_a_part_of_the_mean_of_means() -> None:
    counts = [4, 6, 0, 0, 2, 8]  # of three parts the second has none
    ratios = {0: 20 / 30, 1: 20 / 30, 4: 20 / 30, 5: 20 / 30}
    assert _mean_of_means(ratios, counts) == (3, 1)
    assert _mean_of_means({0: 1.0, 1: 2.0, 4: 1.0, 5: 1.0}, counts) == (0, 0)


def test_a_deviation_says_which_elements_and_by_which_ratio() -> None:
    tensors = Tensors({"a": (4,), "b": (6,)})
    truth = np.arange(1.0, 11.0)
    own = {"b": truth[6:10] * np.array([1.0, 3.0, 1.0, 3.0])}
    held = [Held(1, {"b": np.arange(6, 10)}, own)]
    [found] = _tensors(tensors, "gradient", 0, held, Truth(truth, np.full(2, 10.0), np.zeros(2)), 1e-10)
    assert (found.name, found.elements, found.ratio) == ("b", "3 to 5", None)
    held = [Held(1, {"b": np.arange(6, 10)}, {"b": 2 * truth[6:10]})]
    [found] = _tensors(tensors, "gradient", 0, held, Truth(truth, np.full(2, 10.0), np.zeros(2)), 1e-10)
    assert (found.elements, found.ratio) == ("2 to 5", 2.0)
    assert str(found).endswith(", x 2 (step 1, rank 1, elements 2 to 5)")
