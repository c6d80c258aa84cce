"""Ranks: which one this process is, how ranks start and meet, and which one explains a failure."""
