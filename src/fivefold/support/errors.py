"""What a user can get wrong, said in whole sentences.

A `UserError` is raised for bad input and ends the command with exit code 2 and no traceback. It carries *all* the
problems that were found, because fixing one at a time is how an afternoon goes by.
"""

from collections.abc import Iterable


class UserError(Exception):
    """One or more problems with what the user gave us; each a sentence with the values and what to write instead."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TrainingError(Exception):
    """A run that cannot go on: a sentence with the step and the values. Ends the command with its exit code."""

    code = 1


class PeerLost(TrainingError):
    """This rank cannot go on because of another one. Every rank says its own, so that one sees who waited for whom."""

    code = 3  # by which a launcher tells a victim from the cause


class Note(UserWarning):
    """Something that is done otherwise than asked; the command says so in one line and goes on."""
