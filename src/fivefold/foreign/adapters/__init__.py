"""Adapters that ship, each a page to copy: `fivefold verify --adapter huggingface`."""
