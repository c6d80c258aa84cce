"""Random numbers by place: known answers, any block the same numbers, and normals that are normal."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.model import philox

ALL_ONES = 0xFFFFFFFF
# Known answers of Philox-4x32-10 that ship with the authors' Random123 library: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420,
     0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected, compiling, monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    counters = [torch.tensor([word]) for word in counter]
    assert tuple(philox.random_words(key, *counters)[0].tolist()) == expected


@pytest.mark.slow  # Inductor's import, and a C++ compiler
def test_inductor_draws_the_same_words() -> None:
    counters = torch.arange(128), torch.arange(64)[:, None], torch.tensor([3])
    key = philox.random_key(3, "dropout", "layers.0.attention")
    assert key[0] >= 2**31
    compiled = torch.compile(partial(philox.random_words, key))
    assert torch.equal(compiled(*counters), philox.random_words(key, *counters))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 40), st.integers(1, 20))
def test_any_block_of_the_matrix_is_the_same_numbers(row: int, rows: int, column: int, columns: int) -> None:
    key = philox.random_key(7, "w")
    whole = philox.random_normal(key, range(60), range(60))
    block = philox.random_normal(key, range(row, row + rows), range(column, column + columns))
    assert torch.equal(block, whole[row : row + rows, column : column + columns])


def test_rows_beyond_32_bits_do_not_repeat() -> None:
    key = philox.random_key(0, "w")
    assert not torch.equal(
        philox.random_normal(key, range(4), range(8)), philox.random_normal(key, range(2**32, 2**32 + 4), range(8))
    )


def test_names_and_seeds_give_unlike_numbers() -> None:
    draws = [philox.random_normal(philox.random_key(*k), range(8), range(8)) for k in ((0, "a"), (0, "b"), (1, "a"))]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_normals_are_normal() -> None:
    """Moments within 5 standard errors, the distribution within the Kolmogorov bound at 1 in 10,000."""
    z = philox.random_normal(philox.random_key(0, "w"), range(500), range(400)).flatten()
    n = z.numel()
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean().item() - moment) < 5 * math.sqrt(variance / n), power
    expected = torch.special.ndtr(z.sort().values)
    gap = (expected - (torch.arange(n, dtype=torch.float64) + 0.5) / n).abs().max().item()
    assert gap < 2.23 / math.sqrt(n)
    neighbours = (z[:-1] * z[1:]).mean().item()
    assert abs(neighbours) < 5 / math.sqrt(n)


def test_the_log_is_a_log() -> None:
    x = torch.logspace(-9.6, 0, 10_001, dtype=torch.float64)
    assert torch.allclose(philox.log(x), x.log(), rtol=1e-14, atol=1e-15)


def test_the_square_root_is_a_square_root() -> None:
    x = torch.logspace(-10, 2, 10_001, dtype=torch.float64)
    assert torch.allclose(philox._sqrt(x), x.sqrt(), rtol=5e-16, atol=0)
