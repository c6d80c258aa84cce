"""Watchers: what goes wrong in mid-run without ending it, and what is done about it."""
