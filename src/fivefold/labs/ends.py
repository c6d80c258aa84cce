"""How a rank of an answer ended where it did not return: in a sentence, in the words of a lab and not of adapters."""

from collections.abc import Sequence

from fivefold.foreign.layout_proof import LayoutProof
from fivefold.labs.messages import LabMessage, stuck

# After these, other layouts say the same, or take their whole time limit, too.
FINAL = ("hung", "died", "lab.hole", "lab.name", "lab.exit", "adapter.import", "adapter.package", "adapter.file")


def ended(proof: LayoutProof, file: str, messages: Sequence[Sequence[LabMessage]]) -> str:
    """Why a layout has no numbers, or not all of them."""
    text = proof.broken.replace("the adapter ", "")
    if proof.ended == "died" and "exit code" in text:
        left = text.partition(":")[0]
        return f"{left} in the middle of the step: {file} has to return to its caller, and not to exit"
    if proof.ended != "hung":
        return text
    return "; ".join(filter(None, [stuck(messages), _own_loop(text, file)])) or text


def _own_loop(text: str, file: str) -> str:
    """`rank 1 gave no answer within 30 s; it is in linear.py, line 20`, where that is a line of the answer."""
    return text.partition("; with it hang")[0] if f" {file}, line " in text else ""
