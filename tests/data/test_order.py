"""The order is a permutation per epoch, a pure function, and as random as a shuffle."""

from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.order import samples_of, window_of, windows
from tests.refusals import refusal


def epochs(n: int, count: int, seed: int = 1) -> np.ndarray:
    """The first `count` epochs of n windows, one a row."""
    return window_of(np.arange(n * count), n, seed).reshape(count, n)


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**20))
def test_every_epoch_visits_every_window_once(n: int, seed: int, epoch: int) -> None:
    seen = window_of(epoch * n + np.arange(n), n, seed)
    assert np.array_equal(np.sort(seen), np.arange(n))


@pytest.mark.parametrize("n", [2**31 + 11, 10**12 + 39, 2**62 - 57])
def test_huge_splits_stay_in_range_and_do_not_collide(n: int) -> None:
    samples = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    seen = window_of(samples, n, 7)
    assert seen.min() >= 0
    assert seen.max() < n
    assert len(np.unique(seen)) == len(samples)
    # Neighbouring samples land everywhere, not only in a corner of the range.
    assert np.all(np.histogram(seen / n, 10, (0, 1))[0] > 9_000)


def test_a_sample_does_not_depend_on_what_it_is_asked_together_with() -> None:
    samples = np.arange(500) * 13 % 1_700
    together = window_of(samples, 333, 5)
    assert [int(window_of(np.array([s]), 333, 5)[0]) for s in samples] == together.tolist()
    # Two ranks that read every other sample read what one rank reads.
    assert np.array_equal(window_of(samples[1::2], 333, 5), together[1::2])


def test_the_order_is_frozen() -> None:
    # Changing the order breaks the resumption of every run under way: a change here must be meant.
    assert window_of(np.arange(8), 100, 0).tolist() == [59, 31, 2, 94, 3, 6, 37, 77]
    late = window_of(10**6 + np.arange(4), 10**9, -3)
    assert late.tolist() == [865983338, 164628298, 925265434, 151196895]


def test_epochs_and_seeds_are_different_orders() -> None:
    first, second = epochs(1000, 2)
    other = epochs(1000, 1, seed=2)[0]
    # Two independent shuffles agree in about one place.
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10


def unlike_a_shuffle(rows: np.ndarray) -> float:
    """How many standard deviations the worst statistic of these permutations is away from a true shuffle's."""
    count, n = rows.shape
    fixed = (rows == np.arange(n)).sum(1)  # Poisson(1): mean 1, variance 1
    centred = rows - (n - 1) / 2
    serial = (centred[:, 1:] * centred[:, :-1]).mean(1) / ((n * n - 1) / 12)  # mean -1/(n - 1), variance 1/n
    ups = (np.diff(rows, axis=1) > 0).sum(1)  # mean (n - 1)/2, variance (n + 1)/12
    # (first, last) differ by any amount alike: affine maps and weak rounds give them away.
    pairs = np.bincount((rows[:, -1] - rows[:, 0]) % n, minlength=n)[1:]
    expected = count / (n - 1)
    chi = (((pairs - expected) ** 2 / expected).sum() - (n - 2)) / np.sqrt(2 * (n - 2))
    return max(
        abs(fixed.mean() - 1) * np.sqrt(count),
        abs(fixed.var() - 1) * np.sqrt(count / 3),
        abs(serial.mean() + 1 / (n - 1)) * np.sqrt(count * n),
        abs(ups.mean() - (n - 1) / 2) / np.sqrt((n + 1) / 12 / count),
        abs(chi),
    )


@pytest.mark.parametrize("n", [31, 64, 100, 257])
def test_orders_look_like_shuffles(n: int) -> None:
    assert unlike_a_shuffle(epochs(n, 3000)) < 4.5


def test_the_check_would_catch_weak_permutations() -> None:
    rng = np.random.default_rng(0)
    n, count = 101, 3000
    real = np.array([rng.permutation(n) for _ in range(count)])
    assert unlike_a_shuffle(real) < 4.5
    affine = np.array([(rng.integers(1, n) * np.arange(n) + rng.integers(n)) % n for _ in range(count)])
    assert unlike_a_shuffle(affine) > 10
    rotated = np.array([np.roll(real[0], rng.integers(n)) for _ in range(count)])
    assert unlike_a_shuffle(rotated) > 10


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_all_orders_of_a_few_windows_are_equally_likely(n: int) -> None:
    orders = factorial(n)
    rows = epochs(n, 50 * orders)
    counts = np.unique(rows @ n ** np.arange(n), return_counts=True)[1]
    assert len(counts) == orders
    chi = ((counts - 50) ** 2 / 50).sum()
    assert abs(chi - (orders - 1)) < 4.5 * np.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("n", [9, 25, 49])
def test_odd_permutations_occur_as_often_as_even_ones(n: int) -> None:
    # With an odd number of rows and of columns, every round would be even.
    rows = epochs(n, 400)
    inversions = np.triu(rows[:, :, None] > rows[:, None, :], 1).sum((1, 2))
    assert 150 < (inversions % 2).sum() < 250


def test_windows_leave_room_for_the_last_target() -> None:
    assert windows(tokens=129, seq=64) == 2
    assert windows(tokens=128, seq=64) == 1


def test_a_split_too_short_says_what_would_fit() -> None:
    error = refusal(lambda: windows(tokens=100, seq=128))
    assert error.codes == ["data.seq.tokens"]
    assert str(error).endswith("the longest sequence that fits is 99")
    assert refusal(lambda: windows(tokens=100, seq=0)).codes == ["data.seq.range"]
    assert refusal(lambda: window_of(np.array([-1]), 10, 0)).codes == ["data.sample.range"]


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 10**12 + 39])
def test_samples_are_found_by_their_windows(n: int) -> None:
    samples = np.unique(np.arange(5 * 200) * 7919 % (5 * n))
    for epoch in range(5):
        mine = samples[samples // n == epoch]
        assert np.array_equal(samples_of(window_of(mine, n, seed=3), n, 3, epoch), mine)
