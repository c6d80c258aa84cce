from pathlib import Path

import pytest

from fivefold.data.prepare import prepare


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A few thousand bytes of text."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"Line {number} of a text that is {number * number} long. " * 40)
    prepare([folder], folder / "tokens")
    return folder / "tokens"
