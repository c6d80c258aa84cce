"""Experts: the numbers of a mixture of experts, and what its router does with them.

A router gives every token a score for every expert. The `top_k` best ones compute it, and the sum of what they say,
weighted by their scores, takes the place of the dense feed-forward network. Every published model is one choice of:

scores          softmax over all experts (Mixtral, Qwen3, OLMoE), or a sigmoid for each (DeepSeek-V3)
renormalise     the weights of the chosen are divided by their sum; a softmax over the chosen alone is the same
scale           a factor on all weights (DeepSeek-V3: 2.5)
groups          the experts are dealt into groups, and only those of the best `top_groups` can be chosen (DeepSeek)
balance_bias    a number for each expert that helps to choose it, and does not weigh (DeepSeek-V3); set by its load
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from fivefold.support.formatting import either
from fivefold.support.numbers import divisors
from fivefold.support.ranges import outside, within

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
        return self.shared * self.ffn

    @property
    def in_group(self) -> int:
        return self.count // self.groups

    @property
    def group_scores(self) -> int:
        """How many of a group's best scores are added up to compare groups: DeepSeek-V2 takes one, V3 two."""
        return min(self.in_group, 2 if self.scores == "sigmoid" else 1)

    def problems(self, layers: int) -> Iterator[str]:
        """Everything that is wrong with these numbers in a model of so many layers."""
        if absurd := outside(self, "model.experts"):
            yield from absurd.values()
            return
        if self.top_k > self.count:
            yield (
                f"model.experts.top_k={self.top_k} is more than model.experts.count={self.count}; nearest: "
                f"top_k={self.count}"
            )
        if self.dense_layers >= layers:
            yield (
                f"model.experts.dense_layers={self.dense_layers} leaves none of the {layers} layers to experts; "
                f"nearest: dense_layers={layers - 1}"
            )
        if not 0 < self.scale < float("inf"):
            yield f"model.experts.scale={self.scale} must be positive"
        yield from self._groups()

    def _groups(self) -> Iterator[str]:
        if self.count % self.groups:
            near = min(divisors(self.count), key=lambda n: abs(n - self.groups))
            yield (
                f"model.experts.groups={self.groups} does not divide model.experts.count={self.count}; nearest: "
                f"groups={near}"
            )
        elif self.top_groups > self.groups:
            yield (
                f"model.experts.top_groups={self.top_groups} is more than model.experts.groups={self.groups}; "
                f"nearest: top_groups={self.groups}"
            )
        elif (most := self.top_groups * self.in_group) < self.top_k <= self.count:
            yield (
                f"model.experts.top_k={self.top_k}, and the best {self.top_groups} of {self.groups} groups have {most} "
                f"experts; nearest: {either([f'top_k={most}', f'top_groups={-(-self.top_k // self.in_group)}'])}"
            )
