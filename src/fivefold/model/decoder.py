"""The decoder: Llama, Qwen3 and GPT blocks, as the papers draw them.

Shapes: B batch, S sequence, E hidden, H heads, K kv heads, D head dim, F feed-forward, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.layout import Recompute
from fivefold.model import rope
from fivefold.model.dropout import Dropout
from fivefold.model.place import Place
from fivefold.model.recompute import recomputed
from fivefold.spec import ModelSpec

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def norm(spec: ModelSpec, width: int) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=spec.norm_eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head_dim, width = spec.head_dim, spec.heads * spec.head_dim
        self.q = nn.Linear(spec.hidden, width, bias=spec.bias)
        self.k = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.o = nn.Linear(width, spec.hidden, bias=spec.bias)
        self.grouped = spec.kv_heads < spec.heads

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        q = self.q_norm(self.heads(self.q(x)))  # [B, H, S, D]
        k = self.k_norm(self.heads(self.k(x)))  # [B, K, S, D]
        v = self.heads(self.v(x))
        if rotation is not None:
            q, k = rope.rotate(q, *rotation), rope.rotate(k, *rotation)
        seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        return self.o(seen.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, heads x D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Gated (SwiGLU, arXiv 2002.05202) or plain, by the activation's name."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=spec.bias) if spec.activation == "swiglu" else None
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=spec.bias)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=spec.bias)
        self.activation = _ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, layer: int, seed: int):
        super().__init__()
        self.attention_norm = norm(spec, spec.hidden)
        self.attention = Attention(spec)
        self.attention_dropout = Dropout(spec.dropout, seed, f"layers.{layer}.attention")
        self.mlp_norm = norm(spec, spec.hidden)
        self.mlp = MLP(spec)
        self.mlp_dropout = Dropout(spec.dropout, seed, f"layers.{layer}.mlp")

    def forward(self, x: Tensor, place: Place, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotation, mask), place)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), place)


class Decoder(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out. Parameter names are those of `spec.parameters()`."""

    def __init__(self, spec: ModelSpec, recompute: Recompute = "none", seed: int = 0):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.positions = nn.Embedding(spec.context, spec.hidden) if spec.positions == "learned" else None
        self.dropout = Dropout(spec.dropout, seed, "embedding")
        self.layers = nn.ModuleList(Block(spec, layer, seed) for layer in range(spec.layers))
        self.norm = norm(spec, spec.hidden)
        self.head = None if spec.tied else nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.run_block = recomputed(recompute)
        self._rotations = torch.empty(0)

    def forward(self, tokens: Tensor, place: Place | None = None) -> Tensor:
        place = place or Place.of(tokens)
        rotation, mask = self.rotation(place), place.mask()
        x = self.embedding(tokens)  # [B, S, E]
        if self.positions is not None:
            x = x + self.positions(place.positions)
        x = self.dropout(x, place)
        for block in self.layers:
            x = self.run_block(block, x, place, rotation, mask)
        return F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)

    def rotation(self, place: Place) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of every token's angles, [B, 1, S, D/2], from a table made once, on the CPU."""
        if self.spec.positions != "rope":
            return None
        dtype = torch.float64 if self.embedding.weight.dtype == torch.float64 else torch.float32
        table = self._rotations
        if table.shape[0] < place.length or table.dtype != dtype or table.device != place.positions.device:
            self._rotations = table = rope.tables(self.spec, place.length).to(place.positions.device, dtype)
        cos, sin = table[place.positions].unbind(2)
        return cos[:, None], sin[:, None]
