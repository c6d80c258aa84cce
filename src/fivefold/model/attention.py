"""The attention of a block: grouped-query attention, or latent attention (MLA), written in ops (`ops.py`).

Shapes: B batch, S sequence, E hidden, H heads, K kv heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.layers import Linear, TokenPositions
from fivefold.model.ops import LocalOps, MixerInputs
from fivefold.model.rope import apply_rotary
from fivefold.spec import mixers
from fivefold.spec.blocks import Yarn
from fivefold.spec.model import ModelSpec

LATENT_EPS = 1e-6  # of DeepSeek's norms of latents; other norms have `norm_eps`


def _qk_norm(spec: ModelSpec, heads: int) -> nn.RMSNorm | None:
    """The norm of queries or keys, over one head or (OLMoE) over all heads."""
    width = spec.head_dim * (heads if spec.qk_norm_over == "all" else 1)
    return nn.RMSNorm(width, eps=spec.norm_eps) if spec.qk_norm else None


class Attention(nn.Module):
    def __init__(self, kind: mixers.GroupedQueryAttention, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        self.ops, self.window = ops, kind.window
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        self.head_dim, width, self.interleaved = spec.head_dim, spec.heads * spec.head_dim, spec.rope_interleaved
        qkv_bias = spec.bias or spec.qkv_bias
        self.q = Linear(spec.hidden, width, bias=qkv_bias)
        self.k = Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.v = Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.q_norm, self.k_norm = (_qk_norm(spec, heads) for heads in (spec.heads, spec.kv_heads))
        self.norm_of_all_heads = spec.qk_norm_over == "all"
        self.o = Linear(width, spec.hidden, bias=spec.bias)

    def mask(self, positions: TokenPositions, dtype: torch.dtype) -> Any:
        return self.ops.attention_mask(positions, self.window, sinks=self.sinks is not None, dtype=dtype)

    def forward(self, x: Tensor, shared: MixerInputs) -> Tensor:
        rotation, mask = shared.rotation, shared.mask
        q, k, v = self.ops.column_parallel(x, self.q, self.k, self.v)
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.norm_of_all_heads:
            q, k = self.ops.norm_of_all_heads(q_norm, q, k_norm, k)
        q, k, v = (self.heads(y) for y in (q, k, v))  # [B, H, S, D], K for k and v
        if q_norm is not None and k_norm is not None and not self.norm_of_all_heads:
            q, k = self.ops.norm(q_norm, q), self.ops.norm(k_norm, k)
        if rotation is not None:
            q, k = (apply_rotary(x, *rotation, self.interleaved) for x in (q, k))
        if shared.cache is not None:
            k, v = shared.cache.extend(k, v, dim=2, last=self.window - 1 if self.window else None)
        sinks = None if self.sinks is None else self.ops.weight(self, "sinks")
        out = self.ops.attend(q, k, v, mask, sinks)
        return self.ops.row_parallel(out.transpose(1, 2).flatten(2), self.o)

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, heads x D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LatentAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv 2405.04434): heads are projected from a latent of queries and one of keys and values.

    Shapes: N and R dims of a head without and with rotary positions, D = N + R; V dims of its value.
    """

    def __init__(self, kind: mixers.MultiHeadLatentAttention, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        assert spec.mla is not None
        self.ops, self.mla, self.interleaved = ops, spec.mla, spec.rope_interleaved
        self.scale = spec.rope_scaling.score_scale if isinstance(spec.rope_scaling, Yarn) else 1.0
        mla, width = spec.mla, spec.heads * spec.mla.head_dim
        self.q = None if mla.q_rank else Linear(spec.hidden, width, bias=False)
        self.q_down = Linear(spec.hidden, mla.q_rank, bias=False) if mla.q_rank else None
        self.q_norm = nn.RMSNorm(mla.q_rank, eps=LATENT_EPS) if mla.q_rank else None
        self.q_up = Linear(mla.q_rank, width, bias=False) if mla.q_rank else None
        self.kv_down = Linear(spec.hidden, mla.cached, bias=False)
        self.kv_norm = nn.RMSNorm(mla.kv_rank, eps=LATENT_EPS)
        self.kv_up = Linear(mla.kv_rank, spec.heads * (mla.nope_dim + mla.v_dim), bias=False)
        self.o = Linear(spec.heads * mla.v_dim, spec.hidden, bias=False)

    def mask(self, positions: TokenPositions, dtype: torch.dtype) -> Any:
        return self.ops.attention_mask(positions, dtype=dtype)

    def forward(self, x: Tensor, shared: MixerInputs) -> Tensor:
        mla, rotation, mask = self.mla, shared.rotation, shared.mask
        assert rotation is not None
        q, latent, shared_key = self.latents(x)
        q_nope, q_rope = self.heads(q, mla.nope_dim, mla.rope_dim)
        k_rope = apply_rotary(shared_key[:, None], *rotation, self.interleaved)  # [B, 1, S, R]
        if shared.cache is not None:  # it holds latents, of which keys and values are computed again
            latent, k_rope = shared.cache.extend(latent[:, None], k_rope, dim=2)
            latent = latent[:, 0]
        (kv,) = self.ops.latent_up_projection(latent, self.kv_up)
        k_nope, v = self.heads(kv, mla.nope_dim, mla.v_dim)
        q = torch.cat((q_nope, apply_rotary(q_rope, *rotation, self.interleaved)), dim=-1) * self.scale
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        out = self.ops.attend(q, k, F.pad(v, (0, mla.head_dim - mla.v_dim)), mask)[..., : mla.v_dim]
        return self.ops.row_parallel(out.transpose(1, 2).flatten(2), self.o)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H x D], the latent of keys and values [B, S, kv_rank], the rotary key [B, S, R]."""
        ops, sizes = self.ops, [self.mla.kv_rank, self.mla.rope_dim]
        if self.q_down is None or self.q_norm is None or self.q_up is None:
            assert self.q is not None
            (q,), (kv,) = ops.column_parallel(x, self.q), ops.replicated_linear(x, self.kv_down)
            latent, shared_key = kv.split(sizes, dim=-1)
            return q, *ops.gather_latents(torch.cat((ops.norm(self.kv_norm, latent), shared_key), dim=-1)).split(
                sizes, dim=-1
            )
        q, kv = ops.replicated_linear(x, self.q_down, self.kv_down)
        latent, shared_key = kv.split(sizes, dim=-1)
        parts = ops.norm(self.q_norm, q), ops.norm(self.kv_norm, latent), shared_key
        q, latent, shared_key = ops.gather_latents(torch.cat(parts, dim=-1)).split([self.mla.q_rank, *sizes], dim=-1)
        return *ops.latent_up_projection(q, self.q_up), latent, shared_key

    def heads(self, x: Tensor, *dims: int) -> tuple[Tensor, ...]:
        """[B, S, heads x sum of dims] -> [B, heads, S, dim] each"""
        return x.unflatten(-1, (-1, sum(dims))).transpose(1, 2).split(dims, dim=-1)
