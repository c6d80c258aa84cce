"""The numbers of parts that only some models have: latent attention (MLA), stretched rotary positions, experts."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from fivefold.support.errors import Problem
from fivefold.support.ranges import MAX_TOKENS, outside, within
from fivefold.support.text import divisors, either

_Width = Annotated[int, within(1, 100_000)]


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        """Dims of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Elements of a token in the KV cache, whatever the number of heads."""
        return self.kv_rank + self.rope_dim

    def problems(self) -> list[str]:
        problems = [*outside(self, "model.mla").values()]
        if self.rope_dim % 2:
            problems.append(
                Problem(
                    "model.mla.rope_dim.odd",
                    f"model.mla.rope_dim={self.rope_dim} is odd and rotary positions turn pairs of dims; nearest: "
                    f"rope_dim={self.rope_dim + 1}",
                )
            )
        if not problems and self.v_dim > self.head_dim:
            problems.append(
                Problem(
                    "model.mla.v_dim.width",
                    f"model.mla.v_dim={self.v_dim} is wider than a key, nope_dim + rope_dim = {self.head_dim}, to "
                    f"which the kernels take values padded; nearest: v_dim={self.head_dim}",
                )
            )
        return problems


class RopeScaling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="llama3"
):
    """Llama 3.1's stretch of the rotary wavelengths: long ones by `factor`, short ones not, a ramp between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: Annotated[int, within(1, MAX_TOKENS)] = 8192

    def problems(self) -> list[str]:
        problems = [*outside(self, "model.rope_scaling").values()]
        if not (0 < self.factor < math.inf and math.inf > self.high_freq_factor > self.low_freq_factor > 0):
            problems.append(
                Problem(
                    "model.rope_scaling.factor.range",
                    "model.rope_scaling needs factor > 0 and high_freq_factor > low_freq_factor > 0, and has "
                    f"{self.factor}, {self.high_freq_factor} and {self.low_freq_factor}",
                )
            )
        return problems


class Yarn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="yarn"):
    """YaRN (arXiv 2309.00071): pairs that turn less than `beta_slow` times in the original context are stretched by
    `factor`, those that turn more than `beta_fast` times are not, and a ramp over the dims joins them."""

    factor: float = 32.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: Annotated[int, within(1, MAX_TOKENS)] = 4096
    truncate: bool = True  # the ramp begins and ends at whole dims
    mscale: float = 0.0  # DeepSeek's two weights of the logarithm of `factor`; 0: the paper's rule
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0  # of the rotation; 0: it follows from the others

    @property
    def rotation_scale(self) -> float:
        """What rotated queries and keys are multiplied with."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._log_scale(self.mscale) / self._log_scale(self.mscale_all_dim)
        return self._log_scale(1.0)

    @property
    def score_scale(self) -> float:
        """What the scores of latent attention are multiplied with, rotated or not."""
        return self._log_scale(self.mscale_all_dim) ** 2

    def _log_scale(self, weight: float) -> float:
        """What YaRN multiplies attention with, by the logarithm of the stretch."""
        return 1.0 + 0.1 * weight * math.log(self.factor) if self.factor > 1 else 1.0

    def problems(self) -> list[str]:
        problems = [*outside(self, "model.rope_scaling").values()]
        if not (0 < self.factor < math.inf and math.inf > self.beta_fast >= self.beta_slow > 0):
            problems.append(
                Problem(
                    "model.rope_scaling.factor.range",
                    "model.rope_scaling of kind yarn needs factor > 0 and beta_fast >= beta_slow > 0, and has "
                    f"{self.factor}, {self.beta_fast} and {self.beta_slow}",
                )
            )
        problems += [
            Problem(
                f"model.rope_scaling.{name}.range",
                f"model.rope_scaling.{name}={getattr(self, name)} must not be negative",
            )
            for name in ("mscale", "mscale_all_dim", "attention_factor")
            if not 0 <= getattr(self, name) < math.inf
        ]
        return problems


# ---- experts --------------------------------------------------------------------------------------------------------
# Experts: the numbers of a mixture of experts, and what its router does with them.
#
# A router gives every token a score for every expert. The `top_k` best ones compute it, and the sum of what they say,
# weighted by their scores, takes the place of the dense feed-forward network. Every published model is one choice of:
#
# scores          softmax over all experts (Mixtral, Qwen3, OLMoE), or a sigmoid for each (DeepSeek-V3)
# renormalise     the weights of the chosen are divided by their sum; a softmax over the chosen alone is the same
# scale           a factor on all weights (DeepSeek-V3: 2.5)
# groups          the experts are dealt into groups, and only those of the best `top_groups` can be chosen (DeepSeek)
# balance_bias    a number for each expert that helps to choose it, and does not weigh (DeepSeek-V3); set by its load


Scores = Literal["softmax", "sigmoid"]
Many = Annotated[int, within(1, 100_000)]


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Many  # experts of a layer, of which a token visits top_k
    top_k: Many
    ffn: Annotated[int, within(1, 10_000_000)]  # inner width of one expert
    shared: Annotated[int, within(0, 1000)] = 0  # experts that every token visits; they are one network of that width
    dense_layers: Annotated[int, within(0, 10_000)] = 0  # the first layers have a dense network of model.ffn instead
    scores: Scores = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: Many = 1
    top_groups: Many = 1
    balance_bias: bool = False

    @property
    def shared_ffn(self) -> int:
        """Inner width of the network that the shared experts are."""
        return self.shared * self.ffn

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.count // self.groups

    @property
    def scores_per_group(self) -> int:
        """How many of a group's best scores are added up to compare groups: DeepSeek-V2 takes one, V3 two."""
        return min(self.group_size, 2 if self.scores == "sigmoid" else 1)

    def problems(self, layers: int) -> Iterator[str]:
        """Everything that is wrong with these numbers in a model of so many layers."""
        if absurd := outside(self, "model.experts"):
            yield from absurd.values()
            return
        if self.top_k > self.count:
            yield Problem(
                "model.experts.top_k.count",
                f"model.experts.top_k={self.top_k} is more than model.experts.count={self.count}; nearest: "
                f"top_k={self.count}",
            )
        if self.dense_layers >= layers:
            yield Problem(
                "model.experts.dense_layers.layers",
                f"model.experts.dense_layers={self.dense_layers} leaves none of the {layers} layers to experts; "
                f"nearest: dense_layers={layers - 1}",
            )
        if not 0 < self.scale < float("inf"):
            yield Problem("model.experts.scale.range", f"model.experts.scale={self.scale} must be positive")
        yield from self._group_problems()

    def _group_problems(self) -> Iterator[str]:
        """Where experts, groups and top_k do not fit each other."""
        if self.count % self.groups:
            near = min(divisors(self.count), key=lambda n: abs(n - self.groups))
            yield Problem(
                "model.experts.groups.count",
                f"model.experts.groups={self.groups} does not divide model.experts.count={self.count}; nearest: "
                f"groups={near}",
            )
        elif self.top_groups > self.groups:
            yield Problem(
                "model.experts.top_groups.groups",
                f"model.experts.top_groups={self.top_groups} is more than model.experts.groups={self.groups}; "
                f"nearest: top_groups={self.groups}",
            )
        elif (most := self.top_groups * self.group_size) < self.top_k <= self.count:
            near_groups = f"top_groups={-(-self.top_k // self.group_size)}"
            yield Problem(
                "model.experts.top_k.groups",
                f"model.experts.top_k={self.top_k}, and the best {self.top_groups} of {self.groups} groups have {most} "
                f"experts; nearest: {either([f'top_k={most}', near_groups])}",
            )
