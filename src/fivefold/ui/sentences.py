"""Sentences of other rooms on the page, which has fields where the command line has options.

for_page("nearest: --layout tp=8")     # nearest: layout tp=8
"""

import re

_OPTION = re.compile(r"(`[^`]*`|'fivefold [^']*')|(?<![\w-])--([a-z][a-z-]*)")


def for_page(sentence: str) -> str:
    """With the names of options for the options; commands to type, in quotes, stay what they are."""
    return _OPTION.sub(lambda found: found[1] or found[2].replace("-", " "), sentence)
