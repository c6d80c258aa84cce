"""Keys and values of earlier tokens, so that each new one costs one token's work."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.model.positions import TokenPositions


class Cache:
    """Attention that also sees the earlier tokens. Blocks attend in turn, the same ones every time."""

    def __init__(self, length: int):
        """`length`: the most tokens that there will be."""
        self.length = length
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.turn = 0

    def forget(self) -> None:
        self.kept = []

    def attention_mask(self, positions: TokenPositions) -> int:
        """How many tokens came before."""
        self.turn = 0
        return int(positions.position_ids[0, 0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        first, last = mask, mask + q.shape[2]
        if self.turn == len(self.kept):
            room = k.new_empty(*k.shape[:2], self.length, k.shape[3])
            self.kept.append((room, torch.empty_like(room)))
        keys, values = self.kept[self.turn]
        self.turn += 1
        keys[:, :, first:last], values[:, :, first:last] = k, v
        keys, values = keys[:, :, :last], values[:, :, :last]
        mask = None
        if first and q.shape[2] > 1:
            places = torch.arange(last, device=q.device)
            mask = places[first:, None] >= places[None, :]
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, mask, is_causal=first == 0, enable_gqa=grouped)
