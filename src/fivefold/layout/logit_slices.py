"""Slices of tokens whose logits are held at a time: head and loss compute by them, and the planner counts by them."""

from functools import lru_cache

from fivefold.layout.sharding import chunk

MAX_LOGITS = 2**28  # held at a time, about: half a GiB in bfloat16, and enough rows for a matmul to run at full speed
TILE_ROWS = 256  # of a matmul's tile


@lru_cache(maxsize=1024)
def slices(tokens: int, words: int) -> tuple[range, ...]:
    """Slices of the tokens whose logits, over `words` words, are held at a time: whole tiles, as even as possible."""
    tiles, parts = -(-tokens // TILE_ROWS), max(1, round(tokens * words / MAX_LOGITS))
    rows = (chunk(tiles, parts, index) for index in range(parts))
    parts_of_tokens = [range(part.start * TILE_ROWS, min(part.stop * TILE_ROWS, tokens)) for part in rows if len(part)]
    return tuple(parts_of_tokens) or (range(0),)
