"""What all fuzzers share: how many cases, what is odd, how a document is damaged, and what every case must show.

`FIVEFOLD_FUZZ=10000 python -m pytest tests/fuzz` tries so many of each kind, at random; without it, a few that are
always the same.
"""

import copy
import json
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fivefold.support.errors import MAX_PROBLEMS, MAX_SENTENCE, Note, UserError

CASES = int(os.environ.get("FIVEFOLD_FUZZ", settings.default.max_examples))
SECONDS = 5.0  # of the processor: a busy machine does not decide

fuzz = settings(
    max_examples=CASES,
    derandomize="FIVEFOLD_FUZZ" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Values that a number, a name or a table should not be.
ODD: list[Any] = [
    None, True, 0, -1, 1, 7, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "1", "-1", "1e9", "nan", "\0", "\n" * 50, "../x", "~nouser/x", "a" * 5000, "9" * 5000, "\u202e",
    [], {}, [[]], [None], {"": 0}, [0] * 3000, json.loads("[" * 60 + "]" * 60),
]  # fmt: skip
PIECES = [b"[" * 3000, b"{" * 3000, b"9" * 5000, b"\xff", b"\0", b"1e999", b"-1", b'"', b"\n", b"\\ud800", b"=", b","]


def survives(question: Callable[[], object]) -> bool:
    """It is answered, or refused in sentences, and soon; whether it is answered."""
    start, refusal = time.process_time(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        try:
            question()
        except UserError as error:
            refusal = error
    assert time.process_time() - start < SECONDS
    if refusal is not None:
        assert 1 <= len(refusal.problems) <= MAX_PROBLEMS + 1
        assert all(sentence.strip() and "\n" not in sentence for sentence in refusal.problems)
        assert all(re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", code) for code in refusal.codes)  # nothing of the input
        assert max(map(len, refusal.problems)) <= 11 * MAX_SENTENCE  # an odd letter is written in up to ten others
    return refusal is None


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Flipped bits, lost and repeated parts, and pieces from elsewhere."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        end = at + draw(st.integers(1, 40))
        kind = draw(st.sampled_from(["flip", "flip", "cut", "repeat", "insert", "end"]))
        if kind == "flip" and content:
            content = content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at] + content[end:]
        elif kind == "repeat":
            content = content[:end] + content[at:]
        elif kind == "insert":
            content = content[:at] + draw(st.sampled_from(PIECES)) + content[at:]
        else:
            content = content[:at]
    return content


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A tree of tables and lists with values deleted, repeated, retyped, or given other names."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        here = document
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(here[key], dict | list) and here[key] and draw(st.integers(0, 3)):
                here = here[key]
                continue
            kind = draw(st.sampled_from(["odd", "odd", "odd", "delete", "repeat"]))
            if kind == "odd":
                here[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
            elif kind == "delete":
                del here[key]
            elif isinstance(here, list):
                here.append(copy.deepcopy(here[key]))
            else:
                here[draw(st.sampled_from([f"{key}2", "", "x\n", str(key).upper()]))] = copy.deepcopy(here[key])
            break
    return document


def documents(document: Any) -> st.SearchStrategy[bytes]:
    """JSON with other values, JSON with other bytes, and other bytes."""
    whole = json.dumps(document).encode()
    return st.one_of(changed(document).map(lambda it: json.dumps(it).encode()), damaged(whole), st.binary(max_size=200))
