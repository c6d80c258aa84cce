"""A layout that was written with spaces for commas, and how it is written: dp=8 zero=3 is dp=8,zero=3."""

import re

SPACED = "a layout has commas and no spaces"
# Not every space: a schedule's file may have one, and one may stand beside a comma or an equals sign.
_FOR_COMMA = re.compile(r"(?<=[^\s,=])\s+(?=[a-z_]+\s*=|(?:sp|\d+)(?:[\s,]|$))")


def with_commas(text: str) -> str:
    """The same text where nothing was wrong with it."""
    whole, wrong = _FOR_COMMA.subn(",", text.strip())
    return re.sub(r"\s*([,=])\s*", r"\1", whole) if wrong else whole
