"""FLOPs that a rank executes in a step: recomputation, padding and what every tp rank does alike are among them."""

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk
from fivefold.layout.stages import stages_of
from fivefold.plan.cost.dispatch import Rows, even_rows
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Block, Matmul, block


def rank_flops(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, *, pp: int = 0, tp: int = 0, rows: Rows | None = None
) -> float:
    """Of the rank at those places; ranks along dp and cp do the same. `rows` are those that go to experts and come to
    this rank's, of each layer and microbatch; None: as many."""
    tokens = batch // layout.size("batch") * (seq // layout.cp)
    stages = stages_of(spec, layout, seq)
    mine = [stages[number] for number in layout.placement.of_rank[pp]]
    layers = [layer for stage in mine for layer in stage.layers]
    found = 3 * 2.0 * spec.hidden * len(chunk(spec.vocab, layout.tp, tp)) * any(stage.last for stage in mine) * tokens
    for dense in (True, False):
        if count := sum(spec.dense(layer) == dense for layer in layers):
            found += count * tokens * _each(spec, layout, seq, block(spec, layout.tp, dense))
    if spec.experts is None:
        return found
    sparse = [layer for layer in layers if not spec.dense(layer)]
    rows = even_rows(spec, layout, tokens // layout.microbatches, sparse, tp) if rows is None else rows
    passes = 4 if layout.recompute == "full" else 3
    for one in block(spec).matmuls:
        visits = sum(came for _, came in rows) if one.experts else 0
        if one.name == "router":  # every tp rank has a slice of the tokens
            visits = len(sparse) * layout.microbatches * len(chunk(tokens // layout.microbatches, layout.tp, tp))
        found += passes * 2.0 * one.inputs * one.outputs * visits
    return found


def _each(spec: ModelSpec, layout: Layout, seq: int, own: Block) -> float:
    """Of a token in a block, without the router and the experts that it chooses."""

    def flops(one: Matmul) -> float:
        part = layout.tp if one.tp == "whole" and layout.sp else 1
        return 2.0 * one.inputs * one.outputs / part

    every = [one for one in own.matmuls if not one.experts and one.name != "router"]
    matmuls, last = sum(map(flops, every)), own.matmuls[-1]
    attention = 4 * own.attention.keys(seq / 2) * own.attention.width  # values are padded to the keys' width
    each = 3 * matmuls + 3.5 * attention  # backward: two matmuls for each, and attention's five for two
    if layout.recompute == "full":
        # The block's last matmul is not made again, since nothing in backward needs its output; unless it is one step
        # with what follows it, a collective or a put-off weight gradient. An expert's is needed: it is weighted; and a
        # shared one's comes before it, where tokens travel meanwhile.
        needed = last.experts or (layout.ep > 1 and any(one.experts for one in own.matmuls))
        stops = layout.tp == 1 and not layout.splits_backward and not needed
        each += matmuls - (flops(last) if stops else 0.0) + attention
    return each
