"""How much of its ceiling a device reaches: a few shares per accelerator, each with a meaning.

    achieved("H100").gemm      # of the peak rate, in a large bf16 GEMM

The catalogue (`accelerators.py`) has the makers' ceilings. The shares stand in `achieved.toml` beside this file: fitted
to published runs by `fivefold truth --fit`, or measured on a device by `fivefold calibrate`; the file says which.
"""

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
    ramp: float = 200.0  # filling and draining a tile, in steps of its inner loop
    units: int = 108  # multiprocessors: the tiles of a GEMM run in waves of so many
    flash1: float = 0.35  # of the peak rate: attention kernels forward, over the scores that a causal mask leaves
    flash2: float = 0.60
    flash3: float = 0.60
    stream: float = 0.80  # of the memory bandwidth: kernels that read, do little and write
    inside: float = 0.75  # of a link's bandwidth: large collectives within a node
    across: float = 0.80  # and between nodes
    launch: float = 4e-6  # seconds from the end of one kernel to the start of the next
    source: str = "assumed"


# A device that nobody has measured reaches what the nearest of its kind does.
LIKE = {
    "A100-40": "A100-80",
    "V100": "A100-80",
    "TPU-v4": "A100-80",
    "L40S": "A100-80",
    "RTX4090": "A100-80",
    "H100-96": "H100",
    "H200": "H100",
    "B200": "H100",
    "GB200": "H100",
    "B300": "H100",
    "GB300": "H100",
}


@cache
def known() -> dict[str, dict[str, Any]]:
    """The file's tables: one per accelerator."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


@cache
def achieved(accelerator: str) -> Achieved:
    """What an accelerator of that name reaches, or its nearest kin."""
    tables = known()
    name = accelerator if accelerator in tables else LIKE.get(accelerator, "")
    return convert(tables.get(name, {}), Achieved)
