"""FLOPs that a rank executes in a step: products and attention, recomputed ones too, a causal mask's half left out."""

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import kv_head
from fivefold.layout.stages import stages_of
from fivefold.spec.model import ModelSpec


def rank_flops(spec: ModelSpec, layout: Layout, seq: int, batch: int, *, pp: int = 0, tp: int = 0) -> float:
    """Of the rank at those places; ranks along dp and cp do the same."""
    tokens = batch // layout.dp * (seq // layout.cp)
    stages = stages_of(spec, layout, seq)
    mine = [stages[number] for number in layout.placement.of_rank[pp]]
    layers = sum(len(stage.layers) for stage in mine)
    products, attention, last = _block(spec, layout, seq, tp)
    block = 3 * products + 3.5 * attention  # backward: two products for each, and attention's five for two
    if layout.recompute == "full":
        # The block's last product is not made again, since nothing in backward needs its output; unless it is one step
        # with what follows it, a collective or a put-off weight gradient.
        stops = layout.tp == 1 and not layout.splits_backward
        block += products - (last if stops else 0.0) + attention
    head = 0.0
    if any(stage.last for stage in mine):
        rows = max(0, min(spec.vocab, (tp + 1) * -(-spec.vocab // layout.tp)) - tp * -(-spec.vocab // layout.tp))
        head = 3 * 2.0 * spec.hidden * rows
    return tokens * (layers * block + head)


def _block(spec: ModelSpec, layout: Layout, seq: int, tp: int) -> tuple[float, float, float]:
    """Forward FLOPs of a token: all products of a block, attention, and of the products the last."""
    t = layout.tp
    heads, kv = spec.heads // t * spec.head_dim, len(kv_head(spec, layout, tp)) * spec.head_dim
    gated = 2 if spec.activation == "swiglu" else 1
    last = 2.0 * spec.hidden * spec.ffn / t
    products = 2.0 * spec.hidden * (2 * heads + 2 * kv) + gated * last + last
    return products, 2.0 * seq * heads, last
