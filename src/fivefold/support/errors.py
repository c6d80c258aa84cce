"""Errors, in whole sentences.

A `UserError` is raised for bad input and ends the command with exit code 2 and no traceback. It carries *all* the
problems that were found, so that the user can fix them at once.
"""

import importlib.util
from collections.abc import Iterable

MAX_PROBLEMS = 20  # sentences of an error; one mistake can cause thousands
MAX_SENTENCE = 2000  # characters of a sentence; a value in it can be as long as its file
TRAIN_PACKAGES = {"torch": "PyTorch", "safetensors": "safetensors", "tokenizers": "tokenizers"}  # the extra `train`


def missing_package_sentence(package: str) -> str:
    """The sentence where a package of the extra `train` is not installed."""
    return f'this needs {TRAIN_PACKAGES[package]}: pip install "fivefold[train]"'


def not_installed(package: str) -> bool:
    """Whether a package is not installed; nothing is imported. A folder of its name is no package: W&B makes some."""
    try:
        spec = importlib.util.find_spec(package)
        return spec is None or spec.origin is None
    except ModuleNotFoundError:
        return True


class Problem(str):
    """A sentence with a code, "layout.tp.heads", by which scripts and tests know it while its words may change.

    docs/problems.md has all codes."""

    code: str

    def __new__(cls, code: str, sentence: str) -> "Problem":
        problem = super().__new__(cls, sentence)
        problem.code = code
        return problem

    def __reduce__(self) -> tuple[type["Problem"], tuple[str, str]]:  # ranks pickle their errors for the launcher
        return Problem, (self.code, str(self))


class UserError(Exception):
    """One or more problems with what the user gave us; each a sentence with the values and what to write instead.

    `code` is for sentences that have no code of their own. `problems` are the plain texts, to be shown and sent;
    `coded` are the same with their codes, to be raised again; `codes` are the codes alone, without empty ones."""

    def __init__(self, problems: str | Iterable[str], code: str = ""):
        sentences = [problems] if isinstance(problems, str) else list(problems)
        if len(sentences) > MAX_PROBLEMS + 1:  # one more is allowed: the sentence below, when the error is raised again
            sentences = [
                *sentences[:MAX_PROBLEMS],
                Problem("problems.more", f"and {len(sentences) - MAX_PROBLEMS} more problems"),
            ]
        self.problems = [_clip(str(sentence)) for sentence in sentences]
        codes = [sentence.code if isinstance(sentence, Problem) else code for sentence in sentences]
        self.coded = list(map(_with_code, codes, self.problems))
        self.codes = [code for code in codes if code]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["UserError"], tuple[list[str]]]:  # of its text alone the codes would be lost
        return type(self), (self.coded,)

    def framed(self, before: str = "", after: str = "") -> list[str]:
        """The problems with words around them, under the codes that they have."""
        return [_with_code(getattr(problem, "code", ""), f"{before}{problem}{after}") for problem in self.coded]


def _with_code(code: str, sentence: str) -> str:
    return Problem(code, sentence) if code else sentence


def _clip(sentence: str) -> str:
    """On one line, with nothing that a terminal would obey; a long one without its middle: the reason comes last."""
    if len(sentence) > MAX_SENTENCE:
        sentence = f"{sentence[: MAX_SENTENCE // 2]} ... {sentence[-MAX_SENTENCE // 2 :]}"
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
