"""What the modules of serving share: seconds of a step by cause, bytes of a weight."""

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of a step by cause."""

    weights: float = 0.0  # matmuls that wait for their weights
    cache: float = 0.0  # keys and values read
    compute: float = 0.0  # matmuls that wait for the tensor cores; attention of the prefill, and over latents
    pointwise: float = 0.0  # bytes of norms, rotations, activation functions, logits
    launch: float = 0.0  # from one kernel to the next
    tp: float = 0.0  # all-reduces
    ep: float = 0.0  # tokens on their way to experts and back
    pp: float = 0.0  # sends, and a stage's wait for a slower one
    host: float = 0.0  # the device waits for the host

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def bound(self) -> str:
        """The field that has the most."""
        return max(self._fields, key=lambda name: getattr(self, name))


def linear_bytes(precision: str) -> int:
    """Of a weight of the blocks."""
    return 1 if precision == "fp8" else 2
