"""A process that answers one question after the other: lines of JSON in, lines of JSON out.

Answers that take seconds are computed here and not in the server, so that a newer question can end this process and
sliders stay quick.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import UserError
from fivefold.web.question import Ask
from fivefold.web.views import answer


class WorkerQuestion(msgspec.Struct):
    view: str
    part: str
    query: dict[str, str]


def respond(line: bytes, runs: tuple[Path, ...]) -> dict[str, Any]:
    """The answer, the problems of the question, or the traceback of a bug."""
    question = msgspec.json.decode(line, type=WorkerQuestion)
    try:
        return {"answer": answer(question.view, question.part, Ask(question.query, runs))}
    except UserError as error:
        return {"problems": error.problems, "codes": error.codes}
    except Exception:
        return {"trace": traceback.format_exc()}


def main() -> None:
    runs = tuple(map(Path, sys.argv[1:]))
    os.nice(10)  # the server, which answers sliders, comes first
    importlib.import_module("fivefold.planner.plan")  # takes longest to import, so before the first question
    try:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(respond(line, runs)) + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)  # the server has ended


if __name__ == "__main__":
    main()
