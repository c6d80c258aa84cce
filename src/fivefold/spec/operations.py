"""The operations that a decoder computes for one token, listed once.

    block(spec, tp=8).matmuls       # of one block on one tp rank, in the order of the forward pass
    head(spec, tp=8)                # the matmul above the blocks

`ModelSpec` derives its parameters from this list. The planner's times, FLOPs and bytes, the balance of pipeline stages,
and serving read it too. So a new kind of block is a change here, and its kernels.
"""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


# ---- parameters -----------------------------------------------------------------------------------------------------
# Parameter: a tensor of the model, with the metadata that every package reads; nothing else parses parameter names.


Kind = Literal["embedding", "linear", "norm", "bias"]

# How the tp axis divides a parameter, in the field's words: "colwise" is column-parallel, each rank with rows of the
# stored [outputs, inputs]; "rowwise" is row-parallel. "colwise_kv": by whole kv heads; where ranks outnumber these
# heads, every rank holds all of it and uses one head. "per_head": every rank holds all of it and applies it to its own
# heads only. "replicated_partial": the same, and to its own tokens only. "experts": tp does not divide it; ep does, by
# whole experts.
TensorRule = Literal["colwise", "colwise_kv", "rowwise", "per_head", "replicated_partial", "replicated", "experts"]

# A unit is a part of the decoder: a layer, by its index; the embeddings below the layers; the norm and head above them.
# Forward runs the units in ascending order, backward finishes them in descending order.
EMBEDDING_UNIT, HEAD_UNIT = -1, 1 << 30


class Parameter(NamedTuple):
    name: str  # global: the same on every rank of every layout
    shape: tuple[int, ...]  # of a weight [..., rows, columns], of a norm or bias [..., rows]
    kind: Kind
    unit: int  # the part of the decoder that it belongs to
    tp: TensorRule = "replicated"
    tied: bool = False  # the first and the last pipeline stage both hold it
    residual: bool = False  # it writes into the residual stream
    experts: int = 0  # number of experts whose rows are concatenated in it; 0: it belongs to no expert
    # Never cast to a low-precision compute dtype. Such parameters are small, no matmul reads them, and their rounding
    # error is the same for all tokens, where that of activations averages out.
    full_precision: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The index of its layer; None for embeddings, and for the norm and head above the layers."""
        return self.unit if EMBEDDING_UNIT < self.unit < HEAD_UNIT else None

    @property
    def row_dim(self) -> int:
        return len(self.shape) - (2 if self.kind in ("linear", "embedding") else 1)

    @property
    def deferred(self) -> bool:
        """Whether a schedule that splits backward computes its gradient in a separate pass (W)."""
        # A router's is small, and is computed with its input's. The head's is computed with the loss: if deferred, it
        # would only be held, as large as the head for each microbatch.
        return self.kind == "linear" and self.tp != "replicated_partial" and self.layer is not None


# ---- operations -----------------------------------------------------------------------------------------------------


class Matmul(NamedTuple):
    """A token's `inputs` features times the weight [outputs, inputs] of one tp rank, or of each of several experts."""

    branch: Literal["attention", "mlp", "head"]
    name: str  # of its module in the branch
    reads: str  # the tensor that it multiplies; matmuls that read the same one can be one kernel
    inputs: int
    outputs: int
    tp: TensorRule  # how tp divides the weight
    bias: bool = False  # whether a bias is added to its outputs
    experts: int = 0  # number of experts, each with such a weight; 0: it belongs to no expert
    chosen: int = 0  # number of experts that a token visits

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return max(1, self.experts) * self.outputs

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.rows

    @property
    def active(self) -> int:
        """Elements of the weight that a token is multiplied with."""
        return self.inputs * self.outputs * max(1, self.chosen)

    @property
    def writes_residual(self) -> bool:
        """Whether its outputs are added to the residual stream.

        The stream is whole on every tp rank; with sp, a rank has its tokens of it.
        """
        return self.tp == "rowwise" or self.name == "experts.down"

    @property
    def reads_residual(self) -> bool:
        """Whether its inputs are the residual stream, normed."""
        return self.reads in ("attention_norm", "mlp_norm", "norm")

    @property
    def whole(self) -> bool:
        """Whether every tp rank has all of its outputs; with sp, those of its tokens."""
        return self.writes_residual or self.tp == "replicated"


class Scores(NamedTuple):
    """Scores and their product with the values, for the heads of one tp rank."""

    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; values are padded to it, where theirs is less
    v_dim: int
    cached: int  # numbers that a token leaves for later ones
    window: int = 0  # the most keys that a query sees; 0: all before it

    @property
    def width(self) -> int:
        """Features of the queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def seen(self) -> int:
        """Features of the output."""
        return self.heads * self.v_dim

    def keys(self, keys: float) -> float:
        """What a query sees of so many keys; a causal mask leaves half of a sequence."""
        return min(keys, self.window) if self.window else keys

    def flops(self, keys: float) -> float:
        """Forward FLOPs of a query that has so many keys before it."""
        return 2 * self.keys(keys) * (self.width + self.seen)


class Elementwise(NamedTuple):
    """An operation that is bound by memory, on `width` features of a token over all tp ranks."""

    kind: Literal["norm", "qk_norm", "rope", "swiglu", "gelu", "dropout", "residual"]
    width: int
    stream: bool = False  # features of the residual stream: only sp divides the work; tp divides all other work
    name: str = ""  # of its module in the block, where that has parameters

    def share(self, tp: int, sp: bool) -> float:
        """Features a token on one tp rank."""
        return self.width / (tp if sp or not self.stream else 1)


Operation = Matmul | Scores | Elementwise


@dataclass(frozen=True)
class BlockOperations:
    """The operations of a block, in the order of the forward pass."""

    operations: tuple[Operation, ...]

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        return tuple(operation for operation in self.operations if isinstance(operation, Matmul))

    def of(self, branch: str) -> list[Matmul]:
        return [matmul for matmul in self.matmuls if matmul.branch == branch]

    @cached_property
    def groups(self) -> tuple[tuple[Matmul, ...], ...]:
        """The matmuls, those together that read the same tensor."""
        return tuple(tuple(group) for _, group in groupby(self.matmuls, key=lambda matmul: matmul.reads))

    @cached_property
    def attention(self) -> Scores:
        return next(operation for operation in self.operations if isinstance(operation, Scores))

    @cached_property
    def elementwise(self) -> tuple[Elementwise, ...]:
        return tuple(operation for operation in self.operations if isinstance(operation, Elementwise))

    @cached_property
    def weights(self) -> int:
        """Elements of the matmuls' weights."""
        return sum(matmul.size for matmul in self.matmuls)

    @cached_property
    def active(self) -> int:
        """Elements of the weights that a token is multiplied with: of the experts' those that it visits."""
        return sum(matmul.active for matmul in self.matmuls)

    def gemms(self, tokens: int, apart: bool = False) -> list[tuple[int, int, int]]:
        """Rows, columns and inner dimension of the forward GEMMs; `apart`: none of them are joined."""
        if apart:
            return [(tokens, matmul.outputs, matmul.inputs) for matmul in self.matmuls]
        return [(tokens, sum(matmul.outputs for matmul in group), group[0].inputs) for group in self.groups]


@lru_cache(maxsize=4096)
def block(spec: "ModelSpec", tp: int = 1, dense: bool = False, window: int = 0) -> BlockOperations:
    """A block on one of `tp` ranks. Where these outnumber the kv heads, several ranks work with the same one.

    In a model with experts it is a block that has some, or (`dense`) one of the first that have none. `window` is that
    of its layer: layers differ in it, and in nothing but what their queries see.
    """
    return BlockOperations(tuple(_block(spec, tp, dense, window)))


def _block(spec: "ModelSpec", tp: int, dense: bool, window: int) -> Iterator[Operation]:
    hidden = spec.hidden
    yield Elementwise("norm", hidden, stream=True, name="attention_norm")
    attention = yield from (_latent if spec.mla else _heads)(spec, tp)
    yield attention._replace(window=window)
    yield Matmul("attention", "o", "attention", attention.seen, hidden, "rowwise", bias=spec.bias)
    yield from _residual(spec)
    yield Elementwise("norm", hidden, stream=True, name="mlp_norm")
    yield from _network(spec, "", spec.ffn, tp) if dense or spec.experts is None else _mixture(spec, tp)
    yield from _residual(spec)


def _heads(spec: "ModelSpec", tp: int) -> Generator[Operation, None, Scores]:
    """Queries, keys and values of the stream."""
    heads, kv_heads, dim = spec.heads // tp, max(1, spec.kv_heads // tp), spec.head_dim
    attention = Scores(heads, kv_heads, dim, dim, 2 * kv_heads * dim)
    bias = spec.bias or spec.qkv_bias
    yield Matmul("attention", "q", "attention_norm", spec.hidden, attention.width, "colwise", bias=bias)
    yield Matmul("attention", "k", "attention_norm", spec.hidden, attention.kv_width, "colwise_kv", bias=bias)
    yield Matmul("attention", "v", "attention_norm", spec.hidden, attention.kv_width, "colwise_kv", bias=bias)
    if spec.qk_norm:
        yield Elementwise("qk_norm", spec.heads * spec.head_dim, name="attention.q_norm")
        yield Elementwise("qk_norm", spec.kv_heads * spec.head_dim, name="attention.k_norm")
    if spec.positions == "rope":
        yield Elementwise("rope", (spec.heads + spec.kv_heads) * spec.rotary_dim)
    return attention


def _latent(spec: "ModelSpec", tp: int) -> Generator[Operation, None, Scores]:
    """MLA: the latents are the same on every tp rank, which makes its heads of them."""
    assert spec.mla is not None
    mla, heads = spec.mla, spec.heads // tp
    attention = Scores(heads, heads, mla.head_dim, mla.v_dim, mla.cached)
    if mla.q_rank:
        yield Matmul("attention", "q_down", "attention_norm", spec.hidden, mla.q_rank, "replicated")
    else:
        yield Matmul("attention", "q", "attention_norm", spec.hidden, attention.width, "colwise")
    yield Matmul("attention", "kv_down", "attention_norm", spec.hidden, mla.cached, "replicated")
    if mla.q_rank:
        yield Elementwise("norm", mla.q_rank, stream=True, name="attention.q_norm")
        yield Matmul("attention", "q_up", "q_latent", mla.q_rank, attention.width, "colwise")
    yield Elementwise("norm", mla.kv_rank, stream=True, name="attention.kv_norm")
    yield Matmul("attention", "kv_up", "kv_latent", mla.kv_rank, heads * (mla.nope_dim + mla.v_dim), "colwise")
    yield Elementwise("rope", (spec.heads + 1) * mla.rope_dim)
    return attention


def _network(spec: "ModelSpec", prefix: str, width: int, tp: int) -> Iterator[Operation]:
    """A dense feed-forward network."""
    hidden, ffn, gated = spec.hidden, width // tp, spec.activation.startswith("swiglu")
    if gated:
        yield Matmul("mlp", f"{prefix}gate", "mlp_norm", hidden, ffn, "colwise", bias=spec.bias)
    yield Matmul("mlp", f"{prefix}up", "mlp_norm", hidden, ffn, "colwise", bias=spec.bias)
    yield Elementwise("swiglu" if gated else "gelu", width)
    yield Matmul("mlp", f"{prefix}down", f"{prefix}activation", ffn, hidden, "rowwise", bias=spec.bias)


def _mixture(spec: "ModelSpec", tp: int) -> Iterator[Operation]:
    """A router, the experts that it chooses, and those that all tokens visit. tp divides the latter alone."""
    experts = spec.experts
    assert experts is not None
    each: dict[str, Any] = {"bias": spec.bias, "experts": experts.count, "chosen": experts.top_k}
    hidden = spec.hidden
    yield Matmul("mlp", "router", "widened mlp_norm", hidden, experts.count, "replicated_partial", bias=spec.bias)
    gated = spec.activation.startswith("swiglu")
    if gated:
        yield Matmul("mlp", "experts.gate", "dispatched", hidden, experts.ffn, "experts", **each)
    yield Matmul("mlp", "experts.up", "dispatched", hidden, experts.ffn, "experts", **each)
    yield Elementwise("swiglu" if gated else "gelu", experts.top_k * experts.ffn)
    yield Matmul("mlp", "experts.down", "activation", experts.ffn, hidden, "experts", **each)
    if experts.shared:
        yield from _network(spec, "shared.", experts.shared_ffn, tp)


def _residual(spec: "ModelSpec") -> Iterator[Operation]:
    if spec.dropout > 0:
        yield Elementwise("dropout", spec.hidden, stream=True)
    yield Elementwise("residual", spec.hidden, stream=True)


def head(spec: "ModelSpec", tp: int = 1) -> Matmul:
    """The matmul above the blocks, on the first tp rank: it has the most rows of the vocabulary.

    The embedding below the blocks is a look-up in a table of this shape.
    """
    return Matmul("head", "head", "norm", spec.hidden, -(-spec.vocab // tp), "colwise")
