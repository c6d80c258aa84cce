"""What a decoder computes for one token: the one inventory of operations.

    block(spec, tp=8).matmuls       # of one block on one tp rank, in the order of the forward pass
    head(spec, tp=8)                # the matmul above the blocks

`ModelSpec` makes its parameters of this list. The planner's times, FLOPs and bytes, the balance of pipeline stages, and
serving read it too. So another kind of block is a change here, and its kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from fivefold.spec.parameters import TensorRule

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec


class Matmul(NamedTuple):
    """A token's `inputs` features times the weight [outputs, inputs] of one tp rank."""

    branch: Literal["attention", "mlp", "head"]
    name: str  # of its module in the branch
    reads: str  # the tensor that it multiplies; matmuls that read the same one can be one kernel
    inputs: int
    outputs: int
    tp: TensorRule  # how tp divides the weight
    bias: bool = False  # whether a bias is added to its outputs

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs

    @property
    def writes_residual(self) -> bool:
        """Whether its outputs are added to the residual stream; all other matmuls read that stream, normed.

        The stream is whole on every tp rank; with sp, a rank has its tokens of it.
        """
        return self.tp == "columns"


class Attention(NamedTuple):
    """Scores and their product with the values, for the heads of one tp rank."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Features of the queries, and of the output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    def flops(self, keys: float) -> float:
        """Forward FLOPs of a query that sees so many keys; a causal mask leaves half of the sequence on average."""
        return 4 * keys * self.width


class Elementwise(NamedTuple):
    """An operation that is bound by memory, on `width` features of a token over all tp ranks."""

    kind: Literal["norm", "qk_norm", "rope", "swiglu", "gelu", "dropout", "residual"]
    width: int
    stream: bool = False  # features of the residual stream: only sp divides the work; tp divides all other work
    name: str = ""  # of its module in the block, where that has parameters

    def share(self, tp: int, sp: bool) -> float:
        """Features a token on one tp rank."""
        return self.width / (tp if sp or not self.stream else 1)


Operation = Matmul | Attention | Elementwise


@dataclass(frozen=True)
class Block:
    """The operations of a block, in the order of the forward pass."""

    operations: tuple[Operation, ...]

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        return tuple(one for one in self.operations if isinstance(one, Matmul))

    def of(self, branch: str) -> list[Matmul]:
        return [one for one in self.matmuls if one.branch == branch]

    @cached_property
    def groups(self) -> tuple[tuple[Matmul, ...], ...]:
        """The matmuls, those together that read the same tensor."""
        return tuple(tuple(group) for _, group in groupby(self.matmuls, key=lambda one: one.reads))

    @cached_property
    def attention(self) -> Attention:
        return next(one for one in self.operations if isinstance(one, Attention))

    @cached_property
    def elementwise(self) -> tuple[Elementwise, ...]:
        return tuple(one for one in self.operations if isinstance(one, Elementwise))

    @cached_property
    def weights(self) -> int:
        """Elements of the matmuls' weights."""
        return sum(one.size for one in self.matmuls)

    def gemms(self, tokens: int, apart: bool = False) -> list[tuple[int, int, int]]:
        """Rows, columns and inner dimension of the forward GEMMs; `apart`: none of them are joined."""
        if apart:
            return [(tokens, one.outputs, one.inputs) for one in self.matmuls]
        return [(tokens, sum(one.outputs for one in group), group[0].inputs) for group in self.groups]


@lru_cache(maxsize=4096)
def block(spec: "ModelSpec", tp: int = 1) -> Block:
    """A block on one of `tp` ranks. Where these outnumber the kv heads, several ranks work with the same one."""
    return Block(tuple(_block(spec, tp)))


def _block(spec: "ModelSpec", tp: int) -> Iterator[Operation]:
    hidden, ffn = spec.hidden, spec.ffn // tp
    attention = Attention(spec.heads // tp, max(1, spec.kv_heads // tp), spec.head_dim)
    every, qkv = spec.bias, spec.bias or spec.qkv_bias  # which linears have a bias
    yield Elementwise("norm", hidden, True, "attention_norm")
    yield Matmul("attention", "q", "attention_norm", hidden, attention.width, "rows", qkv)
    yield Matmul("attention", "k", "attention_norm", hidden, attention.kv_width, "kv rows", qkv)
    yield Matmul("attention", "v", "attention_norm", hidden, attention.kv_width, "kv rows", qkv)
    if spec.qk_norm:
        yield Elementwise("qk_norm", spec.heads * spec.head_dim, name="attention.q_norm")
        yield Elementwise("qk_norm", spec.kv_heads * spec.head_dim, name="attention.k_norm")
    if spec.positions == "rope":
        yield Elementwise("rope", (spec.heads + spec.kv_heads) * spec.head_dim)
    yield attention
    yield Matmul("attention", "o", "attention", attention.width, hidden, "columns", every)
    yield from _residual(spec)
    yield Elementwise("norm", hidden, True, "mlp_norm")
    gated = spec.activation == "swiglu"
    if gated:
        yield Matmul("mlp", "gate", "mlp_norm", hidden, ffn, "rows", every)
    yield Matmul("mlp", "up", "mlp_norm", hidden, ffn, "rows", every)
    yield Elementwise("swiglu" if gated else "gelu", spec.ffn)
    yield Matmul("mlp", "down", "activation", ffn, hidden, "columns", every)
    yield from _residual(spec)


def _residual(spec: "ModelSpec") -> Iterator[Operation]:
    if spec.dropout > 0:
        yield Elementwise("dropout", spec.hidden, True)
    yield Elementwise("residual", spec.hidden, True)


def head(spec: "ModelSpec", tp: int = 1) -> Matmul:
    """The matmul above the blocks, on the first tp rank: it has the most rows of the vocabulary.

    The embedding below the blocks is a look-up in a table of this shape.
    """
    return Matmul("head", "head", "norm", spec.hidden, -(-spec.vocab // tp), "rows")
