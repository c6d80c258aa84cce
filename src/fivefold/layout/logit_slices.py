"""Slices of tokens whose logits are held at a time: head and loss compute by them, and the planner counts by them."""

from functools import lru_cache

from fivefold.layout.sharding import chunk

MAX_LOGITS = 2**28  # held at a time, about: half a GiB in bfloat16, and enough rows for a matmul to run at full speed
TILE_ROWS = 256  # of a matmul's tile


def slices(tokens: int, words: int) -> tuple[range, ...]:
    """Slices of the tokens whose logits, over `words` words, are held at a time: whole tiles, as even as possible."""
    return _slices(tokens, words, MAX_LOGITS, TILE_ROWS)


@lru_cache(maxsize=1024)
def _slices(tokens: int, words: int, max_logits: int, tile_rows: int) -> tuple[range, ...]:
    tiles, parts = -(-tokens // tile_rows), max(1, round(tokens * words / max_logits))
    rows = (chunk(tiles, parts, index) for index in range(parts))
    parts_of_tokens = [range(part.start * tile_rows, min(part.stop * tile_rows, tokens)) for part in rows if len(part)]
    return tuple(parts_of_tokens) or (range(0),)
