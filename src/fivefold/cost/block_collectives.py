"""The collectives of one block, in the order in which a microbatch meets them: one list, and all else is a fold of it.

    block = BlockCollectives(spec, layout, tokens=8192, compute_bytes=2, accum_bytes=4, layer=spec.kinds(0))
    [sent.kind for sent in block.forward()]          # of one microbatch; recomputed() and backward() likewise

`cost/traffic.py` adds up their bytes, `cost/block.py` and `cost/moe.py` their seconds, and the page shows them one by
one. `parallel/` does not read this list: `fivefold verify` counts what it sends, and holds the two against each other.

Letters: B sequences of a microbatch on one dp rank, S tokens of a sequence on one cp rank, E hidden, K the experts of
a token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fivefold.cost.collective_time import Kind
from fivefold.cost.routing import RoutedRows, RoutedTokens
from fivefold.layout.layout import ContextKind, Layout
from fivefold.layout.logit_slices import slices
from fivefold.spec.kinds import BlockKind
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, TensorGroups, block, tensor_groups
from fivefold.spec.pattern import Layer

When = Literal["forward", "backward", "once a step"]
_COUNT_BYTES = 8  # bytes of a number of tokens, or of an expert's number


_NO_ROWS = RoutedRows()


class Collective(NamedTuple):
    """`calls` collectives of `payload` bytes each, as `Traffic` counts them."""

    when: When
    what: str
    axis: str
    kind: Kind
    calls: int
    payload: int
    sent: int | None = None  # bytes of a call to other ranks, where these get unlike shares


@dataclass(frozen=True)
class BlockCollectives(RoutedTokens):
    """What one rank sends for one microbatch in one block. Axes of one rank are also listed; folds leave them out.

    Tensor parallelism is Megatron-LM's (arXiv 1909.08053, section 3; with sp 2205.05198, section 4.2), and carries
    BSE elements: the row-parallel linears (o, down) sum their outputs forward, the column-parallel groups (q, k, v;
    gate, up) their input gradients backward. With sp a sum leaves each rank its part of the sequence, and what a linear
    reads, forward or backward, is gathered first, the saved input of the column-parallel once more in backward. Latent
    attention gathers and sums latents instead (but for queries that have none), the former once. A backward pass in two
    halves sends the same: the half that needs the saved input, the weights', gathers it.
    """

    spec: ModelSpec
    layout: Layout
    tokens: int  # B S
    compute_bytes: int  # per element of what is computed with, in which activations travel
    accum_bytes: int  # per element of sums, in float32 at least
    layer: Layer  # the block's mixer and MLP
    rows: RoutedRows = _NO_ROWS
    balanced: int = 0  # sequences of a microbatch whose loads a balance loss reads; 0: there is none

    @property
    def moe(self) -> bool:
        """Whether the MLP is one of experts."""
        return self.layer.routed

    def forward(self) -> Iterator[Collective]:
        yield from self.mixer()
        if not self.moe:
            yield from self.mlp()
            return
        yield from self.dispatch()
        yield from self.mlp()
        yield from self.combine()

    def recomputed(self) -> Iterator[Collective]:
        """Forward's again, in backward; selective recompute keeps what its collectives made.

        It ends with the last thing that backward asks for, which is not the sum over a token's experts, unless
        something follows it. A shared expert does where nothing travels; where tokens do, it computes meanwhile.
        """
        if self.layout.recompute != "full":
            return
        left_out = list(self.combine()) if self.moe and not self._sums_again else []
        for sent in self.forward():
            if sent not in left_out or sent.kind == "all-to-all":
                yield sent._replace(when="backward", what=f"again: {sent.what}")

    def backward(self) -> Iterator[Collective]:
        if self.moe:
            yield from self.combine_back()
            yield from self.dispatch_back()
            yield from self.mlp_back()
            yield from self.slices_back()
        else:
            yield from self.mlp_back()
        yield from self.mixer_back()

    # ---- tensor parallelism ------------------------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """Bytes of BSE, the residual stream of a microbatch."""
        return self.tokens * self.spec.hidden * self.compute_bytes

    @cached_property
    def _operations(self) -> BlockOperations:
        """The operations of a tp rank."""
        return block(self.spec, self.layout.tp, self.layer)

    def _groups(self, kind: BlockKind | None) -> TensorGroups:
        """How tp divides a branch."""
        return tensor_groups(self._operations.of(kind.place)) if kind else TensorGroups()

    @property
    def _squares(self) -> int:
        """Bytes of a token's squares of q and of k, where their norms are over all heads."""
        normed = any(operation.kind == "qk_norm" for operation in self._operations.elementwise)
        return 2 * self.tokens * self.accum_bytes if normed and self.spec.qk_norm_over == "all" else 0

    @property
    def _mlp(self) -> str:
        """What every token visits after the mixer."""
        return "the shared expert" if self.moe else "the MLP"

    def mixer(self) -> Iterator[Collective]:
        if not self.layer.attends:
            yield from self._divided(self.layer.mixer, "the mixer")
            return
        yield from self._divided(self.layer.mixer, "q, k and v", "attention's output, summed over heads")

    def mixer_back(self) -> Iterator[Collective]:
        if not self.layer.attends:
            yield from self._divided_back(self.layer.mixer, "the mixer")
            return
        yield from self._divided_back(self.layer.mixer, "q, k and v", "attention's output")

    def mlp(self) -> Iterator[Collective]:
        return self._divided(self.layer.mlp, self._mlp)

    def mlp_back(self) -> Iterator[Collective]:
        return self._divided_back(self.layer.mlp, self._mlp)

    def _divided(self, kind: BlockKind | None, name: str, output: str = "") -> Iterator[Collective]:
        """Before the column-parallel groups of a branch, and after its row-parallel linears."""
        groups = self._groups(kind)
        for group in groups.columns:
            yield from self._gather("forward", f"hidden states for {name}", self._bytes(group[0].inputs))
        if groups.ups:
            yield from self._gather("forward", "latents for all heads", self._bytes(groups.latents))
        yield from self._between(kind, "forward")
        for matmul in groups.rows:
            yield self._sum("forward", output or f"output of {name}, summed", self._bytes(matmul.outputs))

    def _divided_back(self, kind: BlockKind | None, name: str, output: str = "") -> Iterator[Collective]:
        groups = self._groups(kind)
        for matmul in reversed(groups.rows):
            read = f"gradients of {output or f'the output of {name}'}"
            yield from self._gather("backward", read, self._bytes(matmul.outputs))
        yield from self._between(kind, "backward")
        for group in reversed(groups.columns):
            payload = self._bytes(group[0].inputs)
            yield from self._gather("backward", f"saved input of {name}", payload)
            yield self._sum("backward", f"gradients of the input of {name}, summed", payload)
        if groups.ups:
            yield self._sum("backward", "gradients of latents, summed", self._bytes(groups.latents))

    def _between(self, kind: BlockKind | None, when: Literal["forward", "backward"]) -> Iterator[Collective]:
        """What attention sends: of the norms of q and k, and over cp."""
        if kind is not self.layer.mixer or not self.layer.attends:
            return
        sent = list(self._context(when))
        if self._squares:
            what = "squares of q and k, for their norms" if when == "forward" else "gradients of the squares of q and k"
            squares = self._tp(when, what, "all-reduce", self._squares)
            sent.insert(0 if when == "forward" else len(sent), squares)
        yield from sent

    def _bytes(self, features: int) -> int:
        """Of so many features of a microbatch's tokens."""
        return self.tokens * features * self.compute_bytes

    def _tp(self, when: When, what: str, kind: Kind, payload: int) -> Collective:
        return Collective(when, what, "tp", kind, 1, payload)

    def _sum(self, when: When, what: str, payload: int | None = None) -> Collective:
        kind: Kind = "reduce-scatter" if self.layout.sp else "all-reduce"
        return self._tp(when, what, kind, self.states if payload is None else payload)

    def _gather(self, when: When, what: str, payload: int | None = None) -> Iterator[Collective]:
        if self.layout.sp:
            yield self._tp(when, what, "all-gather", self.states if payload is None else payload)

    # ---- embedding and head ------------------------------------------------------------------------------------------

    def embedding(self) -> Iterator[Collective]:
        """The embedding sums like a row-parallel linear. Neither it nor the head is recomputed."""
        yield self._sum("forward", "embeddings, summed over parts of the vocabulary")
        yield from self._gather("backward", "gradients of embeddings")

    def head(self) -> Iterator[Collective]:
        """The head reads like a column-parallel linear, forward and backward in one."""
        yield from self._gather("forward", "hidden states for the head")
        yield self._sum("backward", "gradients of the head's input, summed")

    def loss(self, loss_sums: int) -> Iterator[Collective]:
        """The loss, a slice of the tokens at a time: the largest sum of exponentials of each; then all of them and
        `loss_sums` sums over the words: of cross-entropy the target's logit, and for label smoothing all logits."""
        for part in slices(self.tokens, -(-self.spec.vocab // self.layout.tp)):
            yield self._tp("forward", "largest logits", "all-reduce", len(part) * self.accum_bytes)
            sums = (1 + loss_sums) * len(part) * self.accum_bytes
            yield self._tp("forward", "sums of exponentials and logits of targets", "all-reduce", sums)

    # ---- context parallelism -----------------------------------------------------------------------------------------

    def _context(self, when: Literal["forward", "backward"]) -> Iterator[Collective]:
        layout, scores = self.layout, self._operations.attention
        if layout.cp > 1:
            head = self.tokens * scores.head_dim
            sizes = (head, scores.heads, scores.kv_heads, self.compute_bytes, self.accum_bytes)
            yield from context(layout.cp_kind, layout.cp, *sizes)[when]

    # ---- experts -----------------------------------------------------------------------------------------------------
    # All-to-all: first the counts of X int64; then a row of E elements for each of a token's K experts, to their rank,
    # and what came of it back. All-gather: every rank of ep gets all tokens, their weights and choices, and sums go
    # back. Backward sends the same the other way around. Where tp does not divide the sequence (no sp) each of its
    # ranks routes a slice of the tokens, and the slices are gathered afterwards, each as long as the first.

    @property
    def _sums_again(self) -> bool:
        return bool(self.spec.dropout or (self.experts.shared and self.layout.ep == 1))

    @property
    def _gathered(self) -> tuple[int, int]:
        """Elements of all ranks' tokens; and their choices."""
        tokens = self.layout.ep * self.routed
        return tokens * self.spec.hidden, tokens * self.experts.top_k

    def _ep(self, when: When, what: str, kind: Kind, payload: int) -> Collective:
        return Collective(when, what, "ep", kind, 1, payload)

    def _rows(self, when: When, what: str, going: int) -> Collective:
        """An all-to-all of rows; this rank sends `going` of them. The payload is the larger side."""
        row = self.spec.hidden * self.compute_bytes
        return self._ep(when, what, "all-to-all", max(self.rows) * row)._replace(sent=(going - self.rows.kept) * row)

    def _gather_slices(self, when: When, what: str) -> Iterator[Collective]:
        if not self.layout.sp:
            payload = self.layout.tp * self.routed * self.spec.hidden * self.compute_bytes
            yield self._tp(when, what, "all-gather", payload)

    def slices_back(self) -> Iterator[Collective]:
        return self._gather_slices("backward", "gradients of all tokens")

    def counts(self) -> Iterator[Collective]:
        """What goes before any token, and is waited for."""
        experts = self.experts.count
        if self.balanced:  # how often the tokens of each sequence chose each expert
            loads = self.balanced * experts * _COUNT_BYTES
            yield Collective("forward", "loads of experts, for their balance", "cp_tp", "all-reduce", 1, loads)
        if self.layout.dispatch == "alltoall":
            yield self._ep("forward", "how many tokens go to each expert", "all-to-all", experts * _COUNT_BYTES)

    def dispatch(self) -> Iterator[Collective]:
        yield from self.counts()
        yield from self.tokens_to_experts()

    def tokens_to_experts(self) -> Iterator[Collective]:
        if self.layout.dispatch == "alltoall":
            yield self._rows("forward", "tokens, to their experts", self.rows.sent)
            return
        tokens, choices = self._gathered
        yield self._ep("forward", "all ranks' tokens", "all-gather", tokens * self.compute_bytes)
        yield self._ep("forward", "their weights", "all-gather", choices * self.accum_bytes)
        yield self._ep("forward", "their choices", "all-gather", choices * _COUNT_BYTES)

    def combine(self) -> Iterator[Collective]:
        if self.layout.dispatch == "alltoall":
            yield self._rows("forward", "outputs of experts, back", self.rows.received)
        else:
            yield self._ep(
                "forward", "outputs of experts, summed", "reduce-scatter", self._gathered[0] * self.accum_bytes
            )
        yield from self._gather_slices("forward", "all tokens of the sequence")

    def combine_back(self) -> Iterator[Collective]:
        if self.layout.dispatch == "alltoall":
            yield self._rows("backward", "gradients, to the experts", self.rows.sent)
        else:
            yield self._ep("backward", "all ranks' gradients", "all-gather", self._gathered[0] * self.accum_bytes)

    def dispatch_back(self) -> Iterator[Collective]:
        if self.layout.dispatch == "alltoall":
            yield self._rows("backward", "gradients of tokens, back", self.rows.received)
            return
        tokens, choices = self._gathered
        yield self._ep("backward", "gradients of tokens, summed", "reduce-scatter", tokens * self.accum_bytes)
        yield self._ep("backward", "gradients of their weights, summed", "reduce-scatter", choices * self.accum_bytes)


def context(
    kind: ContextKind, ranks: int, head: int, heads: int, kv_heads: int, compute_bytes: int, accum_bytes: int
) -> dict[Literal["forward", "backward"], list[Collective]]:
    """Keys and values round the ring, gathered, or traded for heads (`parallel/context.py` says how each works). `head`
    are the elements of one head of a rank's tokens, heads are those of a tp rank."""

    def cp(when: When, what: str, kind: Kind, calls: int, payload: int) -> Collective:
        return Collective(when, what, "cp", kind, calls, payload)

    pair = 2 * head * kv_heads  # keys and values
    if kind == "ring":
        # Round once in each forward and once in backward; their gradient follows, and travels one step further, home.
        keys, gradients = pair * compute_bytes, pair * accum_bytes
        return {
            "forward": [cp("forward", "keys and values, round the ring", "send", ranks - 1, keys)],
            "backward": [
                cp("backward", "keys and values, round the ring", "send", ranks - 1, keys),
                cp("backward", "their gradients, round it and home", "send", ranks, gradients),
            ],
        }
    if kind == "allgather":
        keys, gradients = ranks * pair * compute_bytes, ranks * pair * accum_bytes
        return {
            "forward": [cp("forward", "all ranks' keys and values", "all-gather", 1, keys)],
            "backward": [
                cp("backward", "all ranks' keys and values", "all-gather", 1, keys),
                cp("backward", "their gradients, summed", "reduce-scatter", 1, gradients),
            ],
        }
    # Queries, keys and values one way, outputs the other; kv heads are repeated until the ranks divide them.
    there, back = head * (heads + 2 * math.lcm(kv_heads, ranks)) * compute_bytes, head * heads * compute_bytes
    return {
        "forward": [
            cp("forward", "q, k and v: tokens for heads", "all-to-all", 1, there),
            cp("forward", "outputs: heads for tokens", "all-to-all", 1, back),
        ],
        "backward": [
            cp("backward", "gradients of outputs: tokens for heads", "all-to-all", 1, back),
            cp("backward", "gradients of q, k and v: heads for tokens", "all-to-all", 1, there),
        ],
    }
