"""How much of its ceiling a device reaches: a few shares per accelerator, each with a meaning.

    achieved("H100").gemm      # of the peak rate, in a large bf16 GEMM

The catalogue (`accelerators.py`) has the makers' ceilings. The shares stand in `efficiency.toml` beside this file:
fitted to published runs by `fivefold truth --fit`, or measured on a device by `fivefold calibrate`; it says which.
"""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, convert

FILE = Path(__file__).with_suffix(".toml")


class Achieved(Struct, frozen=True, kw_only=True):
    """Shares of the accelerator's own ceilings, unless a unit is given."""

    gemm: float = 0.75  # of the peak rate: large GEMMs in bf16 or fp16, sustained
    fp8: float = 0.60  # of the fp8 peak: likewise, without the casts around them
    fp4: float = 0.45  # of the fp4 peak: likewise
    ramp: float = 200.0  # filling and draining a tile, in steps of its inner loop
    units: int = 108  # multiprocessors: the tiles of a GEMM run in waves of so many
    flash1: float = 0.35  # of the peak rate: attention kernels forward, over the scores that a causal mask leaves
    flash2: float = 0.60
    flash3: float = 0.60
    stream: float = 0.80  # of the memory bandwidth: kernels that read, do little and write
    inside: float = 0.75  # of a link's bandwidth: large collectives within a node
    across: float = 0.80  # and between nodes
    launch: float = 4e-6  # seconds from the end of one kernel to the start of the next
    # Of CPUs, where they were measured (0: not): seconds of Python and dispatch for a pass through a block, and of the
    # gradient norm, clipping and AdamW for a parameter, which arithmetic bounds there, not memory.
    host: float = 0.0
    update: float = 0.0
    source: str = "assumed"


class Software(Struct, frozen=True, kw_only=True):
    """What overlap reaches where a stack has it, as the share of a collective that compute hides; and a host's pace."""

    tp: float = 0.80  # all of tensor parallelism's collectives, in pieces behind their GEMMs
    tp_backward: float = 0.80  # input gradients behind the weights'
    cp: float = 0.80  # the ring behind attention
    zero: float = 0.80  # ZeRO 3's gathers and scatters behind the neighbouring blocks
    dp: float = 0.90  # gradients behind backward, weights behind forward
    pp: float = 0.80  # sends behind the next microbatch
    norm: float = 1.5  # times the bytes of an eager norm: kernels that reduce reach less of the bandwidth
    host: float = 1.1e-3  # seconds in which Python launches the forward pass of one eager block


# A device that nobody has measured reaches what the nearest of its kind does.
LIKE = dict.fromkeys(("A100-40", "A100-PCIE-40", "A100-PCIE-80", "A800"), "A100-80")
LIKE |= dict.fromkeys(("TPU-v4", "L40S", "A10G", "RTX4090", "RTX5090"), "A100-80")
LIKE |= dict.fromkeys(("H100-96", "H200", "H800", "MI300X", "MI325X"), "H100")
LIKE |= dict.fromkeys(("GB200", "B300", "GB300", "MI350X", "MI355X"), "B200")
LIKE["V100-16"] = "V100"


@cache
def known() -> dict[str, dict[str, Any]]:
    """The file's tables: one per accelerator."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def write(tables: dict[str, dict[str, Any]], path: Path = FILE) -> None:
    """The file anew: these tables, and of the others what it had."""
    lines = ["# Made by `fivefold truth --fit` and `fivefold calibrate`; each table says by which."]
    for name, table in sorted((known() | tables).items()):
        key = f'"{name}"' if re.search(r"[^\w-]", name) else name
        lines += ["", f"[{key}]"]
        lines += [
            f"{field} = {f'{value:.4g}' if isinstance(value, float) else json.dumps(value, ensure_ascii=False)}"
            for field, value in table.items()
        ]
    path.write_text("\n".join(lines) + "\n")
    known.cache_clear()


@cache
def achieved(accelerator: str) -> Achieved:
    """What an accelerator of that name reaches, or its nearest kin."""
    tables = known()
    name = accelerator if accelerator in tables else LIKE.get(accelerator, "")
    return convert(tables.get(name, {}), Achieved)


def source_of(accelerator: str) -> str:
    """Where what an accelerator reaches is known from; a device that nobody has measured says as whose."""
    guessed = accelerator not in known() and accelerator in LIKE
    return f"a guess, as {LIKE[accelerator]}'s" if guessed else achieved(accelerator).source


@cache
def software() -> Software:
    return convert(known().get("software", {}), Software)
