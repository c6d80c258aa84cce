"""Refusals: tests know them by their codes, and the words of each stand once, in a file beside the test.

    CASES = {"train.steps=ten": "train.steps.type", "train.steps=0": "train.steps.range"}

    @pytest.mark.parametrize("words", CASES)
    def test_refused(words: str) -> None:
        assert refusal(lambda: read_job(None, words.split())).codes == CASES[words].split()

    def test_the_words_of_refusals() -> None:
        same_words(__file__, {words: refusal(lambda: read_job(None, words.split())).problems for words in CASES})

Where words have changed and are meant, `WORDS=new python -m pytest FILE` writes the file anew; read the difference.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from fivefold.support.errors import UserError


def refusal(call: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    return caught.value


def same_words(test: str, said: Mapping[str, Sequence[str]]) -> None:
    """Compare with what stands beside the file of the test: each input, and below it the sentences."""
    file = Path(test).with_suffix(".txt")
    shown = {words if words.isprintable() else repr(words): sentences for words, sentences in said.items()}
    lines = [line for words, sentences in shown.items() for line in (words, *(f"    {text}" for text in sentences))]
    text = re.sub(r"(.)\1{50,}", r"\1...\1", "\n".join([*lines, ""]))
    if os.environ.get("WORDS") == "new":
        file.write_text(text)
    assert text == file.read_text()
