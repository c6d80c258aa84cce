"""Latent attention (MLA): what it moves beside its products, and how wide its scores' products are."""

from fivefold.plan.cost.stack import Stack
from fivefold.spec.model import ModelSpec


def copied(spec: ModelSpec, stack: Stack, tp: int) -> float:
    """Bytes a token, of 2-byte activations: keys are put together of their two parts, and values padded to them."""
    if spec.mla is None:
        return 0.0
    mla, heads = spec.mla, spec.heads // tp
    keys = (mla.nope_dim + mla.head_dim) * heads
    values = (mla.v_dim + mla.head_dim) * heads if stack.pads_values else 0
    queries = 2 * mla.head_dim * heads  # rotated in part, and put together again
    return 2.0 * (keys + values + queries)


def score_dim(spec: ModelSpec, stack: Stack, head_dim: int, v_dim: int) -> float:
    """The mean of what queries meet keys with and what values have: half of each product's FLOPs."""
    return head_dim if spec.mla is None or stack.pads_values else (head_dim + v_dim) / 2


def remade(spec: ModelSpec, tokens: int, tp: int) -> list[tuple[int, int, int]]:
    """Rows, columns and inner dimension of the products that make heads of latents."""
    if spec.mla is None:
        return []
    mla, heads = spec.mla, spec.heads // tp
    queries = [(tokens, heads * mla.head_dim, mla.q_rank)] if mla.q_rank else []
    return [*queries, (tokens, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)]
