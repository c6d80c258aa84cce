"""Settings for every test."""

import pytest
from hypothesis import settings

# Machines that run tests are busy: a slow example is not a failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


# Modules that take longest come first: the last one to start decides when all is done.
_FIRST = (
    *("test_checkpoint.py", "test_readme.py", "test_cli.py", "test_verify.py", "test_pipeline.py", "test_resume.py"),
    *("test_dryrun.py", "test_layouts.py", "test_trace.py", "test_equal.py", "test_faults.py", "test_truth.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FIRST.index(item.path.name) if item.path.name in _FIRST else len(_FIRST))
