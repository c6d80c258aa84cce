"""How a rank of an answer ended where it did not return: in a sentence, in the words of a lab and not of adapters."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.foreign.layout_proof import LayoutProof
from fivefold.labs.messages import BUILDS, IMPORTS, STEPS, LabMessage, stuck, unlike
from fivefold.launch.processes import RankError

# After these, other layouts say the same, or take their whole time limit, too.
FINAL = (
    *("hung", "died", "lab.hole", "lab.name", "lab.exit", "lab.output"),
    *("adapter.import", "adapter.package", "adapter.file"),
)
IN_NO_FUNCTION = "<module>"  # Python's name of code that runs while its file is imported
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')  # of faulthandler, the innermost first


class Broken(NamedTuple):
    """What a launcher says of ranks that did not return."""

    text: str
    kind: str  # "died", "hung" or another
    stacks: Mapping[int, str] = {}  # of ranks that hung


def broken_proof(proof: LayoutProof) -> Broken:
    return Broken(proof.broken, proof.ended, proof.stacks)


def broken_run(error: RankError) -> Broken:
    return Broken(f"{error}", error.kind, {end.rank: end.stack for end in error.ends if end.kind == "hung"})


def ended(broken: Broken, file: str, progress: Path, messages: Sequence[Sequence[LabMessage]] = ()) -> str:
    """Why there are no numbers, or not all of them; `progress` is where ranks wrote what they were at."""
    text = broken.text.replace("the adapter ", "")
    if broken.kind == "died" and "SIGABRT" in text:  # gloo's way of ending where ranks expect other sizes
        return unlike(messages) or text + _while_exchanging(messages)
    if broken.kind == "died" and "exit code" in text:
        left = text.partition(":")[0]
        when = _WHEN[_stage(progress, left)].format(file=file)
        return f"{left} {when}: {file} has to return to its caller, and not to exit"
    if broken.kind != "hung":
        return text
    places = {rank: place for rank, stack in broken.stacks.items() if (place := _place(stack, file))}
    told = [f"rank {rank} is in {place}" for rank, place in places.items()]
    if waits := stuck(messages):
        return "; ".join([waits, *told])
    return "; ".join([text.partition(";")[0], *told]) if told else text


_WHEN = {
    IMPORTS: "while {file} was imported",
    BUILDS: "before the step, while what it defines was made",
    STEPS: "in the middle of the step",
}


def _stage(progress: Path, text: str) -> str:
    """What a rank that a sentence names was at."""
    rank = re.search(r"\d+", text)
    try:
        found = (progress / rank[0]).read_text() if rank else ""
    except OSError:
        found = ""
    return found if found in _WHEN else STEPS


def _while_exchanging(messages: Sequence[Sequence[LabMessage]]) -> str:
    last = next((one[-1] for one in messages if one), None)
    if last is None or last.kind != "all-to-all":
        return ""
    return " in an all-to-all: what one rank sends is not what another expects, by the split sizes that it is given"


def _place(stack: str, file: str) -> str:
    """The innermost line of the answer in a stack."""
    found = [(line, function) for path, line, function in _FRAME.findall(stack) if Path(path).name == file]
    return line_of(found[0][1], file, found[0][0]) if found else ""


def line_of(function: str, file: str, line: int | str | None) -> str:
    """`forward (linear.py, line 20)`"""
    return f"{'the import' if function == IN_NO_FUNCTION else function} ({file}, line {line})"
