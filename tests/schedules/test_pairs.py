"""Pairs worked out by hand, and what holds of any pair."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.schedules.costs import Segment, play_pair, seconds_alone

LAYER = (Segment(2.0, 1.0), Segment(1.0, 1.0), Segment(0.5))  # alone 5.5
BACK = (Segment(1.0, 1.0), Segment(2.0, 1.0), Segment(3.0))  # alone 8

# Forward, backward, and how long the pair takes, played on paper.
BY_HAND = [
    # F to 2, B to 3 (F's message is there), F to 4 (B's is there), B to 6 (F's is there), F ends at 6.5, B waits to 7.
    (LAYER, BACK, 10.0),
    # Nothing to hide behind: F's message takes 3, and B has ended after 1.
    ((Segment(1.0, 3.0),), (Segment(1.0),), 4.0),
    # Both at once on one link: when B's 2 begin, 1 of F's is left; both at half the pace, so F's is there
    # at 4, and B's last second takes one: 5.
    ((Segment(1.0, 2.0),), (Segment(1.0, 2.0),), 5.0),
    # The shared expert beside the dispatch hides it all; B comes after.
    ((Segment(1.0, 2.0, 2.0), Segment(1.0)), (Segment(3.0),), 7.0),
    # Without messages there is nothing to wait for, and no turn is yielded.
    ((Segment(1.0), Segment(2.0)), (Segment(4.0),), 7.0),
    ((), (Segment(1.0, 1.0),), 2.0),
    ((Segment(1.0, 1.0),), (), 2.0),
    # F waits and it is its turn, though B's message (2 to 3, at half the pace) is there first: F's is at 6.5.
    ((Segment(1.0, 5.0), Segment(1.0)), (Segment(1.0, 0.5), Segment(1.0)), 8.5),
]


@pytest.mark.parametrize(("forward", "backward", "together"), BY_HAND)
def test_pairs_by_hand(forward, backward, together) -> None:
    assert play_pair(forward, backward).pair == pytest.approx(together)


def test_a_pass_alone() -> None:
    assert seconds_alone(LAYER) == 5.5
    assert seconds_alone((Segment(1.0, 2.0, 0.5), Segment(1.0, 2.0, 3.0))) == 1 + 2 + 1 + 3
    assert play_pair(LAYER, BACK)[:2] == (5.5, 8.0)
    assert play_pair(LAYER, BACK).hidden == 3.5


PASSES = st.lists(st.builds(Segment, *[st.sampled_from([0.0, 0.25, 1.0, 1.7, 3.3, 10.0])] * 3), max_size=6)


@given(PASSES, PASSES)
def test_bounds_of_any_pair(forward: list[Segment], backward: list[Segment]) -> None:
    """No longer than one after the other; no shorter than all compute, all messages, or the longer half."""
    pair, both = play_pair(forward, backward), forward + backward
    compute, link = sum(one.compute + one.beside for one in both), sum(one.message for one in both)
    least = max(compute, link, pair.forward, pair.backward)
    assert least <= pair.pair * (1 + 1e-9) + 1e-9
    assert pair.pair <= pair.forward + pair.backward
    quiet = [Segment(*one[:1], 0.0, one.beside) for one in both]
    assert play_pair(quiet[: len(forward)], quiet[len(forward) :]).pair == pytest.approx(compute)
