"""The operations that a decoder computes for one token, listed once.

    block(spec, tp=8).matmuls       # of one block on one tp rank, in the order of the forward pass
    head(spec, tp=8)                # the matmul above the blocks

Each kind of block lists its own (`kinds.py`). Parameters are derived from the list, and the planner's times, FLOPs and
bytes, the balance of pipeline stages, and serving read it too.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from fivefold.support.plugin_calls import WANTED_AMOUNT, ask, each, value_text

if TYPE_CHECKING:
    from fivefold.spec.model import ModelSpec
    from fivefold.spec.pattern import Layer


# ---- parameters -----------------------------------------------------------------------------------------------------
# Parameter: a tensor of the model, with the metadata that every package reads; nothing else parses parameter names.


# A filter is a weight of few numbers for each feature, such as that of a depthwise convolution: it is drawn as a linear
# is, it does not decay, and no schedule puts its gradient off.
Kind = Literal["embedding", "linear", "filter", "norm", "bias"]

# How the tp axis divides a parameter, in the field's words: "colwise" is column-parallel, each rank with rows of the
# stored [outputs, inputs]; "rowwise" is row-parallel. "colwise_kv": by whole kv heads; where ranks outnumber these
# heads, every rank holds all of it and uses one head. "per_head": every rank holds all of it and applies it to its own
# heads only. "replicated_partial": the same, and to its own tokens only. "experts": tp does not divide it; ep does, by
# whole experts.
TensorRule = Literal["colwise", "colwise_kv", "rowwise", "per_head", "replicated_partial", "replicated", "experts"]

# A unit is a part of the decoder: a layer, by its index; the embeddings below the layers; the norm and head above them.
# Forward runs the units in ascending order, backward finishes them in descending order.
EMBEDDING_UNIT, HEAD_UNIT = -1, 1 << 30


class Initial(NamedTuple):
    """How a parameter is drawn that is neither a zero-mean normal nor of ones or zeros.

    Initial("uniform", 1.0, 16.0, "log")                          # Mamba's A_log
    Initial("log_uniform", 0.001, 0.1, "softplus_inverse")        # and its dt_bias
    """

    distribution: Literal["constant", "uniform", "log_uniform"]  # the last: its logarithm is uniform
    low: float
    high: float = 0.0  # a constant has none
    # What is done to a number that was drawn: its logarithm, or the inverse of softplus.
    through: Literal["", "log", "softplus_inverse"] = ""

    @property
    def problem(self) -> str:
        """What is wrong with its numbers; empty: nothing."""
        hints = get_type_hints(Initial)
        for name in ("distribution", "through"):
            if (value := getattr(self, name)) not in get_args(hints[name]):
                return f"{name}={value!r}, and known are {', '.join(filter(None, get_args(hints[name])))}"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"low={self.low}, high={self.high}, which are no numbers"
        if self.distribution != "constant" and not self.low < self.high:
            return f"low={self.low}, high={self.high}; low must be less"
        if self.low <= 0 and (self.distribution == "log_uniform" or self.through):
            return f"low={self.low}, which has no logarithm; it must be positive"
        return ""


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
    # error is the same for all tokens, while the error of activations averages out.
    full_precision: bool = False
    std: float = 0.0  # of its initial values; 0: the model's
    init: Initial | None = None  # None: ones of a norm, zeros of a bias, normals of `std` of all others

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The index of its layer; None for embeddings, and for the norm and head above the layers."""
        return self.unit if EMBEDDING_UNIT < self.unit < HEAD_UNIT else None

    @property
    def row_dim(self) -> int:
        return len(self.shape) - (1 if self.kind in ("norm", "bias") else 2)

    @property
    def deferred(self) -> bool:
        """Whether a schedule that splits backward computes its gradient in a separate pass (W)."""
        # A router's is small, and is computed with its input's. The head's is computed with the loss: if deferred, it
        # would only be held, as large as the head for each microbatch.
        return self.kind == "linear" and self.tp != "replicated_partial" and self.layer is not None


# ---- operations -----------------------------------------------------------------------------------------------------


class Matmul(NamedTuple):
    """A token's `inputs` features times the weight [outputs, inputs] of one tp rank, or of each of several experts."""

    branch: str  # of the block: attention, mlp, or the place of another kind; or the head
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
    def dense(self) -> bool:
        """Whether every token visits it: it is neither an expert's nor the router's."""
        return not self.experts and self.tp != "replicated_partial"

    @property
    def writes_residual(self) -> bool:
        """Whether its outputs are added to the residual stream.

        The stream is whole on every tp rank; with sp, a rank has its tokens of it.
        """
        return self.tp == "rowwise" or self.name == "experts.down"

    @property
    def reads_residual(self) -> bool:
        """Whether its inputs are the residual stream, normed."""
        return self.reads in (f"{self.branch}_norm", "norm")

    @property
    def whole(self) -> bool:
        """Whether every tp rank has all of its outputs; with sp, for its own tokens."""
        return self.writes_residual or self.tp == "replicated"


class Scores(NamedTuple):
    """Scores and their product with the values, for the heads of one tp rank."""

    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; values are padded to it, where theirs is less
    v_dim: int
    window: int = 0  # the most keys that a query sees; 0: all before it
    sinks: bool = False  # a learned logit of each head beside its scores

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


class Cache(NamedTuple):
    """How many numbers a layer keeps of a sequence on one tp rank, so that it can go on with the next token alone."""

    token: int = 0  # for each token
    window: int = 0  # of so many last tokens at most; 0: of all
    sequence: int = 0  # however many tokens there were

    def numbers(self, tokens: float) -> float:
        """After so many tokens."""
        return self.sequence + self.token * (min(tokens, self.window) if self.window else tokens)


class Elementwise(NamedTuple):
    """An operation that is bound by memory, on `width` features of a token over all tp ranks.

    The kind "other" states its cost here; the cost of the rest depends on the software (cost/software.py).
    """

    kind: Literal["norm", "qk_norm", "rope", "swiglu", "gelu", "dropout", "residual", "other"]
    width: int
    stream: bool = False  # features of the residual stream: only sp divides the work; tp divides all other work
    name: str = ""  # of its module in the block, where that has parameters
    weights: int = 0  # "other": numbers of its weight for each feature; 0: it has none
    std: float = 0.0  # of that weight's initial values; 0: the model's
    flops: float = 0.0  # forward, for each feature
    moved: tuple[float, float] = (0.0, 0.0)  # bytes that each feature moves, forward and backward, of 2-byte numbers
    saved: float = 0.0  # numbers for each feature that backward reads; selective recompute makes them again

    def features_per_rank(self, tp: int, sp: bool) -> float:
        """Features of a token on one tp rank, or of its part of the tokens under sp."""
        return self.width / (tp if sp or not self.stream else 1)


Operation = Matmul | Scores | Elementwise
NO_SCORES = Scores(0, 0, 0, 0)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def odd_record(found: Any, *kinds: type) -> str:
    """What is odd about what should be one of these named tuples: its type, or one of its values. All numbers in them
    are counts and amounts."""
    if not isinstance(found, kinds) or not isinstance(found, tuple):
        return value_text(found)
    for (name, wanted), value in zip(_hints(type(found)).items(), found, strict=True):
        try:
            msgspec.convert(value, wanted)
            amounts = [one for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, int | float)]
            odd = (
                "" if isinstance(value, Initial) or all(0 <= one < math.inf for one in amounts) else WANTED_AMOUNT.words
            )
        except msgspec.ValidationError as error:
            odd = f"known: {', '.join(get_args(wanted))}" if get_origin(wanted) is Literal else str(error)
        if odd:
            return f"{type(found).__name__}({getattr(found, 'name', '')!r}) with {name}={value_text(value)} ({odd})"
    return ""


def _odd_operation(found: object) -> str:
    return odd_record(found, Matmul, Scores, Elementwise)


WANTED_OPERATIONS = each(
    "fivefold.spec.operations (Matmul, Scores, Elementwise), in a list or by yield", _odd_operation
)


# ---- what tp makes of a branch ---------------------------------------------------------------------------------------
# The ops of a module (`model/ops.py`) know four kinds of linear. `column_parallel` reads a tensor that every rank has
# whole, and writes this rank's columns; `row_parallel` reads these, and sums. `replicated_linear` computes the same on
# every rank, of its own tokens under sp; what it writes are latents, which `gather_latents` brings together and
# `latent_up_projection` reads. What is described otherwise no module can compute under tp: `group_problems` says so.

Group = tuple[Matmul, ...]  # matmuls that read the same tensor in one step
COLUMN_SPLITS = ("colwise", "colwise_kv")


class TensorGroups(NamedTuple):
    """The matmuls of a branch, but for experts and their router, which tp does not divide."""

    columns: tuple[Group, ...] = ()  # column-parallel, of what is whole on every rank
    replicated: Group = ()
    ups: tuple[Group, ...] = ()  # column-parallel, of latents
    rows: Group = ()  # row-parallel

    @property
    def latents(self) -> int:
        """Features of the latents that are gathered: all that the replicated linears before `ups` write."""
        return sum(matmul.outputs for matmul in self.replicated) if self.ups else 0

    @property
    def unread(self) -> int:
        """Those of them that no linear reads, such as a key of positions."""
        return self.latents - sum(group[0].inputs for group in self.ups)


def tensor_groups(matmuls: Iterable[Matmul]) -> TensorGroups:
    dense = [matmul for matmul in matmuls if matmul.dense]
    columns: list[Group] = []
    ups: list[Group] = []
    wide = (matmul for matmul in dense if matmul.tp in COLUMN_SPLITS)
    for _, group in groupby(wide, key=lambda matmul: matmul.reads):
        step = tuple(group)
        earlier = dense[: dense.index(step[0])]
        latent = not step[0].reads_residual and any(matmul.tp == "replicated" for matmul in earlier)
        (ups if latent else columns).append(step)
    replicated, rows = (tuple(matmul for matmul in dense if matmul.tp == rule) for rule in ("replicated", "rowwise"))
    return TensorGroups(tuple(columns), replicated, tuple(ups), rows)


def group_problems(matmuls: Iterable[Matmul]) -> Iterator[str]:
    """What tp could not compute of a branch, in a sentence each."""
    divided = whole = False  # whether there are a rank's columns to read, and a tensor beside the stream that is whole
    open_ = False  # whether no sum has followed these columns
    for matmul in matmuls:
        name, reads = f"{matmul.branch}.{matmul.name}", f"reads {matmul.reads}"
        if not matmul.dense or matmul.tp == "experts":
            continue  # of a mixture of experts
        if matmul.tp == "rowwise":
            if matmul.reads_residual or not divided:
                yield f"{name} is rowwise and {reads}, of which every rank has all; make it colwise or replicated"
            open_, whole = False, True
            continue
        if matmul.tp not in (*COLUMN_SPLITS, "replicated"):
            yield f"{name} is {matmul.tp}, and a linear is colwise, rowwise or replicated"
        elif not (matmul.reads_residual or whole):
            norm = f"{matmul.branch}_norm"
            yield (
                f"{name} is {matmul.tp} and {reads}, of which a rank has its columns; make it rowwise, or let it "
                f"read {norm} or what a replicated linear before it writes"
            )
        if matmul.tp in COLUMN_SPLITS:
            divided = open_ = True
        whole = whole or matmul.tp == "replicated"
    if open_:
        yield "its last linear is colwise, and the stream needs the sum of a rowwise one"


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
    def attending(self) -> TensorGroups:
        """How tp divides the branch of the scores."""
        branch = ""
        for operation in self.operations:
            if isinstance(operation, Scores):
                return tensor_groups(self.of(branch))
            branch = operation.branch if isinstance(operation, Matmul) else branch
        return TensorGroups()

    @property
    def latent(self) -> bool:
        """Whether heads are made of latents, which all tp ranks have."""
        return bool(self.attending.ups)

    @cached_property
    def attention(self) -> Scores:
        """Scores of no heads where the block has no attention."""
        return next((operation for operation in self.operations if isinstance(operation, Scores)), NO_SCORES)

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

    def rest(self, keys: float) -> float:
        """Forward FLOPs of a token that has so many keys before it, without the matmuls."""
        return self.attention.flops(keys) + sum(other.width * other.flops for other in self.elementwise)

    def gemms(self, tokens: int, apart: bool = False) -> list[tuple[int, int, int]]:
        """Rows, columns and inner dimension of the forward GEMMs; `apart`: none of them are joined."""
        if apart:
            return [(tokens, matmul.outputs, matmul.inputs) for matmul in self.matmuls]
        return [(tokens, sum(matmul.outputs for matmul in group), group[0].inputs) for group in self.groups]


@lru_cache(maxsize=4096)
def block(spec: "ModelSpec", tp: int = 1, layer: "Layer | None" = None) -> BlockOperations:
    """A block of the kinds of `layer` (the model's last, unless it is said) on one of `tp` ranks. Where these outnumber
    the kv heads, several ranks work with the same one."""
    return BlockOperations(tuple(_block(spec, tp, layer or spec.kinds(spec.layers - 1))))


def _block(spec: "ModelSpec", tp: int, layer: "Layer") -> Iterator[Operation]:
    for kind in layer.branches:
        yield Elementwise("norm", spec.hidden, stream=True, name=f"{kind.place}_norm")
        yield from ask(kind, "operations", spec, tp, wanted=WANTED_OPERATIONS)
        if spec.dropout > 0:
            yield Elementwise("dropout", spec.hidden, stream=True)
        yield Elementwise("residual", spec.hidden, stream=True)


def head(spec: "ModelSpec", tp: int = 1) -> Matmul:
    """The matmul above the blocks, on the first tp rank: it has the most rows of the vocabulary.

    The embedding below the blocks is a look-up in a table of this shape.
    """
    return Matmul("head", "head", "norm", spec.hidden, -(-spec.vocab // tp), "colwise")
