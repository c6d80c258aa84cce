"""What docs/others.md lists is what the code and the tests have."""

import re
from pathlib import Path

from fivefold.foreign.adapter import shipped_names
from tests.foreign.planted import BUGS

PAGE = (Path(__file__).parents[2] / "docs/others.md").read_text()


def test_every_planted_bug_has_its_row() -> None:
    for bug in BUGS:
        assert bug.row in PAGE
    assert len({bug.kind for bug in BUGS}) >= 8
    assert {bug.framework for bug in BUGS} == set(shipped_names())


def test_every_signature_says_what_to_read() -> None:
    table = PAGE.partition("| what the report says |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 15
    for row in table:
        [name] = re.findall(r"\| \[(\w+)\] \|$", row)
        assert f"\n[{name}]: https://" in PAGE


def test_every_adapter_has_its_row() -> None:
    for name in shipped_names():
        assert f"| `{name}`" in PAGE
