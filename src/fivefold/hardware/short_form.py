"""Like nodes in a word, counts before or behind the accelerator: 8x8xH100, 8xH100, 8h100, H100x8, H100:8, 8x4090."""

import re
from typing import Any

from fivefold.hardware.accelerators import find_accelerator, usual_node
from fivefold.support.errors import UserError
from fivefold.support.formatting import either

HOW = "write nodes x GPUs per node x accelerator, for example '8x8xH100'"


def table_of(text: str) -> dict[str, Any]:
    """'8x8xH100' as the table that TOML would hold."""
    counts: list[str] = []
    name, behind = _counts_behind(text)
    if not behind:
        before, name = re.findall(r"(?is)\A((?:-?[\d.]+\s*[x×]\s*)*)(.*)\Z", text)[0]
        counts = re.findall(r"-?[\d.]+", before)
        glued = re.fullmatch(r"(?is)(\d+)\s*(.*\S)\s*", name)
        if glued and not _is_known(name) and _is_known(glued[2]):  # 8h100, 8 H100
            counts, name = [*counts, glued[1]], glued[2]
        name, behind = _counts_behind(name)
    if not re.search(r"[^\W\d_]", name) and not _is_known(name):
        raise UserError(f"no accelerator is named; {HOW}")
    if len(counts) + len(behind) > 2:
        raise UserError(f"{len(counts) + len(behind)} counts are too many; {HOW}")
    if counts and behind:
        raise UserError(f"{counts[0]} before and {behind[0]} behind the name may be read in two ways; {HOW}")
    if len(behind) == 2:
        ways = dict.fromkeys(f"{x}x{y}x{find_accelerator(name).name}" for x, y in (behind, behind[::-1]))
        raise UserError(f"nodes and GPUs per node stand before the accelerator; write {either(list(ways))}")
    if len(counts + behind) == 1 and _is_known(name):
        _one_node((counts + behind)[0], find_accelerator(name).name)
    return {**dict(zip(("gpus", "nodes"), reversed(counts + behind), strict=False)), "accelerator": name}


def _one_node(count: str, name: str) -> None:
    """Refuse more GPUs than a node has: most who write 64xH100 mean eight nodes, and the two differ in every time."""
    usual = usual_node(name)
    if usual is None or not re.fullmatch(r"\d{1,9}", count) or int(count) <= usual:
        return
    wanted = int(count)
    gpus = max(n for n in range(1, usual + 1) if wanted % n == 0)
    nodes = wanted // gpus
    if 2 * gpus < usual:  # 17 GPUs: whole nodes nearby are nearer than 17 nodes of one
        nodes, gpus = round(wanted / usual), usual
    raise UserError(
        f"{wanted} GPUs are more than the {usual} that a node of {name} has; write {nodes}x{gpus}x{name}, or "
        f"1x{wanted}x{name} for one node of {wanted}"
    )


def _counts_behind(text: str) -> tuple[str, list[str]]:
    """The accelerator, and what stands behind it in h100x8 or H100:8."""
    name, counts = text.strip(), list[str]()
    while len(counts) < 3 and not _is_known(name) and (cut := re.fullmatch(r"(?is)(.+?)\s*[x×:]\s*(\d+)", name)):
        name, counts = cut[1], [cut[2], *counts]
    return (name, counts) if _is_known(name) else (text, [])


def _is_known(name: str) -> bool:
    try:
        return bool(find_accelerator(name))
    except UserError:
        return False
