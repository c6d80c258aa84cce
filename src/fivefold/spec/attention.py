"""What attention can be beside plain: keys and values of latents (MLA), rotary positions for longer contexts."""

import math
from typing import Annotated

import msgspec

from fivefold.support.ranges import TOKENS, outside, within

_Width = Annotated[int, within(1, 100_000)]


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MLA (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of one narrow latent of the token.

    Positions are in `rope_dim` dims of their own, whose key all heads share.
    """

    q_rank: Annotated[int, within(0, 100_000)] = 0  # width of the queries' latent; 0: queries come from the stream
    kv_rank: _Width
    nope_dim: _Width  # dims of a head's query and key without positions
    rope_dim: _Width  # and with
    v_dim: _Width  # of a head's value

    @property
    def head_dim(self) -> int:
        """Of a query and its key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Numbers that a token leaves for later ones, whatever the number of heads."""
        return self.kv_rank + self.rope_dim

    def problems(self) -> list[str]:
        found = [*outside(self, "model.mla").values()]
        if self.rope_dim % 2:
            found.append(
                f"model.mla.rope_dim={self.rope_dim} is odd and rotary positions turn pairs of dims; nearest: "
                f"rope_dim={self.rope_dim + 1}"
            )
        if not found and self.v_dim > self.head_dim:
            found.append(
                f"model.mla.v_dim={self.v_dim} is wider than a key, nope_dim + rope_dim = {self.head_dim}, to which "
                f"the kernels take values padded; nearest: v_dim={self.head_dim}"
            )
        return found


class RopeScaling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="llama3"
):
    """Llama 3.1's stretch of the rotary wavelengths: long ones by `factor`, short ones not, a ramp between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: Annotated[int, within(1, TOKENS)] = 8192

    def problems(self) -> list[str]:
        factors = self.factor, self.high_freq_factor, self.low_freq_factor
        found = [*outside(self, "model.rope_scaling").values()]
        if not (0 < factors[0] < math.inf and math.inf > factors[1] > factors[2] > 0):
            found.append(
                "model.rope_scaling needs factor > 0 and high_freq_factor > low_freq_factor > 0, and has "
                f"{factors[0]}, {factors[1]} and {factors[2]}"
            )
        return found


class Yarn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="yarn"):
    """YaRN (arXiv 2309.00071): pairs that turn less than `beta_slow` times in the original context are stretched by
    `factor`, those that turn more than `beta_fast` times are not, and a ramp over the dims joins them."""

    factor: float = 32.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: Annotated[int, within(1, TOKENS)] = 4096
    truncate: bool = True  # the ramp begins and ends at whole dims
    mscale: float = 0.0  # DeepSeek's two weights of the logarithm of `factor`; 0: the paper's rule
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0  # of the rotation; 0: it follows from the others

    @property
    def rotation(self) -> float:
        """What rotated queries and keys are multiplied with."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._weight(self.mscale) / self._weight(self.mscale_all_dim)
        return self._weight(1.0)

    @property
    def scores(self) -> float:
        """What the scores of latent attention are multiplied with, rotated or not."""
        return self._weight(self.mscale_all_dim) ** 2

    def _weight(self, scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(self.factor) if self.factor > 1 else 1.0

    def problems(self) -> list[str]:
        found = [*outside(self, "model.rope_scaling").values()]
        if not (0 < self.factor < math.inf and math.inf > self.beta_fast >= self.beta_slow > 0):
            found.append(
                "model.rope_scaling of kind yarn needs factor > 0 and beta_fast >= beta_slow > 0, and has "
                f"{self.factor}, {self.beta_fast} and {self.beta_slow}"
            )
        found += [
            f"model.rope_scaling.{name}={getattr(self, name)} must not be negative"
            for name in ("mscale", "mscale_all_dim", "attention_factor")
            if not 0 <= getattr(self, name) < math.inf
        ]
        return found
