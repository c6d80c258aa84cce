"""FLOPs that a rank executes in a step: matmuls and attention, recomputed ones too, a causal mask's half left out."""

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk
from fivefold.layout.stages import stages_of
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block


def rank_flops(spec: ModelSpec, layout: Layout, seq: int, batch: int, *, pp: int = 0, tp: int = 0) -> float:
    """Of the rank at those places; ranks along dp and cp do the same."""
    tokens = batch // layout.size("batch") * (seq // layout.cp)
    stages = stages_of(spec, layout, seq)
    mine = [stages[number] for number in layout.placement.of_rank[pp]]
    layers = sum(len(stage.layers) for stage in mine)
    own = block(spec, layout.tp)
    matmuls, attention = 2.0 * own.weights, own.attention.flops(seq / 2)
    each = 3 * matmuls + 3.5 * attention  # backward: two matmuls for each, and attention's five for two
    if layout.recompute == "full":
        # The block's last matmul is not made again, since nothing in backward needs its output; unless it is one step
        # with what follows it, a collective or a put-off weight gradient.
        stops = layout.tp == 1 and not layout.splits_backward
        each += matmuls - (2.0 * own.matmuls[-1].size if stops else 0.0) + attention
    head = 0.0
    if any(stage.last for stage in mine):
        head = 3 * 2.0 * spec.hidden * len(chunk(spec.vocab, layout.tp, tp))
    return tokens * (layers * each + head)
