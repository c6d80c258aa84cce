"""Answers to further questions, which a page that stands for itself holds, so that it can be played without a server.

held(("schedule", "microbatches"), {"zb-v 8": {"payload": {...}, "parts": {...}}}, own="zb-v 4")

They are compressed, since most of them say the same of another layout.
"""

import base64
import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


def held(
    by: Sequence[str], answers: Mapping[str, Mapping[str, Any]], own: str, offers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `held` of a view. A key has the values of the words in `by`; `own` is that of the view's own payload, and
    `offers` changes every payload: choices of which the page has no answer are left out."""
    text = msgspec.json.encode(answers)
    return {
        "by": list(by),
        "keys": [own, *answers],
        "offers": dict(offers or {}),
        "gzip": base64.b64encode(gzip.compress(text, mtime=0)).decode(),
    }
