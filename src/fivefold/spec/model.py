"""ModelSpec: the numbers of a decoder, and what follows from them.

    spec = preset("llama3-8b")
    spec.parameter_count            # 8030261248
    spec.flops_per_token(8192)      # forward + backward, attention counted full

The family is wide enough for Llama 2 and 3, Mistral, Qwen2.5 and 3, and GPT-3: pre-norm blocks whose norm, activation,
positions, biases and q/k norm are chosen by name. What a layer's block is made of, its pattern says (`pattern.py`).
`parameters()` is the one list of names and shapes: the model is built to it, the initialiser draws by it, the planner
counts with it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from fivefold.spec.blocks import Experts, LatentSpec, RopeScaling, Yarn
from fivefold.spec.kinds import WANTED_PARAMETERS, BlockKind, norm, trial
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT, Parameter, block, head
from fivefold.spec.pattern import Layer, layers_of, pattern_problems
from fivefold.support.errors import Problem
from fivefold.support.plugin_calls import WHOLE_NUMBERS, ask
from fivefold.support.ranges import MAX_TOKENS, outside, within
from fivefold.support.text import divisors, either

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "swiglu_clamped", "gelu", "gelu_tanh"]
Positions = Literal["rope", "learned"]
AttentionFlopCounting = Literal["full", "causal"]
QKNormOver = Literal["head", "all"]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder by its numbers, and what follows from them: parameters, FLOPs, operations. `preset` has known ones."""

    name: str = "custom"
    layers: Annotated[int, within(1, 10_000)]
    hidden: Annotated[int, within(1, 1_000_000)]
    heads: Annotated[int, within(1, 100_000)]
    vocab: Annotated[int, within(1, 100_000_000)]
    kv_heads: Annotated[int, within(1, 100_000)] = 0  # 0: as many as heads (MHA); fewer is GQA, one is MQA
    head_dim: Annotated[int, within(0, 100_000)] = 0  # 0: hidden / heads
    ffn: Annotated[int, within(1, 10_000_000)] = 0  # 0: 4 x hidden; of layers without experts
    experts: Experts | None = None  # a mixture of experts in place of the dense network
    context: Annotated[int, within(1, MAX_TOKENS)] = 2048  # longest sequence; the rows of a learned position table
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "swiglu"
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | Yarn | None = None  # Llama 3's, or with kind = "yarn" DeepSeek's and gpt-oss's
    rope_dim: Annotated[int, within(0, 100_000)] = 0  # dims of a head that positions turn, the first ones; 0: all
    rope_interleaved: bool = False  # DeepSeek: neighbouring dims make a pair, not dims half a head apart
    mla: LatentSpec | None = None  # DeepSeek: keys and values are made of one latent of the token
    sinks: bool = False  # gpt-oss: a learned logit of each head beside its scores, which takes attention off the keys
    window: Annotated[int, within(0, MAX_TOKENS)] = 0  # keys that a query sees, its own the last; 0: all before it
    window_period: Annotated[int, within(1, 10_000)] = 1  # with n, each n-th layer sees all; 1: none does
    # The kinds of mixer and MLP, layer by layer, repeated; none: as the numbers above and below have it.
    pattern: tuple[Layer, ...] = ()
    bias: bool = False  # on every linear of the blocks (never on the head)
    qkv_bias: bool = False  # Qwen2.5: on q, k and v alone
    qk_norm: bool = False  # Qwen3: RMSNorm of q and k, before the rotation
    qk_norm_over: QKNormOver = "head"  # the features of a head; or of all heads together, as in OLMoE
    tied: bool = False  # the head is the embedding
    dropout: float = 0.0  # of the embedding and of each residual branch; attention probabilities are never dropped
    init_std: float = 0.02

    def __post_init__(self) -> None:
        divides = self.heads > 0 and self.hidden % self.heads == 0
        own = self.mla.head_dim if self.mla else 0
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or own or (self.hidden // self.heads if divides else 0),  # 0 is a problem
            "ffn": self.ffn or 4 * self.hidden,
        }
        for field, value in derived.items():
            msgspec.structs.force_setattr(self, field, value)
        if self.pattern:
            pattern = tuple(layer if isinstance(layer, Layer) else Layer(**layer) for layer in self.pattern)
            msgspec.structs.force_setattr(self, "pattern", pattern)

    # ---- what follows from the numbers -------------------------------------------------------------------------

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that positions turn."""
        return self.mla.rope_dim if self.mla else self.rope_dim or self.head_dim

    def block_parameters(self, layer: int) -> Iterator[Parameter]:
        """One block, in the order of its forward pass."""
        for kind in self.kinds(layer).branches:
            yield from norm(f"layers.{layer}.{kind.place}_norm", self, layer, self.hidden)
            yield from ask(kind, "parameters", self, layer, wanted=WANTED_PARAMETERS)

    def kinds(self, layer: int) -> Layer:
        """The mixer and the MLP of a layer."""
        return self._kinds[layer]

    @cached_property
    def _kinds(self) -> tuple[Layer, ...]:
        return layers_of(self)

    def counted(self, layers: Iterable[int] | None = None) -> dict[Layer, int]:
        """How many of these layers, or of all, are of each kind."""
        return Counter(self._kinds if layers is None else map(self.kinds, layers))

    def first(self, layer: Layer) -> int:
        """The index of the first layer like this one."""
        return self._kinds.index(layer)

    @cached_property
    def routed_layers(self) -> tuple[int, ...]:
        """Those with experts."""
        return tuple(index for index, layer in enumerate(self._kinds) if layer.routed)

    @cached_property
    def windowed(self) -> bool:
        """Whether a layer has a window."""
        return any(block(self, layer=layer).attention.window for layer in self.counted())

    @cached_property
    def attention_heads(self) -> tuple[tuple[int, int], ...]:
        """Heads and kv heads of the layers with attention; each such pair once."""
        scores = (block(self, layer=layer).attention for layer in self.counted() if layer.attends)
        return tuple(dict.fromkeys((own.heads, own.kv_heads) for own in scores))

    @cached_property
    def attends(self) -> bool:
        """Whether a layer has attention."""
        return any(layer.attends for layer in self.counted())

    @property
    def residual_writers(self) -> int:
        """How many branches write into the residual stream."""
        return sum(count * len(layer.branches) for layer, count in self.counted().items())

    @property
    def tensor_widths(self) -> dict[int, BlockKind]:
        """Widths that tp must divide, beside heads: of feed-forward networks, of shared experts, and of plugins."""
        return {width: kind for kind in self.branches for width in ask(kind, "divided", self, wanted=WHOLE_NUMBERS)}

    @cached_property
    def branches(self) -> tuple[BlockKind, ...]:
        """The kinds of mixers and MLPs that there are, each once."""
        return tuple(dict.fromkeys(kind for layer in self.counted() for kind in layer.branches))

    def buffers(self) -> dict[str, tuple[int, ...]]:
        """What the model keeps beside its parameters, by name and shape: no gradient changes it."""
        if self.experts is None or not self.experts.balance_bias:
            return {}
        return {f"{self.router(layer)}.balance": (self.experts.count,) for layer in self.routed_layers}

    def router(self, layer: int) -> str:
        """The name of a layer's router."""
        kind = self.kinds(layer).mlp
        assert kind is not None
        return f"layers.{layer}.{kind.place}.router"

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once; a tied head is the embedding and is not repeated."""
        return self._parameters

    @cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        table = (self.vocab, self.hidden)
        parameters = [Parameter("embedding.weight", table, "embedding", EMBEDDING_UNIT, "colwise", tied=self.tied)]
        if self.positions == "learned":
            parameters.append(Parameter("positions.weight", (self.context, self.hidden), "embedding", EMBEDDING_UNIT))
        for layer in range(self.layers):
            parameters += self.block_parameters(layer)
        parameters += norm("norm", self, HEAD_UNIT, self.hidden)
        if not self.tied:
            parameters.append(Parameter("head.weight", table, "linear", HEAD_UNIT, "colwise"))
        return tuple(parameters)

    @cached_property
    def parameter_count(self) -> int:
        bare = msgspec.structs.replace(self, layers=0)
        rest = sum(parameter.size for parameter in bare.parameters())
        return rest + self.all_blocks_parameter_count

    @property
    def all_blocks_parameter_count(self) -> int:
        return sum(count * self.block_parameter_count(layer) for layer, count in self.counted().items())

    @property
    def active_parameters(self) -> int:
        """All except the parameters of experts that a token does not visit."""
        idle = 0
        for layer, count in self.counted().items():
            idle += count * sum(
                matmul.size - matmul.active + matmul.bias * (matmul.rows - matmul.outputs * max(1, matmul.chosen))
                for matmul in block(self, layer=layer).matmuls
            )
        return self.parameter_count - idle

    def block_parameter_count(self, layer: Layer) -> int:
        """Elements of a block's parameters."""
        return sum(parameter.size for parameter in self.block_parameters(self.first(layer)))

    @property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: the linears and the head (tied or not), not the look-up tables.

        Of the experts of a layer those that the token visits.
        """
        blocks = sum(count * block(self, layer=layer).active for layer, count in self.counted().items())
        return blocks + head(self).size

    def flops_per_token(self, seq: int, attention: AttentionFlopCounting = "full") -> int:
        """Model FLOPs of one training token, forward and backward, without recomputation.

        6 for every matmul weight, and 12 x layers x heads x head_dim x seq for the scores and their product with V.
        `full` counts all seq x seq scores, as PaLM's appendix B does; `causal` counts the half that a causal mask
        leaves, as newer reports do. Layers with a window count no more keys than it holds. An MFU means nothing without
        the name of its convention.
        """
        keys = seq if attention == "full" else seq / 2
        rest = 0
        for layer, count in self.counted().items():
            rest += count * round(block(self, layer=layer).rest(keys))
        return 6 * self.matmul_parameters + 3 * rest

    # ---- validation ----------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything that is wrong with these numbers, each with its value and what would be right."""
        absurd = outside(self, "model")
        problems = [
            *absurd.values(),
            *([] if absurd.keys() & {"hidden", "heads", "kv_heads", "head_dim"} else self._heads()),
        ]
        if self.experts is not None and not absurd:
            problems += self.experts.problems(self.layers)
        if not 0 <= self.dropout < 1:
            problems.append(
                Problem("model.dropout.range", f"model.dropout={self.dropout} is a probability: 0 <= dropout < 1")
            )
        problems += [
            Problem(f"model.{field}.range", f"model.{field}={getattr(self, field)} must be positive")
            for field in ("norm_eps", "init_std", "rope_theta")
            if not 0 < getattr(self, field) < math.inf
        ]
        problems += self.rope_scaling.problems() if self.rope_scaling else []
        if self.window_period > 1 and not self.window:
            period = f"model.window_period={self.window_period}"
            problems.append(
                Problem(
                    "model.window_period.window",
                    f"{period} says which layers have a window, and model.window=0; nearest: window_period=1",
                )
            )
        problems += [*self._latent(), *([] if absurd else pattern_problems(self))]
        return problems or [problem for kind in self.branches for problem in trial(kind, self, self._layer_of(kind))]

    def _layer_of(self, kind: BlockKind) -> int:
        """The first layer that has it."""
        return next(index for index, layer in enumerate(self._kinds) if kind in layer.branches)

    def _latent(self) -> list[str]:
        """What does not go with latent attention."""
        if self.mla is None:
            return []
        rules = {"norm": "rmsnorm", "positions": "rope", "kv_heads": self.heads, "head_dim": self.mla.head_dim}
        rules |= {"sinks": False, "window": 0, "rope_dim": 0, "bias": False, "qkv_bias": False, "qk_norm": False}
        return self.mla.problems() + [
            Problem("model.mla.settings", f"model.{field}={getattr(self, field)}, and model.mla has {field}={only}")
            for field, only in rules.items()
            if getattr(self, field) != only
        ]

    def _heads(self) -> list[str]:
        """Where the width, the heads and the kv heads do not divide."""
        problems: list[str] = []
        if self.head_dim < 1:
            fewer = [n for n in divisors(self.hidden) if n < self.heads]
            more = [n for n in divisors(self.hidden) if n > self.heads]
            nearest = either([f"heads={n}" for n in (*fewer[-1:], *more[:1])] or ["heads=1"])
            problems.append(
                Problem(
                    "model.heads.hidden",
                    f"model.hidden={self.hidden} does not divide into model.heads={self.heads} equal heads; nearest: "
                    f"{nearest}, or give model.head_dim",
                )
            )
        if self.heads % self.kv_heads:
            near = min(divisors(self.heads), key=lambda n: abs(n - self.kv_heads))
            problems.append(
                Problem(
                    "model.kv_heads.heads",
                    f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}: each kv head serves an "
                    f"equal group of query heads; nearest: kv_heads={near}",
                )
            )
        if self.positions == "rope" and not self.rope_dim and self.head_dim % 2:
            problems.append(
                Problem(
                    "model.head_dim.odd",
                    f"model.head_dim={self.head_dim} is odd and rotary positions turn pairs of dims; "
                    f"nearest: head_dim={self.head_dim + 1}",
                )
            )
        if self.rope_dim and (self.rope_dim % 2 or self.rope_dim > self.head_dim):
            near = min(self.rope_dim + self.rope_dim % 2, self.head_dim // 2 * 2)
            problems.append(
                Problem(
                    "model.rope_dim.odd",
                    f"model.rope_dim={self.rope_dim} must be even and at most head_dim={self.head_dim}; nearest: "
                    f"rope_dim={near}",
                )
            )
        return problems
