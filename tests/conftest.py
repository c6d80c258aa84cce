"""Settings for every test."""

import pytest
from hypothesis import settings

# Machines that run tests are busy: a slow example is not a failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


# Modules that take longest come first: with two workers, the last one to start decides when all is done.
_FIRST = ("test_readme.py", "test_checkpoint.py", "test_resume.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FIRST.index(item.path.name) if item.path.name in _FIRST else len(_FIRST))
