"""The collectives of one layer in the order in which a microbatch meets them: forward, backward, and once a step.

for sent in in_order(spec, layout, seq=8192, batch=2048, dtype="bfloat16", layer=17):
    sent.when, sent.what, sent.axis, sent.kind, sent.calls, sent.payload

`traffic.py` has what each of them carries, summed over a step; here is which follows which, as `parallel/` sends them.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

from fivefold.layout.buckets import MINIMUM
from fivefold.layout.collective_cost import Kind
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.plan.cost.traffic import LayerBytes, of_layer
from fivefold.spec.model import ModelSpec

When = Literal["forward", "backward", "once a step"]


class Sent(NamedTuple):
    """`calls` collectives of `payload` bytes each, as `Traffic` counts them."""

    when: When
    what: str
    axis: str
    kind: Kind
    calls: int
    payload: int


def in_order(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, dtype: str, layer: int, minimum: int = MINIMUM
) -> list[Sent]:
    """What is sent for a layer by one rank that has it: for one microbatch, and once a step for all."""
    one = _Layer(spec, layout, layer, of_layer(spec, layout, seq, batch, dtype, layer, minimum))
    stage = next(stage for stage in stages_of(spec, layout, seq) if layer in stage.layers)
    sent = [*one.weights("forward"), *one.forward("forward")]
    if layer == stage.layers[-1] and not stage.last:
        sent.append(Sent("forward", "the stage's output, to the next", "pp", "send", 1, one.bytes.message))
    sent += one.weights("backward")
    if layout.recompute == "full":
        sent += [again._replace(what=f"again: {again.what}") for again in one.forward("backward", again=True)]
    sent += [*one.backward(), *one.gradients()]
    if layer == stage.layers[0] and not stage.first:
        sent.append(Sent("backward", "its gradient, to the stage before", "pp", "send", 1, one.bytes.message))
    sent += one.step_end()
    return [part for part in sent if part.calls and part.payload and layout.size(part.axis) > 1]


class _Layer(NamedTuple):
    spec: ModelSpec
    layout: Layout
    layer: int
    bytes: LayerBytes

    @property
    def sums(self) -> Kind:
        return "reduce-scatter" if self.layout.sp else "all-reduce"

    @property
    def mixture(self) -> bool:
        return self.spec.experts is not None and not self.spec.dense(self.layer)

    @property
    def reads_stream(self) -> bool:
        """Whether queries, keys and values come from the stream, and not all from latents."""
        return not (self.spec.mla and self.spec.mla.q_rank)

    def _tp(self, when: When, what: str, kind: Kind, payload: int) -> Sent:
        return Sent(when, what, "tp", kind, 1, payload)

    # ---- passes ----------------------------------------------------------------------------------------------------

    def forward(self, when: When, again: bool = False) -> Iterator[Sent]:
        """`again`: as recomputation runs it."""
        carried, sp = self.bytes, self.layout.sp
        if sp and self.reads_stream:
            yield self._tp(when, "tokens, for q, k and v", "all-gather", carried.states)
        if sp:
            yield self._tp(when, "latents, for all heads", "all-gather", carried.latents)
        yield self._tp(when, "squares of q and k", "all-reduce", carried.squares)
        yield from self._attention(when)
        yield self._tp(when, "the sum of what heads said", self.sums, carried.states)
        if self.mixture:
            yield from self._experts(when, again)
        else:
            yield from self._network(when, "the network")

    def _network(self, when: When, name: str) -> Iterator[Sent]:
        if self.layout.sp:
            yield self._tp(when, f"tokens, for {name}", "all-gather", self.bytes.states)
        yield self._tp(when, f"the sum of what {name} said", self.sums, self.bytes.states)

    def backward(self) -> Iterator[Sent]:
        carried, sp = self.bytes, self.layout.sp
        if self.mixture:
            yield from self._experts_back()
        else:
            yield from self._network_back("the network")
        if sp:
            yield self._tp("backward", "gradients, for the heads", "all-gather", carried.states)
        yield from self._attention_back()
        yield self._tp("backward", "squares of q and k", "all-reduce", carried.squares)
        if self.reads_stream:
            if sp:
                yield self._tp("backward", "the saved tokens of q, k and v", "all-gather", carried.states)
            yield self._tp("backward", "the sum of gradients of q, k and v", self.sums, carried.states)
        yield self._tp("backward", "the sum of gradients of latents", self.sums, carried.latents)

    def _network_back(self, name: str) -> Iterator[Sent]:
        if self.layout.sp:
            yield self._tp("backward", f"gradients, for {name}", "all-gather", self.bytes.states)
            yield self._tp("backward", f"the saved tokens of {name}", "all-gather", self.bytes.states)
        yield self._tp("backward", f"the sum of gradients of {name}", self.sums, self.bytes.states)

    # ---- context ---------------------------------------------------------------------------------------------------

    def _attention(self, when: When) -> Iterator[Sent]:
        if self.layout.cp == 1:
            return
        (axis, kind, _, payload), (_, _, _, other) = self.bytes.context
        match self.layout.cp_kind:
            case "ring":
                yield Sent(when, "keys and values, round the ring", axis, kind, self.layout.cp - 1, payload)
            case "allgather":
                yield Sent(when, "everybody's keys and values", axis, kind, 1, payload)
            case _:
                yield Sent(when, "queries, keys and values for heads", axis, kind, 1, payload)
                yield Sent(when, "heads for tokens", axis, kind, 1, other)

    def _attention_back(self) -> Iterator[Sent]:
        if self.layout.cp == 1:
            return
        (axis, kind, _, payload), (_, summed, _, other) = self.bytes.context
        match self.layout.cp_kind:
            case "ring":
                yield Sent("backward", "keys and values, round the ring", axis, kind, self.layout.cp - 1, payload)
                yield Sent("backward", "their gradients, round it and home", axis, summed, self.layout.cp, other)
            case "allgather":
                yield Sent("backward", "everybody's keys and values", axis, kind, 1, payload)
                yield Sent("backward", "the sum of their gradients", axis, summed, 1, other)
            case _:
                yield Sent("backward", "gradients for heads", axis, kind, 1, other)
                yield Sent("backward", "gradients for tokens", axis, kind, 1, payload)

    # ---- experts ---------------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> bool:
        return self.spec.experts is not None and self.spec.experts.shared > 0

    def _said(self) -> list[int]:
        """Bytes of each of the messages of experts, in the order of `dispatched`."""
        return [payload for axis, _, _, payload in self.bytes.experts if axis == "ep"]

    def _own_tokens(self) -> tuple[int, int]:
        """Without sp every tp rank routes its part of the tokens: calls and bytes of bringing them together."""
        found = [sent for sent in self.bytes.experts if sent[0] == "tp"]
        return (found[0][2], found[0][3]) if found else (0, 0)

    def _experts(self, when: When, again: bool) -> Iterator[Sent]:
        said, (gathers, tokens) = self._said(), self._own_tokens()
        if self.layout.dispatch == "alltoall":
            counts, rows = said
            yield Sent(when, "how many tokens go to each expert", "ep", "all-to-all", 1, counts)
            yield Sent(when, "tokens, to their experts", "ep", "all-to-all", 1, rows)
        else:
            for what, payload in zip(("everybody's tokens", "their weights", "their choices"), said, strict=False):
                yield Sent(when, what, "ep", "all-gather", 1, payload)
        if self._shared:
            yield from self._network(when, "the shared expert")
        if self.layout.dispatch == "alltoall":
            yield Sent(when, "what experts said, home", "ep", "all-to-all", 1, rows)
        elif not again or self._whole:
            yield Sent(when, "the sum of what experts said", "ep", "reduce-scatter", 1, said[3])
        if not again or gathers > 2:
            yield Sent(when, "all tokens of the sequence", "tp", "all-gather", 1, tokens)

    @property
    def _whole(self) -> bool:
        """Whether a recomputation runs to the sum over slots."""
        return next(calls for _, kind, calls, _ in self.bytes.experts if kind == "reduce-scatter") > 1

    def _experts_back(self) -> Iterator[Sent]:
        said, (_, tokens) = self._said(), self._own_tokens()
        if self.layout.dispatch == "alltoall":
            yield Sent("backward", "gradients, to the experts", "ep", "all-to-all", 1, said[1])
            yield Sent("backward", "gradients of tokens, home", "ep", "all-to-all", 1, said[1])
        else:
            yield Sent("backward", "everybody's gradients", "ep", "all-gather", 1, said[6])
            yield Sent("backward", "the sum of gradients of tokens", "ep", "reduce-scatter", 1, said[4])
            yield Sent("backward", "the sum of gradients of weights", "ep", "reduce-scatter", 1, said[5])
        if self._shared:
            yield from self._network_back("the shared expert")
        yield Sent("backward", "gradients of all tokens", "tp", "all-gather", 1, tokens)

    # ---- parameters ------------------------------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        return self.layout.fully_shards(self.spec)

    def weights(self, when: When) -> Iterator[Sent]:
        """ZeRO 3 gathers them for either pass."""
        if self._sharded:
            for axis, kind, _, payload in self.bytes.parameters:
                if kind == "all-gather":
                    yield Sent(when, f"weights of {self._of(axis)}", axis, kind, 1, payload)

    def gradients(self) -> Iterator[Sent]:
        """What ZeRO 3 and 2 sum in every microbatch, and ZeRO 3 before that over tp."""
        yield from self._summed("backward", (sent for sent in self.bytes.parameters if self._often(sent)))

    def step_end(self) -> Iterator[Sent]:
        """Sums over what is left, and the new weights. A sum starts while the last backward passes run."""
        late = [sent for sent in self.bytes.parameters if not self._often(sent)]
        yield from self._summed("once a step", (sent for sent in late if sent[1] != "all-gather"))
        if not self._sharded:
            for axis, kind, calls, payload in late:
                if kind == "all-gather":
                    yield Sent("once a step", f"new weights of {self._of(axis)}", axis, kind, calls, payload)

    def _often(self, sent: tuple[str, Kind, int, int]) -> bool:
        """Whether it is sent in every microbatch."""
        axis, kind, calls, _ = sent
        if kind == "reduce-scatter":
            return self._sharded or self.layout.zero == 2
        return self._sharded and axis == "tp" and calls == self.layout.microbatches

    def _summed(self, when: When, sent: Iterator[tuple[str, Kind, int, int]]) -> Iterator[Sent]:
        """Parameter by parameter over tp is one line."""
        for (axis, kind), group in groupby((one for one in sent if one[2]), key=lambda one: one[:2]):
            payloads = [payload for _, _, _, payload in group]
            for payload in sorted(set(payloads)):
                yield Sent(when, f"gradients of {self._of(axis)}", axis, kind, payloads.count(payload), payload)

    def _of(self, axis: str) -> str:
        if axis == "tp":
            return "what tp ranks share"
        return "its experts" if axis == "ezero" else "the layer"
