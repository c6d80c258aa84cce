"""The twelve bubble rates of the zero-bubble paper, to the four decimals it prints."""

import pytest

from fivefold.schedules.result import PUBLISHED, PublishedPipeline, reproduce


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.model)
def test_published_zero_bubble_rates(row: PublishedPipeline) -> None:
    assert len(row.rates) == 12 / len(PUBLISHED)
    assert {name: round(rate, 4) for name, rate in reproduce(row).items()} == row.rates
