"""The examples of functions of `import fivefold as ff` that start ranks, or run on fake ones."""

from pathlib import Path

import pytest

from tests.test_api import STARTING, run_examples

# Others run the same: examples/verify.py, tests/foreign.
LONG = {"check_certificate", "curve", "doctor", "verify", "verify_adapter"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in sorted(STARTING)]
)
def test_examples_print_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(name)
