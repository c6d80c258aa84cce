"""What a user can get wrong, said in whole sentences.

A `UserError` is raised for bad input and ends the command with exit code 2 and no traceback. It carries *all* the
problems that were found, because fixing one at a time is how an afternoon goes by.
"""

import importlib.util
from collections.abc import Iterable

MOST = 20  # sentences; one mistake can break thousands of messages
LONGEST = 2000  # characters of one; a value can be as long as its file
TRAINING = {"torch": "PyTorch", "safetensors": "safetensors", "tokenizers": "tokenizers"}  # the extra `train`


def needs(package: str) -> str:
    """What is said where a package of the extra `train` is not installed."""
    return f'this needs {TRAINING[package]}: pip install "fivefold[train]"'


def absent(package: str) -> bool:
    """Whether a package is not installed; nothing is imported."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


class Problem(str):
    """A sentence with a code, "layout.tp.heads", by which scripts and tests know it while its words may change."""

    code: str

    def __new__(cls, code: str, sentence: str) -> "Problem":
        made = super().__new__(cls, sentence)
        made.code = code
        return made


class UserError(Exception):
    """One or more problems with what the user gave us; each a sentence with the values and what to write instead.

    `codes` are those of the problems that have one."""

    def __init__(self, problems: str | Iterable[str]):
        found = [problems] if isinstance(problems, str) else list(problems)
        if len(found) > MOST + 1:  # and not one: the sentence below, when it is raised again
            found = [*found[:MOST], f"and {len(found) - MOST} more problems"]
        self.problems = [_clipped(str(sentence)) for sentence in found]
        self.codes = [sentence.code for sentence in found if isinstance(sentence, Problem)]
        super().__init__("\n".join(self.problems))


def _clipped(sentence: str) -> str:
    """On one line, with nothing that a terminal would obey; a long one without its middle: the reason comes last."""
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 2 :]}"
    if sentence.isprintable():
        return sentence
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in sentence)


class TrainingError(Exception):
    """A run that cannot go on: a sentence with the step and the values. Ends the command with its exit code."""

    code = 1


class PeerLost(TrainingError):
    """This rank cannot go on because of another one. Every rank says its own, so that one sees who waited for whom."""

    code = 3  # by which a launcher tells a victim from the cause


class Note(UserWarning):
    """Something that is done otherwise than asked; the command says so in one line and goes on."""
