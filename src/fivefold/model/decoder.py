"""The decoder: Llama, Qwen and GPT blocks, as the papers draw them.

Shapes: B batch, S sequence, E hidden, H heads, K kv heads, D head dim, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.layout.layout import Recompute
from fivefold.layout.stages import Stage
from fivefold.model import init
from fivefold.model.attention import self_attention
from fivefold.model.layers import ACTIVATIONS, Linear, TokenPositions, accum_dtype, gated
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.load_balancing import UNBALANCED, Balance
from fivefold.model.moe import MoE, RouterStats
from fivefold.model.ops import LocalOps
from fivefold.model.recompute import compiled, recomputed
from fivefold.model.rope import Rotation, rope_cache
from fivefold.spec.model import ModelSpec

NO_RECOMPUTE = recomputed("none")


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Skipped on the meta device, as for `Linear`."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Dropout(nn.Module):
    """Dropout of the residual stream, [B, S, E]; the identity in eval mode and at rate 0.

    The mask is a function of (seed, layer, sample, position, feature), so it is the same in every layout.
    """

    def __init__(self, rate: float, seed: int, name: str):
        super().__init__()
        self.rate, self.key = rate, init.random_key(seed, "dropout", name)

    def forward(self, x: Tensor, positions: TokenPositions) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        features = torch.arange(-(-x.shape[-1] // 4), device=x.device)
        sample, position = positions.samples[:, None, None], positions.position_ids[..., None]
        mask = init.dropout_mask(self.key, 1.0 - self.rate, features, position, sample, sample >> 32)
        return x * (mask.flatten(-2)[..., : x.shape[-1]].to(x.dtype) / (1.0 - self.rate))


def norm(spec: ModelSpec, width: int) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=spec.norm_eps)


def _compiled_run(recompute: Recompute, ops: LocalOps) -> Callable[..., Tensor]:
    """The compiled `run` of a block. One graph can contain its recomputation; a block of several graphs cannot, nor one
    with sharded weights (in torch 2.13 PyTorch would run it eagerly). There checkpointing is around the graphs."""
    if recompute == "selective" and ops.breaks:
        return recomputed(recompute)  # eager: it selects by operator, and sees none inside graphs
    if recompute == "full" and (ops.sharded or ops.breaks):
        return partial(recomputed("full"), compiled(recomputed("none")))
    return compiled(recomputed(recompute, compile=True))


class MLP(nn.Module):
    """A feed-forward network, gated or plain as its activation says."""

    def __init__(self, spec: ModelSpec, ops: LocalOps, width: int = 0):
        """`width`: in place of the model's `ffn`."""
        super().__init__()
        self.ops, width = ops, width or spec.ffn
        self.gate = Linear(spec.hidden, width, bias=spec.bias) if gated(spec.activation) else None
        self.up = Linear(spec.hidden, width, bias=spec.bias)
        self.down = Linear(width, spec.hidden, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.ops.row_parallel(self.activation(*self.ops.column_parallel(x, self.up)), self.down)
        return self.ops.row_parallel(self.activation(*self.ops.column_parallel(x, self.gate, self.up)), self.down)


def mixture(spec: ModelSpec, ops: LocalOps, balance: Balance) -> MoE:
    """A mixture of experts, with a shared expert if the model has one."""
    assert spec.experts is not None
    return MoE(spec, ops, MLP(spec, ops, spec.experts.shared_ffn) if spec.experts.shared else None, balance)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: LocalOps,
        layer: int,
        seed: int,
        run: Callable[..., Tensor] = NO_RECOMPUTE,
        balance: Balance = UNBALANCED,
    ):
        """`run` calls `steps`: directly, with activation recompute, or compiled."""
        super().__init__()
        self.ops, self.run = ops, run
        self.attention_norm = norm(spec, spec.hidden)
        self.attention = self_attention(spec, ops, layer)
        self.attention_dropout = Dropout(spec.dropout, seed, f"layers.{layer}.attention")
        self.mlp_norm = norm(spec, spec.hidden)
        self.mlp = MLP(spec, ops) if spec.dense(layer) else mixture(spec, ops, balance)
        self.mlp_dropout = Dropout(spec.dropout, seed, f"layers.{layer}.mlp")

    def forward(self, x: Tensor, positions: TokenPositions, rotation: Rotation | None, mask: Any) -> Tensor:
        """`positions` is that of x's tokens; `rotation` and `mask` are those of all tokens that attention has here."""
        x, stats = self.run(self.steps, x, positions, rotation, mask)
        if self.training and isinstance(self.mlp, MoE):
            self.mlp.count(stats)
        return x

    def steps(
        self, x: Tensor, positions: TokenPositions, rotation: Rotation | None, mask: Any
    ) -> tuple[Tensor, RouterStats | None]:
        """The residual stream, and the router's statistics of its tokens."""
        y = self.attention(self.ops.norm(self.attention_norm, x), rotation, mask)
        x = x + self.attention_dropout(y, positions)
        normed = self.ops.norm(self.mlp_norm, x)
        y, stats = self.mlp(normed, positions) if isinstance(self.mlp, MoE) else (self.mlp(normed), None)
        return x + self.mlp_dropout(y, positions), stats


class Decoder(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out, or with targets the sum of the losses.

    Parameter names are those of `spec.parameters()`.
    `ops` compute a layer's steps, on this device or together with other ranks. With a `stage` it is a pipeline stage of
    the model: its input is the residual stream [B, S, E] unless it is the first, and so is its output unless it is the
    last.
    """

    def __init__(
        self,
        spec: ModelSpec,
        recompute: Recompute = "none",
        seed: int = 0,
        ops: LocalOps | None = None,
        stage: Stage | None = None,
        compile: bool = False,
        balance: Balance = UNBALANCED,
    ):
        super().__init__()
        stage = stage or Stage(0, range(spec.layers), first=True, last=True)
        self.spec, self.ops, self.stage = spec, ops or LocalOps(), stage
        embeds, learned = stage.first or (stage.last and spec.tied), stage.first and spec.positions == "learned"
        self.embedding = Embedding(spec.vocab, spec.hidden) if embeds else None
        self.positions = Embedding(spec.context, spec.hidden) if learned else None
        self.dropout = Dropout(spec.dropout, seed, "embedding")
        run = _compiled_run(recompute, self.ops) if compile else recomputed(recompute)
        self.layers = nn.ModuleDict({str(n): Block(spec, self.ops, n, seed, run, balance) for n in stage.layers})
        self.norm = norm(spec, spec.hidden) if stage.last else None
        self.head = Linear(spec.hidden, spec.vocab, bias=False) if stage.last and not spec.tied else None
        self._rotations = torch.empty(0)
        # Position ids, dtype and result of the last call: a cache for microbatches with the same positions.
        self._last_rotation: tuple[Tensor, torch.dtype, Rotation] | None = None

    def forward(self, x: Tensor, positions: TokenPositions | None = None, targets: Targets | None = None) -> Tensor:
        positions = positions or TokenPositions.of(x)
        residual = self.ops.residual(positions)  # positions of this rank's part of the residual stream
        if self.stage.first:
            assert self.embedding is not None
            x = self.ops.embed(self.embedding, x)  # [B, S, E]
            if self.positions is not None:
                x = x + self.ops.look_up(self.positions, residual.position_ids)
            x = self.dropout(x, residual)
        rotation, windows = self.rotation(positions, x.dtype), {n: self.spec.window_of(n) for n in self.stage.layers}
        mask_of = partial(self.ops.attention_mask, positions, sinks=self.spec.sinks, dtype=x.dtype)
        masks = {window: mask_of(window) for window in {*windows.values()}}
        for number, block in self.layers.items():
            x = block(x, residual, rotation, masks[windows[int(number)]])
        if self.norm is None:
            return x
        table = self.head or self.embedding
        assert table is not None
        x = self.ops.norm(self.norm, x)
        return self.ops.logits(x, table) if targets is None else self.ops.loss(x, table, targets)

    def rotation(self, positions: TokenPositions, compute: torch.dtype) -> Rotation | None:
        """Cosine and sine of every token's angles, [B, 1, S, D/2], from a table computed once, on the CPU."""
        if self.spec.positions != "rope":
            return None
        ids, dtype, table, last = positions.position_ids, accum_dtype(compute), self._rotations, self._last_rotation
        if last is not None and last[0] is ids and last[1] == dtype:
            return last[2]
        if table.shape[0] < positions.length or table.dtype != dtype or table.device != ids.device:
            self._rotations = table = rope_cache(self.spec, positions.length).to(ids.device, dtype)
        cos, sin = table[ids].unbind(2)
        self._last_rotation = ids, dtype, (cos[:, None], sin[:, None])
        return self._last_rotation[2]
