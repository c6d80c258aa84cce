"""The IR: actions, channels, placements, and their text."""

import pytest

from fivefold.schedules.actions import ALL_MICROBATCHES, Action, Channel, Kind, parse_token, tokens
from fivefold.schedules.schedule import Placement, live_counts, peak_live

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRAD


@pytest.mark.parametrize("token", ["F0.0", "B3.12", "I2.1", "SEND_A0.3", "RECV_G10.7", "STEP4", "REDUCE1.2"])
def test_every_action_reads_back_from_its_token(token: str) -> None:
    (action,) = parse_token(token)
    assert str(action) == token


def test_an_action_without_a_microbatch_is_for_all_of_them() -> None:
    assert parse_token("STEP4") == [Action(Kind.STEP, 4, ALL_MICROBATCHES)]


@pytest.mark.parametrize("token", ["B5.3&F0.7", "F0.7&B5.3"])
def test_a_joined_pair_is_one_token_and_its_forward_comes_first_however_it_is_written(token: str) -> None:
    pair = parse_token(token)
    assert pair == [Action(F, 0, 7, joined=True), Action(B, 5, 3)]
    assert tokens(tuple(pair)) == ["F0.7&B5.3"]
    assert peak_live([Action(F, 5, 3), *pair]) == 2  # both activations are there while the pair runs


NONE = dict.fromkeys(["F", "F\u0661.0", "F1.\u00b2", "F1.1" + "0" * 5000], "is not an action") | {
    "Q1.2": "unknown kind 'Q'",
    "F1.2&I3.4": "only an F and a B can be joined",
    "F1.2&B3.4&F1.3": "joins 3 actions",
}


@pytest.mark.parametrize("token", NONE, ids=lambda token: token[:20])
def test_a_token_that_is_no_action_is_refused_with_the_reason(token: str) -> None:
    """Numbers are ASCII, and of a sane length."""
    with pytest.raises(ValueError, match=NONE[token]):
        parse_token(token)


def test_a_channel_names_both_its_ends() -> None:
    down, up = Placement.single(2).channels
    assert (down, up) == (Channel(0, gradients=False), Channel(0, gradients=True))
    assert (down.source, down.target) == (0, 1)
    assert (up.source, up.target) == (1, 0)


def test_placements() -> None:
    assert Placement.single(3).owner == (0, 1, 2)
    assert Placement.looped(3, 2).owner == (0, 1, 2, 0, 1, 2)
    vee = Placement.vee(3)
    assert vee.owner == (0, 1, 2, 2, 1, 0)
    assert vee.of_rank == ((0, 5), (1, 4), (2, 3))
    assert vee.chunk == (0, 0, 0, 1, 1, 1)
    assert not vee.crosses(2)
    assert vee.crosses(0)


def test_an_activation_lives_from_its_forward_to_its_backward_or_weight_gradient() -> None:
    order = [Action(F, 0, 0), Action(F, 0, 1), Action(Kind.INPUT_GRAD, 0, 0), Action(W, 0, 0), Action(B, 0, 1)]
    assert live_counts(order) == [1, 2, 2, 1, 0]
    assert peak_live(order) == 2
