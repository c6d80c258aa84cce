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
from fivefold.model.layers import TokenPositions, normed
from fivefold.model.linear_cross_entropy import Targets, Vocabulary, linear_cross_entropy
from fivefold.model.masks import PackedSpans
from fivefold.model.rope import Rotation
from fivefold.model.windows import WindowMask


class MixerInputs(NamedTuple):
    """What a mixer is given beside the stream: of all tokens that it has on this rank."""

    positions: TokenPositions
    rotation: Rotation | None = None  # of rotary positions
    mask: Any = None  # what the mixer's own `mask(positions, dtype)` has made, once for all layers of its kind
    cache: LayerCache | None = None  # of its layer, where text is generated: what it has kept of earlier tokens


class AttentionOps(Protocol):
    """Attention on one device (`LocalAttention`), over cp (`ContextParallel`), or of later tokens to cached ones."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor: ...


class LocalAttention:
    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """The mask that `attend` takes, if it computes in `dtype`; built once for all layers with this window, and
        outside of their graphs.

        With `sinks` or a window, attention is computed by the kernels that return the log-sum-exp.
        """
        device = positions.position_ids.device
        if window:
            places, documents = np.arange(positions.position_ids.shape[1]), positions.host_documents()
            return WindowMask.of(places, places, None if documents is None else (documents, documents), window, device)
        if sinks:
            return None if positions.documents is None else kernels.document_spans(positions)
        if positions.documents is None:
            tiled = kernels.wants_tiles(device, positions.length)
            return kernels.causal_tiles(device, positions.length) if tiled else None
        flash = device.type == "cuda" and dtype in kernels.HALF
        return kernels.document_spans(positions).packed if flash else positions.mask()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]; no mask means causal. `sinks` [H]: a logit for each
        head, in addition to its scores."""
        if sinks is not None or isinstance(mask, WindowMask):
            return kernels.Attend.apply(q, k, v, sinks, mask)
        if isinstance(mask, PackedSpans):
            return kernels.packed_attention(q, k, v, mask)
        if isinstance(mask, Tiles):
            if kernels.fit_tiles(q, mask):
                return kernels.attend_tiles(q, k, v, mask)
            mask = None
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


class LocalOps:
    sharded = False  # whether weights are DTensors

    def __init__(
        self,
        *,
        attention: AttentionOps | None = None,
        dispatch: LocalDispatch | None = None,
        compiled: bool = False,
        fp8: bool = False,
        breaks: bool = False,
    ):
        """`dispatch` sends tokens to experts; `compiled`: blocks and the loss are; `fp8`: blocks' matmuls are in 8-bit
        floats; `breaks`: a compiled block is several graphs."""
        self.attention = attention or LocalAttention()
        self.dispatch = dispatch or LocalDispatch()
        self.compiled, self.fp8, self.breaks = compiled, fp8, breaks

    def between_graphs(self, *names: str) -> None:
        """Run these ops eagerly, between the graphs of a compiled block."""
        for name in names if self.compiled else ():
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def adopt(self, model: nn.Module) -> None:
        """Replace the parameters of a model on the meta device by this rank's shards."""
        self.dispatch.adopt(model)

    def weight(self, module: nn.Module, kind: str = "weight") -> Tensor:
        """A parameter, or this rank's shard of it."""
        return getattr(module, kind)

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        """Rows of the vocabulary's embedding table; [B, S] -> [B, S, E]."""
        return table(tokens)

    def look_up(self, table: nn.Embedding, places: Tensor) -> Tensor:
        """Rows of a small, replicated table (learned positions)."""
        return table(places)

    def residual(self, positions: TokenPositions) -> TokenPositions:
        """The positions of this rank's tokens of the residual stream."""
        return positions

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return normed(norm, x, self.weight(norm), self.weight(norm, "bias") if hasattr(norm, "bias") else None)

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
        """Linears from the residual stream to latents, which are narrow and the same for all heads."""
        return self.column_parallel(x, *linears)

    def gather_latents(self, latents: Tensor) -> Tensor:
        """Latents of this rank's tokens -> those of all tokens for which it computes heads."""
        return latents

    def up_projection(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Linears from latents to heads."""
        return self.column_parallel(x, *linears)

    def linear(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """A linear with all of its weight on this rank."""
        return fp8_linear(x, linear.weight, linear.bias) if self.fp8 else linear(x)

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """The mask that `attend` takes; built once for all layers with this window."""
        return self.attention.attention_mask(positions, window, sinks, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]."""
        return self.attention.attend(q, k, v, mask, sinks)

    def logits(self, x: Tensor, table: nn.Linear | nn.Embedding) -> Tensor:
        """[B, S, E] -> [B, S, V]; the table is the head, or the embedding where they are tied."""
        return F.linear(x, table.weight)

    def loss(self, x: Tensor, table: nn.Linear | nn.Embedding, targets: Targets) -> Tensor:
        """[B, S, E] -> the sum of the losses; only a slice of the logits is held at a time."""
        return linear_cross_entropy(x, table.weight, targets, Vocabulary(table.weight.shape[0]), compile=self.compiled)
