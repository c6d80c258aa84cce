"""Helpers for all rooms: errors, formatting, reading of tables, files."""
