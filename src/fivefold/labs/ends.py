"""How a rank of an answer ended where it did not return: in a sentence, in the words of a lab and not of adapters."""

import re
from collections.abc import Sequence
from pathlib import Path

from fivefold.foreign.layout_proof import LayoutProof
from fivefold.labs.messages import LabMessage, stuck, unlike

# After these, other layouts say the same, or take their whole time limit, too.
FINAL = (
    *("hung", "died", "lab.hole", "lab.name", "lab.exit", "lab.output"),
    *("adapter.import", "adapter.package", "adapter.file"),
)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')  # of faulthandler, the innermost first


def ended(proof: LayoutProof, file: str, messages: Sequence[Sequence[LabMessage]]) -> str:
    """Why a layout has no numbers, or not all of them."""
    text = proof.broken.replace("the adapter ", "")
    if proof.ended == "died" and "SIGABRT" in text:  # gloo's way of ending where ranks expect other sizes
        return unlike(messages) or text + _while_exchanging(messages)
    if proof.ended == "died" and "exit code" in text:
        left = text.partition(":")[0]
        return f"{left} in the middle of the step: {file} has to return to its caller, and not to exit"
    if proof.ended != "hung":
        return text
    places = {rank: place for rank, stack in proof.stacks.items() if (place := _place(stack, file))}
    told = [f"rank {rank} is in {place}" for rank, place in places.items()]
    if waits := stuck(messages):
        return "; ".join([waits, *told])
    return "; ".join([text.partition(";")[0], *told]) if told else text


def _while_exchanging(messages: Sequence[Sequence[LabMessage]]) -> str:
    last = next((one[-1] for one in messages if one), None)
    if last is None or last.kind != "all-to-all":
        return ""
    return " in an all-to-all: what one rank sends is not what another expects, by the split sizes that it is given"


def _place(stack: str, file: str) -> str:
    """The innermost line of the answer in a stack."""
    found = [(line, function) for path, line, function in _FRAME.findall(stack) if Path(path).name == file]
    return f"{found[0][1]} ({file}, line {found[0][0]})" if found else ""
