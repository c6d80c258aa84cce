"""Stacks by name: this code, and the systems behind published runs, for those who want to know what theirs would do."""

from fivefold.hardware.accelerators import Accelerator
from fivefold.plan.cost.stack import FIVEFOLD, ON_CPUS, Stack
from fivefold.plan.cost.systems import MEGATRON_2022, NEMO, TITAN
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean


def software_of(name: str, device: Accelerator | None = None) -> Stack:
    """On a device: a CPU runs this code in another way than a GPU."""
    known = {
        "fivefold": ON_CPUS if device is not None and device.is_cpu else FIVEFOLD,
        "nemo": NEMO,
        "torchtitan": TITAN,
        "megatron": MEGATRON_2022,
    }
    if name.lower() not in known:
        raise UserError(f"unknown software {name!r}; {did_you_mean(name, list(known))}")
    return known[name.lower()]
