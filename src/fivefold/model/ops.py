"""The ops in which the decoder is written, on one device; `parallel/` implements them across ranks."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model import kernels
from fivefold.model.cache import LayerCache
from fivefold.model.dispatch import LocalDispatch
from fivefold.model.fp8 import fp8_linear
from fivefold.model.kernels import Tiles
from fivefold.model.layers import TokenPositions, apply_norm
from fivefold.model.linear_cross_entropy import Targets, Vocabulary, linear_cross_entropy
from fivefold.model.masks import DocumentMask, PackedSpans
from fivefold.model.rope import Rotation
from fivefold.model.sliding_window import WindowMask


class MixerInputs(NamedTuple):
    """What a mixer is given beside the stream: of all tokens that it has on this rank."""

    positions: TokenPositions
    rotation: Rotation | None = None  # of rotary positions
    mask: Any = None  # what the mixer's own `mask(positions, dtype)` has made, once for all layers of its kind
    cache: LayerCache | None = None  # of its layer, where text is generated: what it has kept of earlier tokens


# The masks of `LocalAttention`; None: plain causal.
AttentionMask = WindowMask | DocumentMask | PackedSpans | Tiles | Tensor | None


class AttentionOps(Protocol):
    """Attention on one device (`LocalAttention`), over cp (`ContextParallel`), or of later tokens to cached ones.

    Masks are of any type: only `attend` of the same object reads what `attention_mask` returns.
    """

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor: ...


class LocalAttention:
    """Causal attention on one device, with documents, a sliding window, and sinks."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> AttentionMask:
        """The mask that `attend` takes, if it computes in `dtype`; built once for all layers with this window, and
        outside of their graphs.

            layer     documents  device, dtype               mask
            window    any        any                         WindowMask
            sinks     no         any                         None
            sinks     yes        any                         DocumentMask
            neither   no         cuda in deterministic mode  Tiles, if they cover the length; else None
            neither   no         any other                   None
            neither   yes        cuda, 16 bits               PackedSpans
            neither   yes        any other                   a bool tensor of all scores, [B, 1, S, S]

        With a window or sinks, attention is computed by the kernels that return the log-sum-exp.
        """
        device = positions.position_ids.device
        if window:
            places, documents = np.arange(positions.position_ids.shape[1]), positions.host_documents()
            return WindowMask.of(places, places, None if documents is None else (documents, documents), window, device)
        if sinks:
            return None if positions.documents is None else kernels.document_spans(positions)
        if positions.documents is None:
            tiled = kernels.uses_deterministic_tiles(device, positions.length)
            return kernels.causal_tiles(device, positions.length) if tiled else None
        if kernels.flash_supports(device, dtype):
            return kernels.document_spans(positions).packed
        return positions.mask()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]; no mask means causal. `sinks` [H]: a logit for each
        head, in addition to its scores."""
        if sinks is not None or isinstance(mask, (WindowMask, DocumentMask)):
            return kernels.Attend.apply(q, k, v, mask, sinks)
        if isinstance(mask, PackedSpans):
            return kernels.packed_attention(q, k, v, mask)
        if isinstance(mask, Tiles):
            if kernels.fit_tiles(q, mask):
                return kernels.attend_tiles(q, k, v, mask)
            mask = None  # tiles are always plain causal (`causal_tiles`), so no mask says the same
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


class LocalOps:
    """The decoder's ops on one device; subclasses override those that differ across ranks.

    A block computes everything that ranks may share through its ops: with its linears, embeddings and norms as
    arguments, and any other parameter by `weight`. So the same block runs under any tp, sp, cp and ep. The contract of
    a subclass:

    - Its results and gradients, over all ranks, equal this class's up to rounding.
    - Between ops, x is the residual stream [B, S, E] of this rank's tokens (under sp part of them), or the heads and
      columns of this rank, for all tokens. `column_parallel` goes from the former to the latter, `row_parallel` back.
    - A module holds a parameter whole or as this rank's shard: `shard_parameters` makes it so, `weight` reads it.
    """

    sharded = False  # whether weights are DTensors

    def __init__(
        self,
        *,
        attention: AttentionOps | None = None,
        dispatch: LocalDispatch | None = None,
        compiled: bool = False,
        fp8: bool = False,
        graph_breaks: bool = False,
    ):
        """`dispatch` sends tokens to experts; `compiled`: blocks and the loss are compiled; `fp8`: blocks' matmuls are
        in 8-bit floats; `graph_breaks`: a compiled block is several graphs."""
        self.attention = attention or LocalAttention()
        self.dispatch = dispatch or LocalDispatch()
        self.compiled, self.fp8, self.graph_breaks = compiled, fp8, graph_breaks

    def run_eagerly(self, *names: str) -> None:
        """Keep these ops out of the graphs of a compiled block: they run between them."""
        if not self.compiled:
            return  # all ops run eagerly
        for name in names:
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def shard_parameters(self, model: nn.Module) -> None:
        """Replace the parameters of a model on the meta device by this rank's shards."""
        self.dispatch.shard_parameters(model)

    def weight(self, module: nn.Module, name: str = "weight") -> Tensor:
        """A parameter, or this rank's shard of it."""
        return getattr(module, name)

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        """Rows of the vocabulary's embedding table; [B, S] -> [B, S, E]."""
        return table(tokens)

    def position_embedding(self, table: nn.Embedding, positions: Tensor) -> Tensor:
        """Rows of the table of learned positions: small and replicated."""
        return table(positions)

    def residual_positions(self, positions: TokenPositions) -> TokenPositions:
        """The positions of this rank's tokens of the residual stream."""
        return positions

    def norm(self, module: nn.Module, x: Tensor) -> Tensor:
        bias = self.weight(module, "bias") if hasattr(module, "bias") else None
        return apply_norm(module, x, self.weight(module), bias)

    def norm_of_all_heads(self, q_norm: nn.RMSNorm, q: Tensor, k_norm: nn.RMSNorm, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, S, H x D] and k [B, S, K x D], each over the features of all its heads."""
        return self.norm(q_norm, q), self.norm(k_norm, k)

    def column_parallel(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Linears that read the same input."""
        return tuple(self.linear(x, linear) for linear in linears)

    def row_parallel(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """A linear that writes into the residual stream."""
        return self.linear(x, linear)

    def replicated_linear(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Linears from the residual stream to latents, which are narrow and the same for all heads. On one rank they
        are like other linears, also of a subclass that defers their gradients."""
        return self.column_parallel(x, *linears)

    def gather_latents(self, latents: Tensor) -> Tensor:
        """Latents of this rank's tokens -> latents of all tokens for which it computes heads."""
        return latents

    def latent_up_projection(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Linears from latents to heads."""
        return self.column_parallel(x, *linears)

    def linear(self, x: Tensor, module: nn.Linear) -> Tensor:
        """A linear with all of its weight on this rank."""
        return fp8_linear(x, module.weight, module.bias) if self.fp8 else module(x)

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """The mask that `attend` takes; built once for all layers with this window."""
        return self.attention.attention_mask(positions, window, sinks=sinks, dtype=dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]."""
        return self.attention.attend(q, k, v, mask, sinks)

    def logits(self, x: Tensor, table: nn.Linear | nn.Embedding) -> Tensor:
        """[B, S, E] -> [B, S, V]; the table is the head, or the embedding where they are tied."""
        return F.linear(x, table.weight)

    def loss(self, x: Tensor, table: nn.Linear | nn.Embedding, targets: Targets) -> Tensor:
        """[B, S, E] -> the sum of the losses; only a slice of the logits is held at a time."""
        return linear_cross_entropy(x, table.weight, targets, Vocabulary(table.weight.shape[0]), compile=self.compiled)
