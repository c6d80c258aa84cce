"""The router's choice, by hand; what it counts; and the losses that keep the load even."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.load_balancing import AddLoss, Balance, balance_loss, row_counts, update_expert_bias, z_loss
from fivefold.model.router import Routing, sort_by_expert, top_k_experts
from fivefold.spec.blocks import Experts
from fivefold.spec.presets import preset

PLAIN = Experts(count=6, top_k=2, ffn=8)


def test_equal_scores_go_to_the_lowest_numbers() -> None:
    assert top_k_experts(PLAIN, torch.zeros(3, 6)).tolist() == [[0, 1]] * 3
    assert top_k_experts(PLAIN, torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.5, 0.0]])).tolist() == [[1, 3]]


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    wish = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]])
    largest = msgspec.structs.replace(PLAIN, groups=3, top_groups=1)
    assert top_k_experts(largest, wish).tolist() == [[0, 1]]  # softmax scores: the group with the largest one
    two = msgspec.structs.replace(largest, scores="sigmoid")
    assert top_k_experts(two, wish).tolist() == [[2, 3]]  # sigmoid scores: the two largest are added up


def test_load_is_counted_once_and_only_in_training() -> None:
    spec = preset("tiny-moe", layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, vocab=11)
    for recompute in ("none", "selective", "full"):
        model = Decoder(spec, recompute).double()
        initialise(model, spec, 0)
        router = model.layers["0"].mlp.router
        tokens = torch.arange(10).view(2, 5)
        model(tokens).sum().backward()
        assert int(router.tokens_per_expert.sum()) == 10 * 2, recompute
        model.eval()
        model(tokens)
        assert int(router.tokens_per_expert.sum()) == 10 * 2, recompute


def test_a_bias_chooses_and_does_not_weigh() -> None:
    spec = preset("tiny-deepseek", layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, vocab=11)
    model = Decoder(spec).double()
    initialise(model, spec, 0)
    router = model.layers["1"].mlp.router
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    router.balance[6:] = 100.0
    routed = router(x, router.weight, None)
    assert sorted(routed.chosen[0].tolist()) == [6, 7]
    picked = routed.scores.gather(1, routed.chosen)
    torch.testing.assert_close(routed.weights, 2.5 * picked / picked.sum(-1, keepdim=True))


def routed(chosen: list[list[int]], scores: Tensor) -> Routing:
    slots = sort_by_expert(torch.tensor(chosen), scores.shape[1])
    return Routing(torch.tensor(chosen), torch.ones(len(chosen), len(chosen[0])), scores, scores.log(), *slots)


def test_the_balance_loss_is_one_where_all_is_even_and_more_where_it_is_not() -> None:
    experts = Experts(count=4, top_k=1, ffn=8)
    rows = torch.zeros(4, dtype=torch.int64)
    even = routed([[0], [1], [2], [3]], torch.full((4, 4), 0.25))
    counts = row_counts(even, rows, 1)
    assert counts.tolist() == [[1, 1, 1, 1]]
    assert balance_loss(experts, even, rows, counts, 4).item() == pytest.approx(1.0)
    full = routed([[0]] * 4, torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 4))
    assert balance_loss(experts, full, rows, row_counts(full, rows, 1), 4).item() == pytest.approx(4.0)


def test_rows_have_a_loss_each() -> None:
    experts = Experts(count=2, top_k=1, ffn=8)
    rows = torch.tensor([0, 0, 1, 1])
    one = routed([[0], [0], [1], [1]], torch.tensor([[0.75, 0.25]] * 4))
    counts = row_counts(one, rows, 2)
    assert counts.tolist() == [[2, 0], [0, 2]]
    assert balance_loss(experts, one, rows, counts, 2).item() == pytest.approx(2 * 0.75 + 2 * 0.25)


def test_losses_reach_the_gradient_and_not_the_value() -> None:
    x, aux = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    y = AddLoss.apply(x, 5 * aux)
    assert y.tolist() == [1.0] * 3
    (2 * y).sum().backward()
    assert x.grad is not None
    assert aux.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    assert aux.grad.item() == 5.0


def test_the_z_loss_is_of_logits() -> None:
    one = replace(routed([[0], [0]], torch.ones(2, 2)), logits=torch.zeros(2, 2))
    assert z_loss(one).item() == pytest.approx(2 * torch.tensor(2.0).log().item() ** 2)


def test_the_bias_follows_the_load_by_whole_steps() -> None:
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([4, 2, 2, 0]), 0.5)
    assert bias.tolist() == [-0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_losses_have_the_same_gradient_under_recompute(recompute: str) -> None:
    spec = preset("tiny-moe", layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, vocab=11)
    found = []
    for how, balance in (
        ("none", Balance(0.3, 0.2, 2, 10)),
        (recompute, Balance(0.3, 0.2, 2, 10)),
        ("none", Balance()),
    ):
        model = Decoder(spec, how, balance=balance).double()
        initialise(model, spec, 0)
        model(torch.arange(10).view(2, 5)).square().sum().backward()
        mixture = model.layers["1"].mlp
        found.append((mixture.router.weight.grad, mixture.losses))
    (plain, values), (again, same), (without, no) = found
    torch.testing.assert_close(plain, again, rtol=0, atol=0)
    torch.testing.assert_close(values, same, rtol=0, atol=0)
    assert no is None
    assert (plain - without).abs().max() > 1e-3 * without.abs().max()
