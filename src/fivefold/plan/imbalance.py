"""How uneven the load of experts is: the fullest rank of an ep group against the mean."""

from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

# Qwen3-235B-A22B on 256 H100, tp 4, pp 8, ep 8, with routing forced to be even and with its own: 295 and 237 TFLOP/s at
# sequences of 16,384, 335 and 277 at 32,768, 368 and 320 at 65,536, 389 and 357 at 131,072 (Megatron-MoE-ModelZoo,
# best_practice/qwen3/readme.md). Under this planner's costs these are ranks with 1.50 to 1.75 times the mean.
IMBALANCE = 1.6
HERE = 16  # experts of a rank in these runs
SOURCE = f"by four published pairs of even and real routing with {HERE} experts a rank (ep=8)"


def more_even(spec: ModelSpec, ep: int, imbalance: float) -> str:
    """Where the default is of ranks with fewer experts: that it is likely too much. By how much nobody published."""
    if spec.experts is None or imbalance != IMBALANCE or ep == 1 or (each := spec.experts.count // ep) <= HERE:
        return ""
    return f"with {each} a rank, as here, it is likely less, as more loads even out more"


def imbalance_for(spec: ModelSpec, given: float | None = None) -> float:
    """As given, or as published runs have it; 1 for models without experts."""
    if spec.experts is None:
        if given is not None:
            raise UserError(f"imbalance={given:g} is one of experts, and {spec.name} has none; leave it out")
        return 1.0
    if given is None:
        return IMBALANCE
    if not 1 <= given <= spec.experts.count:
        raise UserError(
            f"imbalance={given:g} must be what the fullest rank gets over the mean, 1 to {spec.experts.count}; the "
            f"default is {IMBALANCE}, {SOURCE}"
        )
    return given
