"""Ranks: which one this is, how they start, and who is blamed when one ends."""
