"""All tests, imported once in the server that forks the workers of pytest-xdist: to rewrite the assertions of some
hundred files and to import them takes longer than what a worker then does to collect them. Ranks have them, too.

tests/conftest.py has the server import this last. What cannot be imported is said by the workers.
"""

import gc
import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

_ELSEWHERE = "not cluster and not extras and not browser and not gpu"
with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
    pytest.main(["--collect-only", "-p", "no:cacheprovider", "-m", _ELSEWHERE])
gc.unfreeze()  # tests/conftest.py has frozen the tests that were collected, and only their modules are to stay
gc.collect()
